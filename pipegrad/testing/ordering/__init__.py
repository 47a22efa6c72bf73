"""Is everything ordered that must be?

`checker` records a step on virtual streams. `clocks` decides whether two accesses are ordered.
`trace` listens to torch, and `replay` runs other orders.
"""
