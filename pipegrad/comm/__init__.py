"""Ranks, groups, streams and threads: sends between ranks, and the protocol if a rank fails.

This folder does not depend on parameters, plans or stages. `agreement` runs a function on all
ranks, and all succeed or all fail. `failures` is the protocol for a failed step, `watch` ends a
job, and `waits` lets it end each wait. `comm_stream` runs collectives in parallel with the compute.
`sync_points` names each wait. `ending` stops threads and groups.
"""
