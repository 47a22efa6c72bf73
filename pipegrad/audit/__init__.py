"""Is the gradient of somebody's pipeline the one of one process? And if not, why?

`audit.py` is to be read first: one step, watched on all ranks and compared on one.
"""

from pipegrad.audit.audit import Audit as Audit
from pipegrad.audit.report import Finding as Finding
from pipegrad.audit.report import Report as Report
from pipegrad.audit.watch import before_clipping as before_clipping
