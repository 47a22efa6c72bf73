"""The pipeline of one rank: its stages, its steps, and the transfers to other ranks.

Read `scheduler` first. `steps` runs one step from a batch to its result, item by item, and `cells`
runs the forwards and backwards. `values` follows a value from its producer to its consumers, and
`transfers` sends it to other ranks. `batch` cuts the inputs of a step, and `loss_message` collects
the loss of all ranks. `split_backward` runs a backward in two parts. `stage` defines the stages
that users pass.
"""
