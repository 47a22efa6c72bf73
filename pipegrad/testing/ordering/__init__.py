"""Is everything ordered that must be?

`checker` records a step on the virtual streams of `backend`. `clocks` decides whether two accesses
are ordered. `trace` and `cuda_trace` listen to torch, and `replay` runs other orders.
"""
