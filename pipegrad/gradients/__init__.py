"""The path of a gradient, from autograd to the optimizer and back.

Read `step` first: it has the verbs of a step with their contracts, the table of states and verbs,
and the code. `sync` has the verbs before and after a step; `set_up` makes the parts.
`bucket_memory` is the memory of gradients; `reducer` launches collectives in the order of the plan,
and `reductions` has one for each placement. `main_params` has the tensors that optimizers step, and
`param_sync` sends them to the ranks that hold the parameters. `drift` keeps copies equal, `norm`
clips.
"""
