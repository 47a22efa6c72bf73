"""Who steps what, and how do updated parameters reach the other ranks?

`main_params` has the main parameters of a rank: parameters, shards of them, or master copies.
`named_optimizer` makes an optimizer of them, whose state has names of the uncut model. `param_sync`
sends updated parameters to all ranks that hold them.
"""
