"""Ranks, groups, streams and threads: how is anything sent, and what if a rank fails?

This folder knows no parameter, no plan and no stage. `agreement` runs a function on all ranks, and
all succeed or all fail. `failures` is the protocol for a failed step, `watch` ends a job, and
`waits` lets it end each wait. `comm_stream` runs collectives beside the compute. `sync_points`
names each wait. `ending` stops threads and groups.
"""
