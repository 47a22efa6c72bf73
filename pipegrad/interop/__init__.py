"""Code that depends on parts of torch that may change.

`torch_pipelining` attaches to torch's schedules, and `torch_schedule` reads them. `fsdp` follows
FSDP2. `private` has every private name of torch.
"""
