"""Proves orders that other frameworks or your code have written, or reports their defects.

`reading` makes a Program of torch's, DeepSpeed's or Megatron's lists. `verification` proves that it
ends and that each value arrives, as for pipegrad's own Programs, on the communicators that you
name.
"""

from pipegrad.orders.verification import Verdict, verify

__all__ = ["Verdict", "verify"]
