"""What happens in and between the steps of a run, and where do its files go?

`run` makes the steps, `update` is the optimizer's, and `saving` writes checkpoints beside them.
`run_folder` is where files go, `origin` finds what a run goes on from, `tracing` records.
"""
