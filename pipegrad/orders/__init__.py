"""Do orders that somebody has written end, and does each value arrive?

`reading` makes a Program of torch's, DeepSpeed's or Megatron's lists. `verification` proves it as
pipegrad's own Programs are proven, on the communicators that a user names, and says what is wrong.
"""

from pipegrad.orders.verification import Verdict, verify

__all__ = ["Verdict", "verify"]
