"""First step: ranks learn what values look like.

[Note: first step] Nobody declares what values look like, nor which have a gradient. The first
step of each kind (training, evaluation) finds it out: to its transfers each value is unlike the one
before, so a header says it: see [Note: shapes] in `transfers`.

1. The Program of the first step posts no receive ahead: each stands directly before its wait. So
   both ends of a channel know when they use it whether a gradient comes back.
2. All ranks exchange their specs, their loss_divisor, the names of their metrics and the number of
   rows that they cut. Divisors and names must be equal, and in each pipeline the rows and what was
   given: [Note: what was passed]. If a rank
   failed, all ranks raise, and the next step is a first step again.
3. Each rank lowers the Program again: receives are posted ahead, and values without a gradient have
   no channel back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipegrad.comm.agreement import agree_keeping, same
from pipegrad.errors import AgreementError, StallError
from pipegrad.pipeline.edges import Spec
from pipegrad.pipeline.loss_message import Losses
from pipegrad.topology import Topology

T = TypeVar("T")


@dataclass(frozen=True)
class Learned:
    """What the first step of a kind has shown on one rank.

    Attributes:
        specs: By link, of the values that this rank made or received.
        divisor: Its loss_divisor; None if this rank has none.
        metrics: The names of loss_fn's metrics; None if this rank computed no loss.
        rows: Of the batch that it cut; None if it cut nothing.
        length: Of that in time; None if it was not cut there.
        passed: Of the tensors that it was given: [Note: what was passed].
    """

    specs: dict[int, Spec]
    divisor: float | None
    metrics: tuple[str, ...] | None
    rows: int | None
    length: int | None
    passed: dict[str, int]


def run_together(
    what: str,
    run: Callable[[], tuple[T, Learned]],
    *,
    passed: Callable[[], dict[str, int]],
    differing: Callable[[dict[int, dict[str, int]]], str | None],
    ranks: Sequence[int],
    wait_seconds: float,
) -> tuple[T, dict[int, Learned], str | None]:
    """Runs a first step on all ranks.

    Args:
        what: What is run, in words.
        run: Runs it on this rank.
        passed: Returns what this rank was given, if `run` has failed.
        differing: Says what differs of what ranks were given.
        ranks: All ranks; those that failed have learned nothing.
        wait_seconds: How long ranks wait for each other.

    Returns:
        Its result here, what each rank has learned, and what differs if it failed elsewhere.

    Raises:
        AgreementError: If a rank does not come, or if the step failed and ranks of a pipeline were
            given different batches.
        Exception: What `run` raised on this rank.
    """

    def ended() -> tuple[T | BaseException, tuple[Learned | None, dict[str, int]]]:
        # An error is not raised inside of `agree`, which would raise it on all ranks in its own
        # words. It is raised behind `agree`, when all ranks have ended the step.
        try:
            result, learned = run()
        except StallError:
            raise  # the job has ended: nobody comes to `agree` any more
        except BaseException as error:  # noqa: BLE001 - raised behind `agree`
            return error, (None, passed())
        return result, (learned, learned.passed)

    # The step runs inside of `agree`: a rank that fails or hangs is then named on all ranks.
    outcome, replies = agree_keeping(what, ended, ranks=ranks, timeout_seconds=wait_seconds)
    learned = {r: one for r, (one, _) in zip(ranks, replies, strict=True) if one is not None}
    wrong = None
    if len(learned) < len(ranks):
        # Texts of other lengths break inside of a stage, in words of the model.
        wrong = differing({r: numbers for r, (_, numbers) in zip(ranks, replies, strict=True)})
    if isinstance(outcome, BaseException):
        if wrong is not None and isinstance(outcome, Exception):
            raise AgreementError(wrong) from outcome
        raise outcome
    return outcome, learned, wrong


def refuse_unlike(
    learned: Mapping[int, Learned], topology: Topology, losses: Losses, *, forward_only: bool
) -> None:
    """Refuses different divisors or metrics, and batches that differ within a pipeline.

    Args:
        learned: By rank.
        topology: Of all ranks.
        losses: Learn what ranks were given.
        forward_only: Which kind of step it was.

    Raises:
        AgreementError: If there are some; on all ranks alike.
    """
    divisors = {rank: one.divisor for rank, one in learned.items()}
    same("loss_divisor", {rank: str(d) for rank, d in divisors.items() if d is not None})
    names = {rank: one.metrics for rank, one in learned.items()}
    same("the metrics of loss_fn", {rank: str(n) for rank, n in names.items() if n is not None})
    # A target that is cut unlike its input, such as a list of tensors of each sample, would be cut
    # in all steps. So one comparison is enough, and it costs later steps nothing.
    for pipeline in topology.pipelines:
        rows = {rank: learned[rank].rows for rank in pipeline}
        same("how many rows their tensors have", {r: str(n) for r, n in rows.items() if n})
        lengths = {rank: learned[rank].length for rank in pipeline}
        same("how long their tensors are in time", {r: str(n) for r, n in lengths.items() if n})
    passed = {rank: one.passed for rank, one in learned.items()}
    if (wrong := losses.passed.learn(passed, forward_only=forward_only)) is not None:
        raise AgreementError(wrong)
