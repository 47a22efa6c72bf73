"""Measures real runs: timelines of steps, and times of computing and sending.

`record` returns the timeline of real steps, and `measure_costs` returns costs for `simulate`.
`examine` checks ranks and links before a run. Start with ``recording.py`` and
``stage_profile.py``.
"""
