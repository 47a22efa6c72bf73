"""What happens to a gradient, from autograd to the optimizer and back?

Read `sync` first: it has the verbs and their contracts. `state` has the table of states and verbs,
`step` the code of each verb. `negotiate` and `set_up` make the parts. `bucket_buffer` is the memory
of gradients; `reducer` launches collectives in the order of the plan, and `reductions` has one for
each placement. `main_params` has what optimizers step, and `param_sync` sends it to the ranks that
hold it. `drift` keeps copies equal, `norm` clips.
"""
