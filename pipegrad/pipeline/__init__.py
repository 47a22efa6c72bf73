"""What runs where?

`scheduler` is the page to read first. `steps` is one step from a batch to its result, item by item,
`cells` the forwards and backwards. `values` has the life of a value, and `transfers` sends it to
other ranks. `batch` cuts what a step is given, and `loss_message` is the loss of all ranks.
`split_backward` is the backward in two parts. `stage` is what users give.
"""
