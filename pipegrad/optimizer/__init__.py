"""Who steps what, and how do parameters come back?

`main_params` has the main parameters of a rank: parameters, shards of them, or master copies.
`param_sync` sends updated parameters to all ranks that hold them.
"""
