"""Steps: one step on this rank, from a batch to its result, and the state that all steps share.

[Note: first step] No stage declares the shapes and dtypes of its values, nor which of them have a
gradient. The first step of each kind (training, evaluation) determines them. Its transfers send a
header before each value, because each value differs from the one before it: see [Note: shapes] in
`transfers`.

1. In the Program of the first step every value has a gradient. The header of a value marks a
   missing gradient, and the consumers of such a value send a header back instead of a gradient.
2. All ranks exchange their specs, and the names of their metrics, which must be equal. If a rank
   failed, all ranks raise, and the next step is a first step again. The loss is sent after that.
3. If a value has no gradient, each rank lowers the Program again, without a channel back.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor
from torch.profiler import record_function

from pipegrad.comm.activity import Activity, Recorder, has_lost_connection
from pipegrad.comm.agreement import agree_keeping, nobody_comes, same
from pipegrad.comm.failures import FailureNotice, elsewhere
from pipegrad.errors import DriftError, PipegradError, StallError, StepError
from pipegrad.gradients.loose import LooseLeaves
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.fsdp import ShardedStages
from pipegrad.interop.private import is_profiled
from pipegrad.pipeline.batch import Batch, Batches, Given, joined
from pipegrad.pipeline.cells import Autocast, Compute, Method
from pipegrad.pipeline.checks import checks_of
from pipegrad.pipeline.codings import CODECS, Feedback
from pipegrad.pipeline.compare import BatchCheck, Facts
from pipegrad.pipeline.device_transfers import DeviceTransfers
from pipegrad.pipeline.edges import Edges, Spec
from pipegrad.pipeline.loss_message import Losses, LossTerms, Outputs, StepResult
from pipegrad.pipeline.place import Place
from pipegrad.pipeline.programs import Programs, StepTimes
from pipegrad.pipeline.shares import shares, warn_of_labels
from pipegrad.pipeline.stage import Stage
from pipegrad.pipeline.transfers import Transfers
from pipegrad.pipeline.values import Values
from pipegrad.pipeline.weight_gradients import WeightGradients
from pipegrad.pipeline.wiring import WiredPipeline
from pipegrad.schedules import Schedule
from pipegrad.schedules.program.program import Link, Op, Program
from pipegrad.schedules.program.verify import Proof
from pipegrad.topology import Topology

_Call = tuple[Method, tuple[int, ...]]  # and its arguments
_Keep = Callable[[object], object]  # of a point in time
# What a rank knows after the first step of a kind: the specs of the values that it made or
# received, by link; and the names of loss_fn's metrics, None if it computed no loss.
Learned = tuple[dict[int, Spec], tuple[str, ...] | None]


class StepKind:
    """A kind of step: training or evaluation, with a schedule of one number of microbatches.

    It runs the items of this rank one by one, and decides nothing.

    Attributes:
        activity: The state of this rank for the report of a failure.
        place: The position of this rank in the step.
    """

    def __init__(
        self,
        program: Program,
        proof: Proof,
        *,
        topology: Topology,
        values: Values,
        compute: Compute,
        transfers: Transfers,
        sync: GradientSync,
        weights: WeightGradients,
        sharded: ShardedStages,
        times: StepTimes | None = None,
    ) -> None:
        self.program = program
        self.proof = proof
        self.times = times
        # It may not refer to this object, which refers to it, because the threads of an unused
        # Scheduler would then wait for the garbage collector.
        self.place = place = Place(program, topology)
        self.activity = Activity("", details=place.details, position=lambda: place.position)
        self._values = values
        self._compute = compute
        self.transfers = transfers
        self._tape = sync.tape
        self._sharded = sharded
        # None of these is a method of this object, either.
        methods: dict[Op, Method] = {
            Op.POST_RECEIVE: transfers.post,
            Op.WAIT_RECEIVE: values.receive,
            Op.SEND: values.send,
            Op.RELEASE: transfers.release,
        }
        of_stages: dict[Op, Method] = {
            Op.FIRST_USE: sync.stage_first_use,
            Op.LAST_BACKWARD: (
                sharded.last_backward if sharded.stages else sync.stage_last_backward
            ),
            Op.FINAL: sync.stage_final,
            Op.INPUTS_FINAL: weights.inputs_are_final,
            Op.SHARED_WEIGHTS: compute.compute_shared,
        }
        self._calls = list[_Call]()  # of all items; a step looks nothing up
        items = list(place.items())
        last = max((i for i, item in enumerate(items) if item.op is Op.COMPUTE), default=0)
        for index, item in enumerate(items):
            op, which, microbatch = item
            arguments: tuple[int, ...] = which, microbatch
            if op is Op.COMPUTE:
                stage, kind, _ = program.action(item)
                method, arguments = compute.method_of(kind), (stage, microbatch)
            elif op in methods:
                method = methods[op]
                if op is Op.RELEASE:  # after the last action no receive proves anything
                    arguments = which, microbatch, index < last
            else:
                method, arguments = of_stages[op], (which,)
            if times is not None:
                method = times.watched(item, method)
            self._calls.append((method, arguments))

    def run(
        self, given: Given, terms: LossTerms, *, keeps_outputs: bool
    ) -> tuple[tuple[Tensor, ...], ...]:
        """Runs all items; returns the outputs of the last stage, if they are kept.

        If it raises, call `finish_transfers`.

        Sync: all on the current stream.
        """
        # Tables are emptied when a step begins, too, because an interrupt may have come while the
        # last step was cleared up.
        self.forget()
        self._values.external = given.inputs
        self._compute.begin(given.targets, terms, keeps_outputs=keeps_outputs)
        # FSDP2 must be informed before the first backward that it is not the last, or it would
        # reduce there.
        if self._sharded.stages:
            self._sharded.begin(forward_only=self.program.forward_only)
        recorder = None if self.program.forward_only else self._tape.recorder
        calls: Sequence[_Call] = self._calls
        place = self.place
        try:
            if recorder is not None or is_profiled():
                calls = self._watched_calls(recorder)
            # The position moves after a call, because after an error `finish_transfers` must begin
            # with the item that failed: other ranks still wait for its transfer.
            for method, arguments in calls:
                method(*arguments)
                place.position += 1
        except BaseException as error:
            place.add_to(error)
            raise
        # A stage may run microbatches in any order.
        outputs = tuple(output for _, output in sorted(self._compute.outputs.items()))
        self.forget()
        return outputs

    def _watched_calls(self, recorder: Recorder | None) -> Sequence[_Call]:
        """Returns the calls of a step, wrapped for a profiler and a recorder if they are active."""
        calls: Sequence[_Call] = self._calls
        if is_profiled():
            # A range that profilers see: ``pipegrad 2F0``.
            calls = [
                (record_function(f"pipegrad {self.program.action(item)}")(method), arguments)
                if item.op is Op.COMPUTE
                else (method, arguments)
                for item, (method, arguments) in zip(self.place.items(), calls, strict=True)
            ]
        if recorder is not None:
            keep = recorder.item_times()
            calls = [
                (partial(_recorded, method, keep, recorder.now), arguments)
                for method, arguments in calls
            ]
            keep(recorder.now())
        return calls

    def finish_transfers(self) -> None:
        """Makes the transfers that are left of a failed step, without values.

        Other ranks still wait for messages of this rank, and send their own. After this, each of
        these transfers ends on any backend, and the next step begins with the same messages on
        both ends of every edge.
        """
        transfers, values = self.transfers, self._values
        methods: dict[Op, Method] = {
            Op.POST_RECEIVE: transfers.post,
            Op.WAIT_RECEIVE: values.receive_and_drop,
            Op.SEND: transfers.send_nothing,
            Op.RELEASE: transfers.release,
        }
        # Transfers are made in the order of the program. It is proven that ranks which keep this
        # order never wait for each other in a circle.
        for op, which, microbatch in islice(self.place.items(), self.place.position, None):
            if op in methods:
                methods[op](which, microbatch)
        self.forget()

    def forget(self) -> None:
        """Drops all references of a step."""
        self._values.forget()
        self._compute.forget()


def _recorded(method: Method, keep: _Keep, now: Callable[[], object], *arguments: int) -> None:
    """Runs an item, and keeps the time of its end."""
    method(*arguments)
    keep(now())


class Steps:
    """Runs the steps of a Scheduler on this rank.

    All ranks make it together.

    Attributes:
        pipeline: The stages and the schedule that all ranks have agreed on.
        batches: Turns the inputs of a step into microbatches.
        report: The treatment of each input in the last step, in words.
        edges: The communicators between stages.
        feedback: The errors of encoded gradients.
    """

    def __init__(
        self,
        pipeline: WiredPipeline,
        programs: Programs,
        sync: GradientSync,
        *,
        name: str,
        whole: frozenset[str],
        wait_seconds: float,
        check_every: int,
    ) -> None:
        topology, device = pipeline.topology, sync.device
        program, _ = programs.first
        self.pipeline = pipeline
        self._programs = programs
        self._sync = sync
        self._name = name
        self._wait_seconds = wait_seconds
        self._topology = topology
        self._stages = {stage.index: stage for stage in pipeline.stages}
        self._has_last_stage = topology.num_stages - 1 in self._stages
        self.batches = Batches(
            pipeline.wiring,
            self._stages,
            rules=pipeline.stages[0].rules,
            has_loss=pipeline.loss_fn is not None,
            whole=whole,
            labels=pipeline.labels,
        )
        self.report: dict[str, str] = {}
        self._check = BatchCheck(topology, timeout_seconds=wait_seconds)
        self._checks = checks_of(pipeline, sync.name)
        self._check_every = check_every
        self._num_steps = {False: 0, True: 0}  # by forward_only
        self._is_due = False  # whether all ranks compare in this step
        modules = {index: stage.module for index, stage in self._stages.items()}
        self._weights = WeightGradients(sync)
        self._sharded = ShardedStages(modules, sync)  # most runs have none
        self._loose = LooseLeaves(sync, modules)
        self._autocast = Autocast(device)
        # All ranks make these groups, in this order.
        self.edges = Edges(program.channels, topology, device, skips=program.skips)
        self._losses = Losses(
            topology,
            device,
            is_weighted=pipeline.is_weighted,
            auxiliary=pipeline.wiring.losses,
            tape=sync.tape,
            bounded=sync.bounded("the loss of a step", sorted(topology.ranks)),
        )
        # The stages of a cut are not compared, because the cut itself determines their carried
        # values.
        self._unseen = {
            index: f"chunks of stage {index} of {name}"
            for index, stage in self._stages.items()
            if type(stage) is Stage
        }
        # The contents of the stages, the values between them, and their ranks.
        held = [[(e.name, e.shape) for e in stage] for stage in sync.manifest.stages]
        words = f"{held} {pipeline.wiring.links} {topology.stage_to_rank}"
        self.feedback = Feedback(hashlib.sha256(words.encode()).hexdigest())
        if not pipeline.codecs.is_none:
            sync.stateful[CODECS] = self.feedback
        self._notice = FailureNotice(f"step {name}")  # it counts the steps of all kinds
        # By forward_only: links and specs, when the first step of a kind has ended on all ranks.
        self._learned: dict[bool, tuple[Sequence[Link], dict[int, Spec]]] = {}
        self._kinds: dict[tuple[bool, int, int], StepKind] = {}  # and microbatches, and chunks
        # A function that returns the numbers of the last measured step, and their reader.
        self._measured: tuple[Callable[[], list[float] | None], StepTimes] | None = None
        self._closing = contextlib.ExitStack()  # each is called, whatever another raises
        self._closing.callback(self._losses.close)
        self._closing.callback(self.edges.close)
        self._closing.callback(sync.close)

    @property
    def proven(self) -> tuple[Program, Proof]:
        """The Program of a training step of the Scheduler's own number, and its proof."""
        # The first step shows which values have a gradient. Others have no channel back.
        if False not in self._learned:
            return self._programs.first
        kind = self._kind(self._programs.schedule, forward_only=False)
        return kind.program, kind.proof

    def close(self) -> None:
        """Ends comm streams and destroys process groups, once; every rank must call it."""
        self._closing.close()

    # Which kind of step.

    def run(self, batch: Batch, *, forward_only: bool) -> StepResult:
        """Runs a step: training, or evaluation.

        Sync: all on the current stream.

        Raises:
            StepError: If the batch does not fit, or if the step failed on another rank first.
            Exception: The error of this rank.
        """
        notice, programs = self._notice, self._programs
        asked: Any = batch.chunks
        if isinstance(asked, Tensor | np.ndarray):
            batch = batch._replace(chunks=asked.tolist())
        verb = f"scheduler.{'evaluate' if forward_only else 'step'}() {notice.step + 1}"
        with self._sync.bounded(verb), self._autocast.outside(), self._leaving():
            if self._sync.is_closed:
                raise StepError("this Scheduler is closed: make another one")
            # Before anything can fail on this rank alone, because all ranks must count each call:
            # the number is in the keys of the board.
            notice.next_step()
            try:
                if self.edges.is_cut:
                    raise StepError("this Scheduler has ended in a step: make another one")
                if not forward_only and self._measured is not None:
                    self._adapt(*self._measured)
                schedule = programs.schedule
                is_own = batch.number in (None, schedule.num_sequences)
                if not is_own or batch.chunks not in (None, schedule.chunks):
                    schedule = programs.of_number(batch.number, batch.chunks, notice.step)
            except BaseException as error:  # noqa: BLE001 - raised in the step
                # Other ranks may run a step of the Scheduler's own number: [Note: other numbers].
                schedule, batch = programs.schedule, batch._replace(error=error)
            if forward_only not in self._learned:
                return self._run_first(schedule, batch, forward_only=forward_only)
            kind = self._kind(schedule, forward_only=forward_only)
            result = self._result(kind, *self._run(kind, batch))
            if kind.times is not None:
                # A message, not the result: that may hold large outputs.
                read = partial(result.message.times, len(result.names))
                self._measured = read, kind.times
            return result

    def _adapt(self, read: Callable[[], list[float] | None], step_times: StepTimes) -> None:
        """Changes the schedule of training, if the times of the last step require it.

        Sync: the host waits for the message of the loss of that step.
        """
        self._measured = None
        if (numbers := read()) is None:
            return
        if self._programs.adapt(step_times.times(numbers), self._notice.step):
            # Evaluations have the forwards of any schedule.
            self._kinds = {key: kind for key, kind in self._kinds.items() if key[0]}

    def _kind(self, schedule: Schedule, *, forward_only: bool) -> StepKind:
        """Returns the kind of step of a schedule; the first step of its kind has ended."""
        key = forward_only, schedule.num_microbatches, schedule.chunks
        if key not in self._kinds:
            links, specs = self._learned[forward_only]
            try:
                self._kinds[key] = self._new_kind(schedule, links, specs, forward_only=forward_only)
            except BaseException as error:
                # Ctrl-C may come in a long proof. Other ranks run the step and wait for this one.
                self._leave(error)
                raise
        return self._kinds[key]

    def _new_kind(
        self,
        schedule: Schedule,
        links: Sequence[Link],
        specs: dict[int, Spec],
        *,
        forward_only: bool,
    ) -> StepKind:
        """Proves the Program of a kind of step, and makes the objects that run it on this rank.

        Raises:
            ScheduleError: If the proof fails.
        """
        topology, sync, stages = self._topology, self._sync, self._stages
        program, proof = self._programs.proven(schedule, links, forward_only=forward_only)
        times = None
        if self._programs.wants_times and not forward_only:
            times = StepTimes(program, topology, sync.device)
        between = Transfers if self.edges.is_tagged else DeviceTransfers
        rank = topology.coordinate(topology.pipeline)
        transfers = between(
            program.channels,
            rank,
            self.edges,
            sync.device,
            specs=specs,
            codecs=self.pipeline.codecs,
            feedback=self.feedback,
        )
        values = Values(
            program,
            rank,
            stages,
            self.pipeline.wiring,
            transfers=transfers,
            sharded=self._sharded,
            specs=specs,
            outer=self.batches.outer.leaves,
        )
        compute = Compute(
            program,
            stages,
            values,
            sync=None if forward_only else sync,
            weights=self._weights,
            sharded=self._sharded,
            loose=self._loose,
            autocast=self._autocast,
            loss_fn=self.pipeline.loss_fn,
            is_over_batch=self.pipeline.is_over_batch,
            unseen=self._unseen,
        )
        return StepKind(
            program,
            proof,
            topology=topology,
            values=values,
            compute=compute,
            transfers=transfers,
            sync=sync,
            weights=self._weights,
            sharded=self._sharded,
            times=times,
        )

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        """Makes an interrupt end the Scheduler; see [Note: interrupts] in `transfers`.

        It may come where no item runs, such as before the loss is sent.
        """
        try:
            yield
        except BaseException as error:
            if self._ends(error):
                self._leave(error)
            raise

    def _ends(self, error: BaseException) -> bool:
        """Returns True if no step follows an error: an interrupt, if the job has other ranks."""
        return len(self._topology.ranks) > 1 and not isinstance(error, Exception)

    def _leave(self, error: BaseException) -> None:
        """Makes ranks fail that run a step which this rank cannot run."""
        self._notice.fail(error)  # first: the ranks that fail next find the cause there
        self.edges.cut()

    # One step.

    def _run(self, kind: StepKind, batch: Batch) -> tuple[LossTerms, Outputs]:
        """Runs a step of a kind; returns this rank's part of its result."""
        sync, losses, training = self._sync, self._losses, not kind.program.forward_only
        # Counters of a step begin here, before all code that may raise, because a step that fails
        # before its first item must make all of its transfers.
        kind.place.position = 0
        kind.transfers.begin(self._notice.step)
        if training and (recorder := sync.tape.recorder) is not None:
            recorder.begin_step(self._notice.step, kind.program)
        if kind.times is not None:
            kind.times.begin()
        if losses.is_weighted and training:
            losses.begin(continues=sync.is_in_step, reduces=not sync.is_accumulating)
        begun = False
        try:
            # Ranks may wait for each other here, and are at no item of the Program.
            given, terms, divisor = self._accepted(kind, batch)
            with kind.activity:
                # A batch that does not fit has raised above, before `prepare` zeroes any gradient.
                if training:
                    sync.prepare(divisor=None if losses.is_weighted else divisor)
                    self._loose.begin()
                begun = True
                outputs: Outputs = kind.run(given, terms, keeps_outputs=batch.keeps_outputs)
                if outputs:
                    time_dim = batch.time_dim if isinstance(batch.time_dim, int) else 1
                    outputs = joined(outputs, kind.program.schedule.chunks, time_dim)
                self._finish(kind, terms, divisor)
        except BaseException as error:
            # If all ranks refuse the step, none of them waits for a transfer or a collective of it.
            # They may be in different methods, whose transfers do not match.
            if not getattr(error, "is_everyones", False):
                with kind.activity:
                    self._fail(kind, error, begun=begun)
            raise
        return terms, outputs

    def _result(self, kind: StepKind, terms: LossTerms, outputs: Outputs) -> StepResult:
        """Sends this rank's part of the result of a step that has ended well."""
        result = self._losses.send(
            terms,
            forward_only=kind.program.forward_only,
            times=() if kind.times is None else kind.times.numbers(),
            outputs=outputs,
            # A weak reference, because a result may live longer than the Scheduler, and must not
            # keep its communicators and buffers.
            on_failure=partial(_drop_failed, weakref.ref(self), self._notice.step),
        )
        if self.feedback.pending:
            message = result.message  # and not the result, which may hold large outputs
            self.feedback.end(lambda: message.has_failed or message.wrong is not None)
        return result

    def _accepted(self, kind: StepKind, batch: Batch) -> tuple[Given, LossTerms, float]:
        """Refuses a batch that does not fit.

        Returns:
            Its microbatches, the terms that collect the losses of this rank, and the remaining
            divisor of complete gradients.
        """
        sync, losses, training = self._sync, self._losses, not kind.program.forward_only
        if not training:
            # All ranks must take part, also one that refuses its batch below.
            sync.publish()
        if self.feedback.pending:
            self.feedback.decide()
        given, divisor = self._given(kind, batch)
        terms = losses.terms(divisor, forward_only=not training, is_last=self._has_last_stage)
        if batch.loss_divisor is None and not losses.is_weighted:
            terms.rows = given.sizes
            if given.targets is not None and not self.pipeline.is_over_batch:
                loss_fn, chunks = self.pipeline.loss_fn, kind.program.schedule.chunks
                terms.shares, terms.count = shares(
                    loss_fn, given.targets, given.rows, given.sizes, chunks
                )
                if training and self._is_due:
                    has_replicas = len(self._topology.pipelines) > 1
                    warn_of_labels(loss_fn, given.targets, self._name, has_replicas=has_replicas)
        if losses.is_weighted and sync.is_accumulating and self.batches.outer.leaves:
            raise StepError(
                "an input comes from a graph of yours, in a step inside accumulate() with "
                "loss_reduction='token_mean': its gradient would not be divided by the weights of "
                "all steps. Give the input without its graph, or accumulate no steps"
            )
        if batch.time_dim != 1:
            self._unseen.clear()  # the dimension of time is unknown in outputs of stages
        # With a GradScaler backward begins with a gradient that is divided already.
        return given, terms, divisor if sync.scaler is None else 1.0

    def _given(self, kind: StepKind, batch: Batch) -> tuple[Given, float]:
        """Returns the microbatches of a step, and its divisor; compares them with other ranks'.

        See [Note: what was passed].
        """
        schedule, forward_only = kind.program.schedule, kind.program.forward_only
        every, number = self._check_every, self._num_steps[forward_only] + 1
        self._num_steps[forward_only] = number
        is_power, is_first = not number & (number - 1), forward_only not in self._learned
        self._is_due = is_power or is_first or (every > 0 and number % every == 0)
        facts, self.report = Facts(), {}
        try:
            divisor = 1.0 if self._losses.is_weighted else float(schedule.num_microbatches)
            if batch.loss_divisor is not None:
                divisor = self._checked_divisor(batch.loss_divisor)
            given = self.batches.cut(
                batch, schedule.num_sequences, schedule.chunks, needs_target=not forward_only
            )
            if self._is_due:
                facts = Facts(self.batches.numbers(given), given.rows, given.length, divisor)
                self._check.look_for_tables(given.passed, given.cut)
        finally:
            # All ranks come, also one that refuses its batch.
            if self._is_due:
                news = 0 if forward_only else int(self._sync.news())
                self._check.compare(replace(facts, news=news), number, forward_only=forward_only)
        for check in self._checks if self._is_due and not forward_only else ():
            check()
        self.report = given.report
        return given, divisor

    def _checked_divisor(self, chosen: float) -> float:
        """Returns a ``loss_divisor``, the divisor of losses and of complete gradients.

        Raises:
            StepError: If it is not a number above 0, or if losses have weights.
        """
        if self._losses.is_weighted:
            raise StepError(
                f"loss_divisor is {chosen}, and with loss_reduction='token_mean' the weights "
                f"that loss_fn returns divide: leave it out"
            )
        if self.pipeline.is_over_batch:
            raise StepError(
                f"loss_divisor is {chosen}, and with loss_over='batch' a step has one loss: let "
                f"loss_fn divide it"
            )
        divisor = float(chosen)
        if not (math.isfinite(divisor) and divisor > 0):
            raise StepError(f"loss_divisor is {divisor}, expected a number above 0")
        return divisor

    def _finish(self, kind: StepKind, terms: LossTerms, divisor: Tensor | float) -> None:
        """Divides and reduces gradients, after the last backward of this rank."""
        sync, training, late = self._sync, not kind.program.forward_only, None
        # All microbatches have their gradients now: see [Note: outer graphs].
        if training and self._losses.is_weighted:
            late = self._losses.divisor(terms)
            divisor = divisor if late is None else late
        if training:
            self._loose.refuse(kind.program.schedule.num_microbatches)
        self.batches.outer.backward(divisor)
        if training:
            sync.finish(divisor=late)
        if not training or sync.is_accumulating:
            # A training step that reduces has checked failures of other ranks in `finish`.
            self._notice.refuse_failed(StepError)

    def _fail(self, kind: StepKind, error: BaseException, *, begun: bool) -> None:
        """Ends a failed step: posts the error, and sends everything that other ranks wait for.

        Raises:
            StepError: If another rank failed first. It has the words of that rank.
        """
        sync, forward_only = self._sync, kind.program.forward_only
        # The notice comes first, because ranks that receive zeros below may fail on them, and must
        # then find the cause there.
        cause = None if isinstance(error, StallError) else self._notice.fail(error)
        # Nothing is waited for, because it is unknown which messages were sent, or no other rank
        # may come. See [Note: interrupts] in `transfers`.
        is_over = (
            self.edges.is_cut
            or kind.transfers.is_in_doubt
            or self._ends(error)
            or isinstance(error, StallError)
            or has_lost_connection(error)
        )
        if not forward_only:
            # Before the transfers, which wait for other ranks: the collectives that this starts do
            # not wait, and other ranks may already wait in `finish`.
            sync.abort(error, begun=begun, final=is_over)
        interrupt: BaseException | None = None
        if not is_over:
            try:
                kind.finish_transfers()
            except BaseException as again:  # noqa: BLE001 - a rank has died, or Ctrl-C
                is_over = True
                interrupt = None if isinstance(again, Exception) else again
                if not forward_only:
                    sync.abort(again, final=True)
        if is_over:
            # No edge can be used again. Connections are closed, and ranks that wait fail at once.
            self.edges.cut()
            kind.forget()
        self._sharded.forget()
        with contextlib.suppress(RuntimeError):  # another rank has died
            self._losses.send_owed_weight()
            # Every rank sends a loss in every step, or later losses would be added to this one. No
            # rank sends the loss of a first step that has failed: see [Note: first step].
            if forward_only in self._learned:
                self._losses.send(
                    self._losses.terms(
                        1.0, forward_only=forward_only, is_last=self._has_last_stage
                    ),
                    forward_only=forward_only,
                    failed=True,
                    times=() if kind.times is None else [0.0] * kind.times.size,
                )
        if interrupt is not None:
            raise interrupt from error
        # An interrupt stays one, and a DriftError is raised on all ranks. The error of a batch that
        # does not fit is this rank's own.
        stays = not begun or not isinstance(error, Exception) or isinstance(error, DriftError)
        if cause is not None and not stays:
            raise elsewhere(StepError, cause) from error

    # The first step of a kind.

    def _run_first(self, schedule: Schedule, batch: Batch, *, forward_only: bool) -> StepResult:
        """Runs the first step of a kind, and keeps its results for later steps.

        Raises:
            StepError: If the step failed on another rank.
            AgreementError: If the results of ranks do not match.
            Exception: The error of the step on this rank.
        """
        topology, specs = self._topology, dict[int, Spec]()
        links = self.pipeline.wiring.links
        kind = self._new_kind(schedule, links, specs, forward_only=forward_only)

        def run() -> tuple[tuple[LossTerms, Outputs] | BaseException, Learned | None]:
            # Returns the step's part of the result, or its error; and what this rank has learned.
            # An error is not raised inside `agree`, because `agree` would raise it on all ranks in
            # its own words. It is raised after `agree`, when all ranks have ended the step.
            try:
                terms, outputs = self._run(kind, batch)
            except BaseException as error:
                if nobody_comes(error):
                    raise
                return error, None
            return (terms, outputs), (specs, terms.metrics)

        # The step runs inside `agree`, because a rank that fails or hangs is then named on all
        # ranks.
        ranks = sorted(topology.ranks)
        outcome, replies = agree_keeping(
            f"the first {'evaluation' if forward_only else 'step'} of a Scheduler",
            run,
            ranks=ranks,
            timeout_seconds=self._wait_seconds,
        )
        if isinstance(outcome, BaseException):
            raise outcome
        learned = {r: one for r, one in zip(ranks, replies, strict=True) if one is not None}
        try:
            if len(learned) < len(ranks):
                raise elsewhere(StepError, str(self._notice.read()))
            metrics = {rank: names for rank, (_, names) in learned.items() if names is not None}
            same("the metrics of loss_fn", {rank: str(names) for rank, names in metrics.items()})
        except PipegradError:
            # All ranks raise it after the step: all results of the step are dropped everywhere.
            if not forward_only:
                self._sync.drop_gradients()
            raise
        self._losses.learned[forward_only] = next(iter(metrics.values()), None)
        # Each rank has seen the values that it made or received. All ranks of a pipeline together
        # have seen all of them, and a rank needs them all to lower the programs of the others.
        for rank in topology.ranks_along(topology.pipeline):
            specs.update(learned[rank][0])
        links = tuple(
            link._replace(differentiable=specs[number].differentiable)
            for number, link in enumerate(links)
        )
        self._learned[forward_only] = links, specs
        # Later training steps have no channels for gradients that never come.
        if forward_only or links == kind.program.links:
            self._kinds[forward_only, schedule.num_microbatches, schedule.chunks] = kind
        return self._result(kind, *outcome)


def _drop_failed(reference: weakref.ref[Steps], step: int) -> str:
    """Drops the gradients of a step that failed on another rank; returns its error text.

    Does nothing if another step has begun since: the gradients are its own then.
    """
    steps = reference()
    if steps is None or step != steps._notice.step:
        return ""
    steps._sync.drop_gradients()
    return f": {steps._notice.read()}"
