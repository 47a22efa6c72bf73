"""Order: runs somebody's step under the OrderChecker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from pipegrad.audit.report import Finding, Report, merged
from pipegrad.comm.agreement import agree
from pipegrad.testing.ordering.checker import OrderChecker
from pipegrad.testing.ordering.clocks import Violation

_SHOWN = 20  # violations of a rank
_RAN = (
    "rank 0 ran {operators} operators, and {strands} asynchronous collectives and streams beside "
    "its thread"
)
_SEEN = (
    "seen: operators of torch, hooks and autograd functions of Python, CUDA streams and events, "
    "asynchronous collectives of torch.distributed and Work.wait"
)
_UNSEEN = (
    "not seen: kernels beside torch's dispatcher (Triton, replayed CUDA graphs), collectives that "
    "C++ code calls (DistributedDataParallel), futures, and loops over Work.is_completed"
)
_ON_CPU = "on CPU there are no streams: threads and collectives were checked, and not CUDA streams"


def ordered(steps: Sequence[Callable[[], object]]) -> Report:
    """Runs steps, and returns accesses to the same bytes that nothing orders.

    All ranks must call it. Each rank watches its own memory.

    Args:
        steps: Each runs one step of this rank.
    """
    begin = time.monotonic()
    with OrderChecker(virtual_streams=False, foreign=True, log=True) as checker:
        for step in steps:
            step()
    own = [_finding(violation) for violation in checker.violations[:_SHOWN]]
    more = len(checker.violations) - len(own)
    counted = len(checker.log), len({entry.strand for entry in checker.log})
    every = agree("order of accesses", lambda: (own, more, counted))
    findings = [
        Finding(*finding, ranks=(rank,))
        for rank, (of_rank, _, _) in enumerate(every)
        for finding in of_rank
    ]
    operators, strands = every[0][2]
    notes = [
        _RAN.format(operators=operators, strands=strands - 1),
        _SEEN,
        _UNSEEN,
    ]
    if not torch.cuda.is_available():
        notes.append(_ON_CPU)
    if hidden := sum(number for _, number, _ in every):
        notes.append(f"{hidden} more accesses without an order are not shown")
    seconds = time.monotonic() - begin
    return Report(merged(findings), tuple(notes), (), len(steps), dist.get_world_size(), seconds)


def _finding(violation: Violation) -> tuple[str, str]:
    """Returns what is wrong, and what to do."""
    first, second = violation.first, violation.second
    return (
        f"{violation.hazard}: {first.what} at {first.where}, then {second.what} at {second.where}",
        f"wait for {first.what} before {second.what}: by Work.wait, or by an event on its stream",
    )
