"""Finds accesses to memory that are not ordered.

`checker` records a step on virtual streams. `clocks` decides whether two accesses are ordered.
`trace` receives torch's operators and events.
"""
