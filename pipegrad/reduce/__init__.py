"""How does a complete bucket leave?

`bucket_buffer` is the memory of gradients. `reducer` launches collectives in the order of the plan.
`reductions` has a reduction for each placement, and `pair_exchange` one for two ranks. `bucketer`
sums tensors that users pass to it. `ddp_hooks` runs torch's communication hooks.
"""
