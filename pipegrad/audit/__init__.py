"""Compares the gradients of a pipeline and of one process, and finds why they differ.

Read `audit.py` first: it runs a step on all ranks, and rank 0 compares it with one process.
"""

from pipegrad.audit.audit import Audit as Audit
from pipegrad.audit.report import Report as Report
from pipegrad.audit.runtimes import of_deepspeed as of_deepspeed
from pipegrad.audit.runtimes import of_megatron as of_megatron
from pipegrad.audit.runtimes import of_torch as of_torch
from pipegrad.audit.seen import before_clipping as before_clipping
