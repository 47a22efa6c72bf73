"""Ranks, groups, streams and threads: how is anything sent, and what if a rank fails?

This folder knows no parameter, no plan and no stage. `agreement` is where all ranks settle
something or none does; `failures` is how they learn of a step that failed; `comm_stream` is where
collectives run beside the compute, `sync_points` names each wait, and `ending` stops it all.
"""
