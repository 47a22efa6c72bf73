"""Who steps what, and how do parameters come back?

`main_params` is what the optimizer of a rank steps: the parameter itself, a shard or a copy.
`param_sync` sends what was stepped to all ranks that hold the parameter.
"""
