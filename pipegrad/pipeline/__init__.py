"""What runs where?

`scheduler` is the page to read first. `steps` is one step from a batch to its result, `executor`
runs a program item by item, and `compute` the forwards and backwards. `values` has the life of a
value, and `transfers` sends it to other ranks. `microbatch` cuts what a step is given.
`split_backward` is the backward in two parts. `stage` is what users give.
"""
