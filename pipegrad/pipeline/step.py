"""Step: one kind of step, training or evaluation, from a batch to its result."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pipegrad.comm.activity import Activity
from pipegrad.comm.failures import FailureNotice
from pipegrad.errors import StepError
from pipegrad.gradients.loose_leaves import LooseLeaves
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.fsdp import ShardedStages
from pipegrad.pipeline.aliases import Aliases
from pipegrad.pipeline.batch.microbatch import Batch, Batches, joined
from pipegrad.pipeline.coding.coding import Codings
from pipegrad.pipeline.compute import Compute
from pipegrad.pipeline.executor import Executor
from pipegrad.pipeline.loss import Losses, LossTerms, StepResult
from pipegrad.pipeline.progress import Progress
from pipegrad.pipeline.split_backward.weights import WeightGradients
from pipegrad.pipeline.stage import Stage
from pipegrad.pipeline.step_times import Layout, StepTimes
from pipegrad.pipeline.transfers.edges import Edges
from pipegrad.pipeline.transfers.specs import Spec, Specs
from pipegrad.pipeline.transfers.transfers import PeerFailedError, Transfers
from pipegrad.pipeline.values import Values
from pipegrad.pipeline.wiring import Loss, Wiring
from pipegrad.schedules import Schedule
from pipegrad.schedules.measured import Times
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.program import Collective, Link, Program
from pipegrad.schedules.program.verify import Proof, verify
from pipegrad.topology import Topology


@dataclass(frozen=True, eq=False)
class StepContext:
    """What all kinds of step of a Scheduler share on this rank.

    Attributes:
        name: The same on all ranks, and of no other Scheduler.
        schedule: What every rank computes, in a step of the Scheduler's number of microbatches.
        topology: With the schedule's stages.
        wiring: How the stages hang together.
        collectives: The reductions of this rank's pipeline.
        depth: How many receives of an edge are posted ahead.
        program: Of training steps in which every value has a gradient.
        proof: What that program needs.
        stages: The stages of this rank.
        loss_fn: Takes the last stage's outputs and a microbatch's target.
        batches: Turns what a step is given into microbatches.
        sync: The gradient layer.
        weights: The weights' gradients that I leaves to W.
        sharded: The stages whose parameters FSDP2 swaps.
        loose: The leaves that no stage holds.
        edges: The communicators between stages.
        codings: Which values cross in fewer bytes.
        losses: Sends losses to all ranks.
        notice: Where ranks post that a step has failed. It counts the steps of all kinds.
    """

    name: str
    schedule: Schedule
    topology: Topology
    wiring: Wiring
    collectives: Sequence[Collective]
    depth: int
    program: Program
    proof: Proof
    stages: Mapping[int, Stage]
    loss_fn: Loss | None
    batches: Batches
    sync: GradientSync
    weights: WeightGradients
    sharded: ShardedStages
    loose: LooseLeaves
    edges: Edges
    codings: Codings
    losses: Losses
    notice: FailureNotice

    def proven(
        self, schedule: Schedule, links: Sequence[Link], *, depth: int, forward_only: bool
    ) -> tuple[Program, Proof]:
        """Returns the Program of a kind of step, and its proof.

        Raises:
            ScheduleError: If the proof fails.
        """
        # The proof of a large schedule takes long, and most models need no other program.
        own = self.schedule, self.program.links, self.depth, False
        if (schedule, tuple(links), depth, forward_only) == own:
            return self.program, self.proof
        program = lower(
            schedule,
            links=links,
            depth=depth,
            collectives=self.collectives,
            forward_only=forward_only,
        )
        return program, verify(program)


class StepKind:
    """One kind of step: its program, and everything on this rank that runs it.

    Args:
        context: What all kinds of step share.
        schedule: What every rank computes.
        links: The values that stages hand on, differentiable or not.
        specs: What these values look like in the first microbatch.
        depth: How many receives of an edge are posted ahead.
        forward_only: Whether it is evaluation.
        is_measured: Whether to measure how long computes and transfers take.

    Attributes:
        program: What all ranks do.
        proof: What that needs.
        terms: The losses of this rank in the last step that ended.
    """

    terms: LossTerms

    def __init__(
        self,
        context: StepContext,
        schedule: Schedule,
        links: Sequence[Link],
        specs: Specs,
        *,
        depth: int,
        forward_only: bool,
        is_measured: bool = False,
    ) -> None:
        self._context = context
        self._specs = specs
        self._has_last_stage = context.topology.num_stages - 1 in context.stages
        stage_losses = any(stage.losses for stage in context.stages.values())
        self._has_loss = self._has_last_stage or stage_losses
        self._make_terms = partial(
            context.losses.terms, forward_only=forward_only, is_last=self._has_last_stage
        )
        self.program, self.proof = context.proven(
            schedule, links, depth=depth, forward_only=forward_only
        )
        stages, rank = context.stages, context.topology.coordinate(context.topology.pipeline)
        transfers = Transfers(
            self.program.channels, context.edges, context.sync.device, specs, context.codings
        )
        aliases = Aliases(stages, context.sharded)
        values = Values(
            self.program,
            rank,
            stages,
            context.wiring,
            transfers=transfers,
            aliases=aliases,
            specs=specs,
            outer=context.batches.outer.leaves,
        )
        compute = Compute(
            self.program,
            stages,
            values,
            aliases=aliases,
            sync=None if forward_only else context.sync,
            weights=context.weights,
            sharded=context.sharded,
            loose=context.loose,
            loss_fn=context.loss_fn,
        )
        self._times = None
        if is_measured:
            self._times = StepTimes(self.program, context.topology, context.sync.device)
        self._executor = Executor(
            self.program,
            rank,
            values=values,
            compute=compute,
            transfers=transfers,
            sync=context.sync,
            weights=context.weights,
            sharded=context.sharded,
            times=self._times,
        )
        executor = self._executor
        progress = Progress(self.program, context.topology, lambda: executor.position)
        # What the report of a failure needs to know of a step.
        self._activity = Activity(
            "",
            details=progress.details,
            drawing=progress.drawing,
            position=progress.position,
        )

    def with_schedule(self, schedule: Schedule, *, is_measured: bool) -> StepKind:
        """Returns this kind of step with another schedule, such as one of more microbatches.

        Args:
            schedule: What every rank computes.
            is_measured: As that of the class.

        Raises:
            ScheduleError: If the proof of its program fails.
        """
        links, forward_only = self.program.links, self.program.forward_only
        context = self._context
        return StepKind(
            context,
            schedule,
            links,
            self._specs,
            depth=context.depth,
            forward_only=forward_only,
            is_measured=is_measured and not forward_only,
        )

    @property
    def specs(self) -> Mapping[int, Spec | None]:
        """What its values look like in the first microbatch, by link."""
        return self._specs.by_link

    @property
    def is_measured(self) -> bool:
        """Whether it measures how long computes and transfers take."""
        return self._times is not None

    def times_reader(self, result: StepResult) -> Callable[[], Times | None]:
        """Returns what reads the times of a measured step; None if a rank failed in it.

        Reading waits for the message of the loss.
        """
        assert self._times is not None
        return partial(_read_times, result.times_reader(), self._times.layout)

    def run(self, batch: Batch) -> StepResult:
        """Runs a step.

        Sync: all on the current stream.

        Raises:
            StepError: If the batch does not fit, or if the step failed on another rank first.
            Exception: What failed on this rank.
        """
        with self._activity:
            return self._run(batch)

    def _run(self, batch: Batch) -> StepResult:
        context, executor = self._context, self._executor
        training, is_weighted = not self.program.forward_only, context.losses.is_weighted
        executor.rewind()
        if training and (recorder := context.sync.tape.recorder) is not None:
            recorder.begin_step(context.notice.step, self.program)
        if self._times is not None:
            self._times.begin()
        if is_weighted and training:
            context.losses.begin(
                continues=context.sync.is_in_step, reduces=not context.sync.is_accumulating
            )
        begun = False
        try:
            if not training:
                # All ranks must take part, also one that refuses its batch below.
                context.sync.publish_if_due()
            context.losses.refuse_earlier()
            context.codings.feedback.settle()
            divisor, own_divisor = self.divisors(batch)
            terms = self._make_terms(divisor)
            number = self.program.schedule.num_microbatches
            inputs, targets = context.batches.cut(batch, number, needs_target=training)
            self._check_targets(batch, targets)
            # With a GradScaler backward begins with a gradient that is divided already.
            complete = 1.0 if context.sync.is_scaled else divisor
            # A batch that does not fit is refused above, before `prepare` zeroes any gradient.
            if training:
                context.sync.prepare(divisor=None if is_weighted else complete)
                context.loose.begin()
            begun = True
            outputs = executor.run(inputs, targets, terms, keeps_outputs=batch.keeps_outputs)
            whole_outputs = joined(outputs)
            # All microbatches have their gradients now: see [Note: outer graphs].
            late = context.losses.divisor(terms) if is_weighted and training else None
            if training:
                context.loose.refuse(number)
                self._refuse_graphs()
                context.loose.end(late if late is not None else complete)
            context.batches.outer.backward(late if late is not None else complete)
            if training:
                context.sync.finish(divisor=late)
            if not training or context.sync.is_accumulating:
                # A training step that reduces has looked for failures of other ranks in `finish`.
                context.notice.refuse_failed(PeerFailedError)
        except BaseException as error:
            self._fail(error, begun=begun)
            raise
        # A result may be kept for longer than the Scheduler, and must not keep its communicators
        # and buffers. So it holds the context weakly.
        on_failure = partial(_drop_failed, weakref.ref(context), context.notice.step)
        self.terms = terms
        result = context.losses.send(
            terms,
            own_divisor,
            forward_only=not training,
            passed=context.batches.passed,
            num_different=executor.num_different,
            times=() if self._times is None else self._times.numbers(),
            outputs=whole_outputs,
            on_failure=on_failure,
        )
        context.codings.feedback.end(result.failure_reader())
        return result

    def _check_targets(self, batch: Batch, targets: Sequence[object] | None) -> None:
        """Warns of labels that do not all count, and refuses what would be divided twice."""
        context = self._context
        if not self.program.forward_only and batch.loss_divisor is None:
            context.losses.look_at_labels(targets, context.loss_fn)
        self._refuse_graphs()

    def _refuse_graphs(self) -> None:
        """Refuses gradients that would be divided by the weights of this step alone."""
        context = self._context
        has_graph = not (context.batches.outer.is_empty and context.loose.is_empty)
        if has_graph and context.losses.is_weighted and context.sync.is_accumulating:
            raise StepError(
                "an input comes from a graph of yours, or a tensor that gets a gradient is no "
                "stage's, in a step inside accumulate() with loss_reduction='token_mean': its "
                "gradient would not be divided by the weights of all steps. Give the input without "
                "its graph, make the tensor a parameter of a stage, or accumulate no steps"
            )

    def divisors(self, batch: Batch) -> tuple[float, float | None]:
        """Returns the divisor of losses, and the divisor to compare with those of other ranks.

        The second is None if this rank has no stage with a loss and was given no ``loss_divisor``:
        then its default may differ from theirs, and does no harm.

        Raises:
            StepError: If it is not a number above 0, or if losses have weights.
        """
        own = batch.loss_divisor
        if self._context.losses.is_weighted:
            if own is not None:
                raise StepError(
                    f"loss_divisor is {own}, and with loss_reduction='token_mean' the weights that "
                    f"loss_fn returns divide: leave it out"
                )
            return 1.0, None
        divisor = float(self.program.schedule.num_microbatches if own is None else own)
        if not (math.isfinite(divisor) and divisor > 0):
            raise StepError(f"loss_divisor is {divisor}, expected a number above 0")
        return divisor, divisor if self._has_loss or own is not None else None

    def _fail(self, error: BaseException, *, begun: bool) -> None:
        """Ends a failed step: posts the error, and sends everything that other ranks wait for.

        Raises:
            StepError: If another rank failed first. It has the words of that rank.
        """
        context, executor = self._context, self._executor
        # The notice comes first. Ranks that receive zeros below may fail on them, and must then
        # find the cause there.
        context.notice.fail(error)
        if not self.program.forward_only:
            context.sync.abort(error, begun=begun, final=executor.is_in_doubt)
        interrupt: BaseException | None = None
        if not executor.is_in_doubt:
            try:
                executor.finish_transfers()
            except BaseException as again:  # noqa: BLE001 - such as a second Ctrl-C; raised below
                interrupt = again
                if not self.program.forward_only:
                    context.sync.abort(again, final=True)
        if executor.is_in_doubt or interrupt is not None:
            # It is unknown which messages were sent, so no edge can be used again. Connections are
            # closed, and ranks that wait fail at once.
            context.edges.cut()
        context.sharded.forget()
        context.loose.drop()
        with contextlib.suppress(RuntimeError):  # another rank has died
            # Every rank sends a loss in every step, or later losses would be added to this one.
            context.losses.send(
                self._make_terms(1.0),
                None,
                forward_only=self.program.forward_only,
                failed=True,
                times=() if self._times is None else [0.0] * self._times.layout.size,
            )
        if interrupt is not None:
            raise interrupt from error
        if begun:  # the error of a batch that does not fit is this rank's own
            context.notice.raise_first(error, StepError)


def _read_times(read: Callable[[], list[float] | None], layout: Layout) -> Times | None:
    numbers = read()
    return None if numbers is None else layout.times(numbers)


def _drop_failed(reference: weakref.ref[StepContext], step: int) -> str:
    """Drops the gradients of a step that failed on another rank; returns that rank's words.

    Does nothing if another step has begun since: the gradients are its own then.
    """
    context = reference()
    if context is None or step != context.notice.step:
        return ""
    context.sync.drop_gradients()
    return f": {context.notice.read()}"
