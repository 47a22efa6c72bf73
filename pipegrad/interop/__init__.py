"""What of torch do we depend on?

`torch_pipelining` attaches to torch's schedules (`torch_schedule` reads them, `torch_failure` ends
a step of theirs that failed), `fsdp` follows FSDP2, and `private` has every private name of torch.
"""
