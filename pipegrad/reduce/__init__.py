"""How does a complete bucket leave?

`bucket_buffer` is the memory that gradients go to, `reducer` launches collectives in the order of
the plan, `reductions` is how each placement is reduced, and `pair_exchange` how two ranks do it
alone. `bucketer` is the same for tensors of one's own; `ddp_hooks` takes torch's hooks.
"""
