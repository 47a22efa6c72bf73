"""Is everything ordered that must be?

`checker` records what a step does on virtual streams and decides by `clocks` whether two accesses
are ordered; `trace` and `cuda_trace` are where it listens, `replay` runs other orders.
"""
