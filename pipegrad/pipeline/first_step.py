"""First step: ranks learn what values look like.

[Note: first step] Nobody declares what values look like, nor which have a gradient. The first
step of each kind (training, evaluation) finds it out: to its transfers each value is unlike the one
before, so a header says it: see [Note: shapes] in `transfers`.

1. The Program of the first step posts no receive ahead: each stands directly before its wait. So
   both ends of a channel know when they use it whether a gradient comes back.
2. All ranks exchange their specs, and the names of their metrics, which must be equal. If a rank
   failed, all ranks raise, and the next step is a first step again.
3. Each rank lowers the Program again: receives are posted ahead, and values without a gradient have
   no channel back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipegrad.comm.agreement import agree_keeping, same
from pipegrad.errors import StallError
from pipegrad.pipeline.edges import Spec

T = TypeVar("T")


@dataclass(frozen=True)
class Learned:
    """What the first step of a kind has shown on one rank.

    Attributes:
        specs: By link, of the values that this rank made or received.
        metrics: The names of loss_fn's metrics; None if this rank computed no loss.
    """

    specs: dict[int, Spec]
    metrics: tuple[str, ...] | None


def run_together(
    what: str,
    run: Callable[[], tuple[T, Learned]],
    *,
    ranks: Sequence[int],
    wait_seconds: float,
) -> tuple[T, dict[int, Learned]]:
    """Runs a first step on all ranks.

    Args:
        what: What is run, in words.
        run: Runs it on this rank.
        ranks: All ranks; those that failed have learned nothing.
        wait_seconds: How long ranks wait for each other.

    Returns:
        Its result here, and what each rank has learned.

    Raises:
        AgreementError: If a rank does not come.
        Exception: What `run` raised on this rank.
    """

    def ended() -> tuple[T | BaseException, Learned | None]:
        # An error is not raised inside of `agree`, which would raise it on all ranks in its own
        # words. It is raised behind `agree`, when all ranks have ended the step.
        try:
            return run()
        except StallError:
            raise  # the job has ended: nobody comes to `agree` any more
        except BaseException as error:
            if getattr(error, "is_everyones", False):
                raise
            return error, None

    # The step runs inside of `agree`: a rank that fails or hangs is then named on all ranks.
    outcome, replies = agree_keeping(what, ended, ranks=ranks, timeout_seconds=wait_seconds)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome, {r: one for r, one in zip(ranks, replies, strict=True) if one is not None}


def refuse_unlike(learned: Mapping[int, Learned]) -> None:
    """Refuses metrics that differ, on all ranks alike.

    Raises:
        AgreementError: If there are some.
    """
    names = {rank: one.metrics for rank, one in learned.items()}
    same("the metrics of loss_fn", {rank: str(n) for rank, n in names.items() if n is not None})
