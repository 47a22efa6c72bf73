"""Scheduler: trains and evaluates a pipeline, its reductions interleaved with its compute.

scheduler = Scheduler([Stage(module, 0)], topology, schedule="1f1b", num_microbatches=8, loss_fn=f)
for x, y in data:
    result = scheduler.step(x, target=y)
    scheduler.sync.clip_grad_norm_(1.0)
    optimizer.step()
    scheduler.sync.publish()
    optimizer.zero_grad()
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch

from pipegrad.comm.agreement import AGREE_SECONDS, Board, agree, same, slow_seconds
from pipegrad.comm.failures import FailureNotice
from pipegrad.comm.graph_capture import outside_of_graphs
from pipegrad.errors import ScheduleError, StepError
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.fsdp import ShardedStages
from pipegrad.model.ties import Tied
from pipegrad.pipeline.aliases import Aliases
from pipegrad.pipeline.compute import Compute, Loss
from pipegrad.pipeline.executor import Executor
from pipegrad.pipeline.loss import Losses, StepResult
from pipegrad.pipeline.microbatch import Batches, joined
from pipegrad.pipeline.split_backward.weights import WeightGradients
from pipegrad.pipeline.stage import Stage
from pipegrad.pipeline.transfers import BufferPool, Edges, Spec, Transfers
from pipegrad.pipeline.values import PeerFailedError, Values
from pipegrad.pipeline.wiring import (
    Ends,
    ScheduleSpec,
    bound_loss,
    check_stages,
    check_whole,
    collectives_of,
    fed,
    schedule_of,
    wired,
)
from pipegrad.plan.check_replicas import refuse_loss_parameters
from pipegrad.plugins.handler import DEFAULT_HANDLERS, HandlerSpec
from pipegrad.schedules.program.lower import DEPTH, lower
from pipegrad.schedules.program.program import Link, Program
from pipegrad.schedules.program.verify import Proof, verify
from pipegrad.topology import Topology

Tensor = torch.Tensor

_instances = count()


@dataclass(frozen=True)
class _Ready:
    """A kind of step that can be run."""

    program: Program
    proof: Proof
    transfers: Transfers
    executor: Executor
    batches: Batches


@dataclass(frozen=True)
class _Learned:
    """What the first step of a kind tells on one rank."""

    specs: dict[int, Spec]
    rows: dict[str, int]
    divisor: float | None


class Scheduler:
    """Runs the stages of this rank through a schedule; gradients are those of one process.

    All ranks of the topology construct it together; what is wrong on one of them is an error on
    all, before anything is sent. The schedule is lowered to a Program and the Program is proven
    (`verify`) there. In the first step each stage tells the next what its outputs look like.

    Args:
        stages: This rank's, as the schedule places them.
        topology: Over all ranks; where stages are is taken from the schedule.
        schedule: Name or table of the group ``pipegrad.schedules``, or a `Schedule`.
        num_microbatches: Into how many a batch is cut, along the first dimension.
        loss_fn: Of the last stage's outputs and a microbatch's ``target``, passed to parameters as
            those of a `Stage` are; returns one element.
        whole: Names of inputs that belong to no sample, such as a table of rotary frequencies:
            every microbatch gets them whole. They may be anything, also ``"target"``.
        tied: As `GradientSync`.
        handlers: As `GradientSync`.
        depth: How many receives of an edge are posted ahead.
        **options: Further arguments of `GradientSync`. In the first step ranks wait for each other
            for ``agree_seconds`` too, or for the process group's timeout up to ten minutes, if that
            is longer: kernels may be compiled there.

    Attributes:
        schedule: What every rank computes.
        program: What every rank does; printable.
        proof: What that needs: live activations and buffers of each rank.
        sync: The gradient layer: clipping, statistics, its plan.
        topology: With the schedule's stages.

    Raises:
        PipegradError: If anything does not fit together; on all ranks alike.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        topology: Topology,
        *,
        schedule: ScheduleSpec,
        num_microbatches: int | None = None,
        loss_fn: Loss | None = None,
        whole: Sequence[str] = (),
        tied: Tied = (),
        handlers: Sequence[HandlerSpec] = DEFAULT_HANDLERS,
        depth: int = DEPTH,
        **options: Any,  # noqa: ANN401 - GradientSync's own, checked there
    ) -> None:
        self._depth = depth
        self._stages = {stage.index: stage for stage in stages}
        ranks = sorted(topology.ranks)

        def describe() -> tuple[str, Ends]:
            self.schedule = schedule_of(schedule, topology, num_microbatches)
            self.topology = topology.with_stages(self.schedule.stage_to_rank)
            check_stages(self.schedule, stages, self.topology)
            self._loss_fn = bound_loss(loss_fn, stages, self.topology)
            refuse_loss_parameters(loss_fn, [stage.module for stage in stages], self.topology)
            ends = {s.index: (s.inputs, s.outputs) for s in stages}
            return f"depth {depth}, whole {whole!r}\n{self.schedule}", ends

        agree_seconds = options.get("agree_seconds", AGREE_SECONDS)
        ends = agree("Scheduler", describe, ranks=ranks, timeout_seconds=agree_seconds)
        told = dict(zip(ranks, ends, strict=True))
        same("the schedule", {rank: said for rank, (said, _) in told.items()})
        self._wiring = wired({rank: ends for rank, (_, ends) in told.items()})
        check_whole(whole, self._wiring)
        self._whole = frozenset(whole)
        self.schedule = fed(self.schedule, self._wiring)
        _ = self.schedule.ticks  # raises, on all ranks alike, if it cannot be run on this wiring
        self.sync = GradientSync(
            {stage.index: stage.module for stage in stages},
            self.topology,
            tied=tied,
            handlers=handlers,
            stage_ticks=self.schedule.stage_ticks,
            shared_ticks=self.schedule.shared_ticks,
            **options,
        )
        modules = {index: stage.module for index, stage in self._stages.items()}
        self._weights = WeightGradients(modules, self.sync)
        self._sharded = ShardedStages(modules, self.sync)
        self._device = self.sync.device
        self._collectives = collectives_of(self.sync)
        self.program = self._lowered(self._wiring.links)
        try:
            self.proof = verify(self.program)
        except ScheduleError:
            self.sync.close()  # on all ranks alike
            raise
        self._edges = Edges(self.program.channels, self.topology, self._device)
        self._losses = Losses(self.topology, self._device)
        self._pool = BufferPool(self._device)
        self._name = f"{next(_instances)}"
        self._notice = FailureNotice(f"step {self._name}")
        self._learn_seconds = slow_seconds(self._device, agree_seconds)
        self._num_runs = 0
        self._closed = False
        self._ready: dict[bool, _Ready] = {}  # forward only or not
        self._has_last_stage = self.topology.num_stages - 1 in self._stages

    # What users call.

    @outside_of_graphs
    def step(
        self,
        *inputs: object,
        target: object = None,
        loss_divisor: float | None = None,
        **named: object,
    ) -> StepResult:
        """Runs forward and backward of a batch; gradients are complete and reduced afterwards.

        Every rank must call it. Values need only be given on the ranks of stages that name them,
        the target on that of the last stage. Tensors are cut along their first dimension into
        microbatches, and have the same number of rows, that of the first step. Every microbatch
        gets whole what `Scheduler` was told is ``whole``, tensors without dimensions, numbers,
        strings and None; anything else is refused. `inputs` says afterwards what was done.

        An input may come from a graph of the caller's, such as an encoder's output, as may the
        target. When a step returns, the gradient of the loss has gone through that graph, once: of
        this data rank's loss, and of what the stages of this rank do with the value.

        Args:
            *inputs: External inputs, in the order of their first use.
            target: Cut like inputs; goes to the loss.
            loss_divisor: The losses of all microbatches are summed, and divided by this: the number
                of microbatches by default, where each loss is a mean. For losses that are sums over
                tokens give the number of tokens of the batch, over all data ranks, divided by the
                number of data ranks. The ranks of the last stage need it; others may give it, and
                then the same.
            **named: External inputs by name.

        Returns:
            The loss, on every rank; it is still on its way.

        Sync: all on the current stream; call every step from the same one.

        Raises:
            StepError: If an input is missing or does not fit, a microbatch looks unlike the first
                one, or a parameter is not what it was; on all ranks, with stage and microbatch.
            Exception: What a stage raised; on other ranks a StepError with its words.
        """
        return self._run(inputs, named, target, loss_divisor, forward_only=False)

    @outside_of_graphs
    def evaluate(
        self,
        *inputs: object,
        target: object = None,
        loss_divisor: float | None = None,
        **named: object,
    ) -> StepResult:
        """Runs forward alone, without gradients and with all modules in evaluation mode.

        As `step`; without a target the loss is nan, and there are just the outputs. What values
        look like is learned anew in the first evaluation: its batches may have another size than
        those of `step`, but all the same.
        """
        with _evaluating([stage.module for stage in self._stages.values()]), torch.no_grad():
            return self._run(inputs, named, target, loss_divisor, forward_only=True)

    @property
    def inputs(self) -> dict[str, str]:
        """What steps do with each value that they are given on this rank, by name, in words.

        ``{"x": "8 rows, cut into 4 microbatches of 2", "rope": "whole in every microbatch"}``.
        Empty before the first step.
        """
        return {n: told for r in self._ready.values() for n, told in r.batches.report.items()}

    @property
    def receive_buffers(self) -> int:
        """How many receive buffers this rank has made so far.

        No more than the largest proof of a kind of step says, where all values have one shape and
        dtype; where they differ, that many of each at most. A buffer whose value a module keeps is
        left to it, and another is made.
        """
        return self._pool.num_made

    def close(self) -> None:
        """Ends comm streams and destroys process groups, once; every rank must call it."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as closing:  # whatever one of them raises
            closing.callback(self._losses.close)
            closing.callback(self._edges.close)
            closing.callback(self.sync.close)

    # Inside.

    def _run(
        self,
        inputs: Sequence[object],
        named: Mapping[str, object],
        target: object,
        loss_divisor: float | None,
        *,
        forward_only: bool,
    ) -> StepResult:
        if self._closed:
            raise StepError("this Scheduler is closed: make another one")
        self._num_runs += 1
        self._notice.next_step()
        if forward_only in self._ready:
            return self._run_ready(self._ready[forward_only], inputs, named, target, loss_divisor)
        # The first: receives are not posted ahead, since nobody knows yet what will come.
        links = self._wiring.links
        learning = self._make_ready(links, {}, depth=0, forward_only=forward_only)
        found: list[StepResult | BaseException] = []

        def learn() -> _Learned | None:
            try:
                found.append(self._run_ready(learning, inputs, named, target, loss_divisor))
            except BaseException as error:  # noqa: BLE001 - raised below, once all ranks are here
                found.append(error)
                return None
            divisor = self._own_divisor(loss_divisor)
            known = learning.transfers.specs.items()
            specs = {link: spec for link, spec in known if spec is not None}
            return _Learned(specs, learning.batches.rows, divisor)

        ranks = sorted(self.topology.ranks)
        kind = "evaluation" if forward_only else "step"
        told = agree(
            f"the first {kind} of a Scheduler",
            learn,
            ranks=ranks,
            timeout_seconds=self._learn_seconds,
        )
        result = found[0]
        if isinstance(result, BaseException):
            raise result
        learned = {rank: found for rank, found in zip(ranks, told, strict=True) if found}
        if len(learned) < len(ranks):
            raise StepError(f"a step failed on another rank: {self._notice.read()}")
        self._ready[forward_only] = self._go_on_from(learned, learning, forward_only=forward_only)
        return result

    def _go_on_from(
        self, learned: Mapping[int, _Learned], learning: _Ready, *, forward_only: bool
    ) -> _Ready:
        """Returns the kind of step whose first one has told what everything looks like."""
        divisors = {rank: found.divisor for rank, found in learned.items()}
        same("loss_divisor", {r: str(found) for r, found in divisors.items() if found is not None})
        mine = self.topology.ranks_along(self.topology.pipeline)
        for pipeline in self.topology.pipelines:
            rows = {r: str(max(learned[r].rows.values())) for r in pipeline if learned[r].rows}
            same("how many rows their tensors have", rows)
        specs = {link: spec for rank in mine for link, spec in learned[rank].specs.items()}
        links = [
            link._replace(differentiable=specs[number].differentiable)
            for number, link in enumerate(self._wiring.links)
        ]
        ready = self._make_ready(links, specs, depth=self._depth, forward_only=forward_only)
        ready.batches.rows = learning.batches.rows
        ready.batches.report = learning.batches.report
        if not forward_only:
            self.program, self.proof = ready.program, ready.proof
        return ready

    def _run_ready(
        self,
        ready: _Ready,
        inputs: Sequence[object],
        named: Mapping[str, object],
        target: object,
        loss_divisor: float | None,
    ) -> StepResult:
        training = not ready.program.forward_only
        ready.executor.rewind()
        begun = False
        try:
            if not training:
                self.sync.publish_if_due()  # all ranks do, also those that are refused something
            divisor = self._divisor(loss_divisor)
            given, targets = ready.batches.cut(inputs, named, target)
            if training:
                self.sync.prepare()
            begun = True
            losses, outputs = ready.executor.run(given, targets, divisor)
            whole = joined(outputs)
            ready.batches.outer.backward()
            if training:
                self.sync.finish()
            if not training or self.sync.is_accumulating:  # else finish has looked
                self._refuse_failed()
        except BaseException as error:
            self._fail(ready, error, begun=begun)
            raise
        loss = torch.full((), math.nan if self._has_last_stage else 0.0, device=self._device)
        if losses:
            loss = torch.stack(losses).float().sum() / divisor
        let_go = partial(_let_go, weakref.ref(self), self._num_runs)
        return self._losses.send(loss, self._own_divisor(loss_divisor), whole, on_failure=let_go)

    def let_go(self, run: int) -> str:
        """Drops what a step left here that failed on another rank; returns that rank's words."""
        if run != self._num_runs:
            return ""
        self.sync.drop_gradients()
        return f": {self._notice.read()}"

    def _divisor(self, loss_divisor: float | None) -> float:
        found = float(self.schedule.num_microbatches if loss_divisor is None else loss_divisor)
        if not (math.isfinite(found) and found > 0):
            raise StepError(f"loss_divisor is {found}, expected a number above 0")
        return found

    def _own_divisor(self, loss_divisor: float | None) -> float | None:
        """Returns what this rank divides by, or says that others do; None if it does neither."""
        is_given = self._has_last_stage or loss_divisor is not None
        return self._divisor(loss_divisor) if is_given else None

    def _refuse_failed(self) -> None:
        if (first := self._notice.read()) is not None:
            raise PeerFailedError(f"a step failed on another rank: {first}")

    def _fail(self, ready: _Ready, error: BaseException, *, begun: bool) -> None:
        """Tells the other ranks; raises what the first one said, if this one is not the cause."""
        said = " ".join([str(error), *getattr(error, "__notes__", [])])
        mine = self._notice.post(f"{type(error).__name__}: {said}")
        executor = ready.executor
        if not ready.program.forward_only:
            self.sync.abort(error, begun=begun, final=executor.is_in_doubt)
        if executor.is_in_doubt:
            self._edges.cut()
        else:
            executor.finish_transfers()
        self._sharded.forget()
        with contextlib.suppress(RuntimeError):  # a rank that has died
            self._losses.send(torch.zeros((), device=self._device), None, failed=True)
        first = self._notice.read()
        is_interrupt = not isinstance(error, Exception)  # it stays one, whoever was first
        if begun and not is_interrupt and first is not None and first != mine:
            # Zeros may be what a stage fails on.
            raise StepError(f"a step failed on another rank: {first}") from error

    def _lowered(
        self, links: Sequence[Link], *, depth: int | None = None, forward_only: bool = False
    ) -> Program:
        return lower(
            self.schedule,
            links=links,
            depth=self._depth if depth is None else depth,
            collectives=self._collectives,
            forward_only=forward_only,
        )

    def _make_ready(
        self,
        links: Sequence[Link],
        specs: Mapping[int, Spec],
        *,
        depth: int,
        forward_only: bool,
    ) -> _Ready:
        program, proof = self.program, self.proof
        if (tuple(links), depth, forward_only) != (program.links, self._depth, False):
            program = self._lowered(links, depth=depth, forward_only=forward_only)
            proof = verify(program)
        first = self.topology.ranks_along(self.topology.pipeline)[0]  # replicas have their own
        board = Board(f"{self._name}/{self._num_runs}/{first}")
        transfers = Transfers(
            program.channels,
            self._edges,
            self._pool,
            board,
            specs,
            wait_seconds=self._learn_seconds,
        )
        rank = self.topology.coordinate(self.topology.pipeline)
        aliases = Aliases(self._stages, self._sharded, transfers.lent)
        values = Values(
            program, rank, self._stages, self._wiring, transfers=transfers, aliases=aliases
        )
        compute = Compute(
            program,
            self._stages,
            values,
            aliases=aliases,
            sync=None if forward_only else self.sync,
            weights=self._weights,
            sharded=self._sharded,
            loss_fn=self._loss_fn,
        )
        executor = Executor(
            program,
            rank,
            values=values,
            compute=compute,
            transfers=transfers,
            sync=self.sync,
            weights=self._weights,
            sharded=self._sharded,
        )
        batches = Batches(
            self._wiring,
            self._stages,
            self.schedule.num_microbatches,
            needs_target=self._has_last_stage and not forward_only,
            takes_target=self._has_last_stage,
            has_loss=self._loss_fn is not None,
            whole=self._whole,
        )
        return _Ready(program, proof, transfers, executor, batches)


def _let_go(scheduler: weakref.ref[Scheduler], run: int) -> str:
    """Does `Scheduler.let_go`; a result that is kept does not keep its Scheduler."""
    found = scheduler()
    return "" if found is None else found.let_go(run)


@contextlib.contextmanager
def _evaluating(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Puts modules into evaluation mode, and each part back into its own."""
    before = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
