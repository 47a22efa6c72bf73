"""What of torch do we depend on?

`torch_pipelining` attaches to torch's schedules. `torch_schedule` reads them, and `torch_failure`
ends their failed steps. `fsdp` follows FSDP2. `private` has every private name of torch.
"""
