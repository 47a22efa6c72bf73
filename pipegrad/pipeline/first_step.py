"""The first step of a kind: ranks learn what values look like.

[Note: first step] A rank can make a receive buffer only if it knows how large a value is. Nobody
declares that, so the first step of each kind (training, evaluation) finds out what values look like
in the first microbatch. What changes later travels with the values: see [Note: shapes].

1. The Program of the first step posts no receive ahead: each stands directly before its wait.
2. A stage runs its forward. Before the first send of a value, its rank posts a `Spec` of the value
   on a `Board`, a key for each receiving rank. A rank that has failed posts None instead, and then
   nothing crosses that channel in either direction.
3. Before its first receive of a value, the receiving rank waits for the key. Its own forward can
   then run, so specs pass down the pipeline with the first microbatch, and no extra forward runs.
4. All ranks exchange their specs, their loss_divisor, the names of their metrics and the number of
   rows that they cut. Divisors and names must be equal, and in each pipeline the rows and what was
   given: [Note: what was passed]. If a rank
   failed, all ranks raise, and the next step is a first step again.
5. Each rank lowers the Program again: receives are posted ahead, and values without a gradient have
   no channel back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from pipegrad.comm.agreement import Board, agree_keeping, same
from pipegrad.comm.failures import FAILED_ELSEWHERE
from pipegrad.errors import AgreementError, MessageError, PipegradError, StallError, StepError
from pipegrad.pipeline.batch.microbatch import Batch
from pipegrad.pipeline.loss import StepResult
from pipegrad.pipeline.step import StepContext, StepKind
from pipegrad.pipeline.transfers.specs import Spec, Specs
from pipegrad.schedules import Schedule
from pipegrad.schedules.program.program import Channel


class LearnedSpecs(Specs):
    """What values look like, learned during a step; see [Note: first step].

    Args:
        board: Where producers post specs.
        wait_seconds: How long to wait for a producer.
    """

    def __init__(self, board: Board, wait_seconds: float) -> None:
        self._by_link: dict[int, Spec | None] = {}
        super().__init__(self._by_link)
        self._board = board
        self._timeout = timedelta(seconds=wait_seconds)

    def first(self, link: int, spec: Spec) -> Spec | None:
        """Returns what the first microbatch looked like; `spec` itself if it is the first."""
        return self._by_link.setdefault(link, spec)

    def of_send(self, channel: Channel) -> Spec | None:
        """Posts what a value looks like; None if this rank failed before it made the value."""
        if channel.kind == "F":
            spec = self._by_link.setdefault(channel.link, None)
            self._board.post(f"{channel.link} to {channel.target}", spec)
        return self._by_link.get(channel.link)

    def of_receive(self, channel: Channel) -> Spec | None:
        """Waits until the producer has posted what its value looks like.

        Raises:
            AgreementError: If it did not in time.
            MessageError: If another program has posted it.
        """
        if channel.kind == "F" and channel.link not in self._by_link:
            try:
                message = self._board.wait(f"{channel.link} to {channel.target}", self._timeout)
                if not isinstance(message, Spec | None):
                    raise MessageError(f"what a value looks like is {message!r}, expected a Spec")
            except PipegradError:
                # Later calls for this link, such as those that end the failed step, must not wait
                # as long once more.
                self._by_link[channel.link] = None
                raise
            self._by_link[channel.link] = message
        return self._by_link.get(channel.link)


@dataclass(frozen=True)
class _Learned:
    """What the first step of a kind has shown on one rank.

    Attributes:
        specs: By link, of the values that this rank made or received.
        divisor: Its loss_divisor; None if this rank has none.
        metrics: The names of loss_fn's metrics; None if this rank computed no loss.
        rows: Of the batch that it cut; None if it cut nothing.
        passed: Of the tensors that it was given: [Note: what was passed].
    """

    specs: dict[int, Spec]
    divisor: float | None
    metrics: tuple[str, ...] | None
    rows: int | None
    passed: dict[str, int]


def run_first_step(
    context: StepContext,
    schedule: Schedule,
    batch: Batch,
    *,
    forward_only: bool,
    is_measured: bool,
    wait_seconds: float,
) -> tuple[StepKind, StepResult]:
    """Runs the first step of a kind; returns the kind for all later steps, and the result.

    Args:
        context: What all kinds of step share.
        schedule: What every rank computes.
        batch: What the step is given.
        forward_only: Which kind it is: evaluation or training.
        is_measured: Whether later steps measure how long computes and transfers take.
        wait_seconds: How long ranks wait for each other. Kernels may be compiled meanwhile.

    Raises:
        StepError: If the step failed on another rank.
        AgreementError: If what ranks have learned does not fit together.
        Exception: What failed in the step on this rank.
    """
    topology, links = context.topology, context.wiring.links
    # Each pipeline has a board of its own: replicas may have batches of another size.
    pipeline = topology.ranks_along(topology.pipeline)
    board = Board(f"{context.name}/{context.notice.step}/{pipeline[0]}")
    specs = LearnedSpecs(board, wait_seconds)
    first = StepKind(context, schedule, links, specs, depth=0, forward_only=forward_only)

    def learn() -> tuple[StepResult | BaseException, _Learned | None]:
        # An error is not raised inside of `agree`, which would raise it on all ranks in its own
        # words. It is raised behind `agree`, when all ranks have ended the step.
        try:
            result = first.run(batch)
        except StallError:
            raise  # the job has ended: nobody comes to `agree` any more
        except BaseException as error:  # noqa: BLE001 - raised behind `agree`
            return error, None
        known = {link: spec for link, spec in specs.by_link.items() if spec is not None}
        divisor = first.divisors(batch)[1]
        batches = context.batches
        passed = {name: int(number) for name, number in batches.passed.items()}
        return result, _Learned(known, divisor, first.terms.metrics, batches.rows, passed)

    ranks = sorted(topology.ranks)
    # The step runs inside of `agree`: a rank that fails or hangs is then named on all ranks.
    outcome, replies = agree_keeping(
        f"the first {'evaluation' if forward_only else 'step'} of a Scheduler",
        learn,
        ranks=ranks,
        timeout_seconds=wait_seconds,
    )
    if isinstance(outcome, BaseException):
        raise outcome
    learned = {rank: reply for rank, reply in zip(ranks, replies, strict=True) if reply}
    try:
        if len(learned) < len(ranks):
            raise StepError(f"{FAILED_ELSEWHERE}: {context.notice.read()}")
        _check_alike(context, learned, forward_only=forward_only)
    except PipegradError:
        # All ranks raise it, with the step behind them: what the step has left goes on all ranks.
        context.codings.feedback.drop_pending()
        context.losses.forget_unread()
        if not forward_only:
            context.sync.drop_gradients()
        raise
    metrics = [reply.metrics for reply in learned.values() if reply.metrics is not None]
    context.losses.learn(
        metrics[0] if metrics else None,
        forward_only=forward_only,
        terms=first.terms,
        result=outcome,
    )
    # Each rank has seen the values that it made or received. All ranks of a pipeline together have
    # seen all of them, and a rank needs them all to lower the programs of the others.
    by_link = {link: spec for rank in pipeline for link, spec in learned[rank].specs.items()}
    kind = StepKind(
        context,
        schedule,
        [
            link._replace(differentiable=by_link[number].differentiable)
            for number, link in enumerate(links)
        ],
        Specs(by_link),
        depth=context.depth,
        forward_only=forward_only,
        is_measured=is_measured and not forward_only,
    )
    return kind, outcome


def _check_alike(
    context: StepContext, learned: Mapping[int, _Learned], *, forward_only: bool
) -> None:
    """Refuses different divisors or metrics, and batches that differ within a pipeline."""
    divisors = {rank: reply.divisor for rank, reply in learned.items()}
    same("loss_divisor", {rank: str(d) for rank, d in divisors.items() if d is not None})
    names = {rank: reply.metrics for rank, reply in learned.items()}
    same("the metrics of loss_fn", {rank: str(n) for rank, n in names.items() if n is not None})
    # A target that is cut unlike its input, such as a list of tensors of each sample, would be cut
    # in all steps. So one comparison is enough, and it costs later steps nothing.
    for pipeline in context.topology.pipelines:
        rows = {rank: learned[rank].rows for rank in pipeline}
        same("how many rows their tensors have", {r: str(n) for r, n in rows.items() if n})
    passed = {rank: reply.passed for rank, reply in learned.items()}
    if (wrong := context.losses.learn_passed(passed, forward_only=forward_only)) is not None:
        raise AgreementError(wrong)
