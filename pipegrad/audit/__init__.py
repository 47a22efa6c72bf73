"""Is the gradient of somebody's pipeline the one of one process? And if not, why?

`audit.py` is to be read first: one step, watched on all ranks and compared on one.
"""

from pipegrad.audit.audit import Audit as Audit
from pipegrad.audit.report import Report as Report
from pipegrad.audit.runtimes import of_deepspeed as of_deepspeed
from pipegrad.audit.runtimes import of_megatron as of_megatron
from pipegrad.audit.runtimes import of_torch as of_torch
from pipegrad.audit.seen import before_clipping as before_clipping
