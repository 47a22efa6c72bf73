"""What did a run really do, and what do computing and sending really take?

`record` makes the timeline of real steps, `measure_costs` the costs that `simulate` takes, and
`examine` looks at ranks and links before a run. Start with ``recording.py`` and
``stage_profile.py``.
"""
