"""One step of a GradientSync: the code of each verb on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipegrad.comm.ending import Ending
from pipegrad.comm.failures import FailedSteps
from pipegrad.comm.graph_capture import outside_of_graphs
from pipegrad.errors import PipegradError, StepError
from pipegrad.gradients.drift.drift import DriftCheck
from pipegrad.gradients.norm import divide_
from pipegrad.gradients.optimizer_watch import OptimizerWatch
from pipegrad.gradients.param_sync import ParameterSync
from pipegrad.gradients.parameter import LiveParameter
from pipegrad.gradients.reducer import Reducer
from pipegrad.gradients.state import TRANSITIONS, State, Statistics, refusal
from pipegrad.model.module_tree import ModuleTree
from pipegrad.model.wrappers import reshard
from pipegrad.plan.plan import Plan
from pipegrad.plan.routes import has_result

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Step:
    """The present step on this rank. `GradientSync` has the same verbs, with their contracts.

    Args:
        plan: Of this rank.
        parameters: Of this rank, by key.
        trees: Find the parameters, by stage.
        reducer: Launches collectives, and waits for them.
        parameter_sync: Sends parameters after the optimizer's step.
        failures: Of all steps.
        drift: Compares copies.
        ending: Ends threads and groups when the GradientSync is garbage.
        wrapped: The modules of this rank's stages that FSDP2 has wrapped.
        alike: As in `OptimizerWatch`.
        keeps_state: Whether a handler has a state from step to step.
        keeps_equal: Whether all handlers keep copies of a parameter equal.

    Attributes:
        state: The present state; see `TRANSITIONS`.
        is_accumulating: Whether this step only accumulates.
        statistics: Of the last step that ended.
        watch: Checks optimizers.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, LiveParameter],
        trees: Mapping[int, ModuleTree],
        *,
        reducer: Reducer,
        parameter_sync: ParameterSync,
        failures: FailedSteps,
        drift: DriftCheck,
        ending: Ending,
        wrapped: Sequence[FSDPModule],
        alike: bool,
        keeps_state: bool,
        keeps_equal: bool,
    ) -> None:
        self.state = State.BETWEEN
        self.is_accumulating = False
        self.statistics = Statistics()
        self._plan = plan
        self._parameters = parameters
        self._trees = trees
        self._reducer = reducer
        self._parameter_sync = parameter_sync
        self._failures = failures
        self._drift = drift
        self._ending = ending
        self._wrapped = wrapped
        self._keeps_state = keeps_state
        self._keeps_equal = keeps_equal
        # Backward completes the last parameter of a stage first. Gradients are sent in that order.
        self._last_backwards: set[int] = set()  # stages whose next backward is the last
        self._by_stage: dict[int, list[LiveParameter]] = {stage: [] for stage in sorted(trees)}
        for parameter in reversed(list(parameters.values())):
            parameter.connect(self._on_accumulated)
            for stage in sorted(parameter.stages):
                self._by_stage[stage].append(parameter)
        # A stage's forward may write none of these: what it writes reaches no other rank.
        self._unwritten = {s: [p for p in ps if p.is_elsewhere] for s, ps in self._by_stage.items()}
        self._versions: dict[int, list[int]] = {}  # by stage, when it may compute
        self._by_id = {id(p.live): p for p in parameters.values()}
        self._only_accumulates = False  # whether the present step began inside `accumulate`
        self._divides_late = False  # whether `finish` is given the divisor
        self._final_stages: set[int] = set()
        self._late_error: StepError | None = None
        self._last_together = 0  # the last step of which all ranks have met at its end
        self.watch = OptimizerWatch(
            parameters.values(),
            parameter_sync=parameter_sync,
            alike=alike,
            on_refusal=self._refused,
            on_step=self.publish_stepped,
        )

    @property
    def is_open(self) -> bool:
        """Whether a step has begun and not ended."""
        return self.state in (State.OPEN, State.LEAVING)

    def check(self, verb: str) -> None:
        """Refuses a verb that the present state does not allow; see `TRANSITIONS`.

        Raises:
            StepError: If it is refused. It names the verb to call first.
        """
        if self.state not in TRANSITIONS[verb]:
            raise refusal(verb, self.state)

    def refuse_closed(self) -> None:
        """Raises StepError after `close`."""
        if self.state is State.CLOSED:
            raise refusal("prepare", self.state)

    def _go(self, verb: str) -> None:
        self.state = TRANSITIONS[verb][self.state]

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Makes the steps inside accumulate only."""
        before, self.is_accumulating = self.is_accumulating, True
        try:
            yield
        finally:
            self.is_accumulating = before

    # The verbs of a step, in order.

    def prepare(self, divisor: float | None) -> None:
        """Readies the buckets, or continues a step that only accumulated."""
        self.refuse_closed()
        # In LEAVING this verb begins no step, and other ranks are in the present one.
        with self._failures.refusing(begins=self.state is not State.LEAVING):
            self._prepare(divisor)

    def _prepare(self, divisor: float | None) -> None:
        self._failures.refuse()
        self.check("prepare")
        continues = self.is_open
        if continues and self._divides_late != (divisor is None):
            raise StepError(
                "the accumulated steps before gave prepare() a number, and this one None, or the "
                "reverse: give it a number in all of them, or None and their divisor to the last "
                "finish()"
            )
        self._parameter_sync.publish_if_due()
        self._parameter_sync.check_published()
        if not continues and self._wrapped:
            # An accumulated step may use the parameters again that FSDP2 has gathered.
            reshard(self._wrapped)
        self._refresh(continues=continues)
        self._divides_late = divisor is None
        if self._divides_late and not continues:
            for parameter in self._parameters.values():
                parameter.refuse_values()
        self._failures.begin()
        self._late_error = self._late_error if continues else None
        known = 1.0 if divisor is None else divisor
        zeroed = {
            key: p for key, p in self._parameters.items() if p.open(known, continuing=continues)
        }
        # Step 1 of the journey of a gradient. Only slots to which others add are zeroed.
        for buffer in self._reducer.buffers.values():
            buffer.reset([key for key in buffer.keys if key in zeroed])
        for parameter in zeroed.values():
            parameter.use_view()
        for parameter in self._parameters.values():
            parameter.watch()
        self._reducer.begin()
        if not self.is_accumulating:
            # Receives of partial sums are posted before the first backward: a rank that is ahead
            # sends without waiting for this one.
            self._reducer.expect()
        self._last_backwards.clear()
        self._final_stages.clear()
        self._note_versions(*self._by_stage)
        self._by_id = {id(p.live): p for p in self._parameters.values()}
        self.watch.follow(self._by_id)
        self.watch.expect(has_gradients=False)
        self._only_accumulates = self.is_accumulating
        self._go("prepare")
        self._ending.note_in_vain(True)

    def stage_first_use(self, stage: int) -> None:
        """Waits for the parameters of a stage that other ranks have published."""
        self.check("stage_first_use")
        self._parameter_sync.publish_if_stepped()
        is_coming = stage in self._parameter_sync.coming
        self._parameter_sync.first_use(stage)
        if is_coming:
            self._note_versions(stage)

    def stage_last_backward(self, stage: int) -> None:
        """Lets parameters become final one by one in the next backward of a stage."""
        self._check_stage("stage_last_backward", stage)
        self._refuse_written(stage)
        if not self.is_accumulating:
            self._last_backwards.add(stage)
            for parameter in self._by_stage[stage]:
                parameter.resume()

    def parameters_final(self, stage: int, parameters: Iterable[nn.Parameter]) -> None:
        """Marks some gradients of a stage as final."""
        self._check_stage("parameters_final", stage)
        if self.is_accumulating:
            return
        for tensor in parameters:
            parameter = self._by_id.get(id(tensor))
            if parameter is None or stage not in parameter.stages:
                raise StepError(
                    f"a parameter of shape {tuple(tensor.shape)} is none of those of stage "
                    f"{stage} that the ranks agreed on: make a new GradientSync on all ranks"
                )
            self._finalize_for(stage, parameter)

    def adopt(self, stage: int) -> None:
        """Moves gradients of a stage that were made without autograd into their slots."""
        for parameter in self._by_stage[stage] if self.is_open else ():
            if not parameter.final:
                parameter.adopt()

    def claim(self, tensor: nn.Parameter) -> torch.Tensor | None:
        """Returns memory for the first gradient of a parameter; None if it may not be written."""
        parameter = self._by_id.get(id(tensor))
        return parameter.claim() if parameter is not None and self.is_open else None

    def stage_final(self, stage: int) -> None:
        """Marks all gradients of a stage as final; launches complete buckets, in order."""
        self._check_stage("stage_final", stage)
        self._refuse_written(stage)
        if self.is_accumulating:
            return
        if stage in self._final_stages:
            raise StepError(f"stage {stage} is final already: call stage_final() once a step")
        self._go("stage_final")
        self._final_stages.add(stage)
        self._last_backwards.discard(stage)
        for parameter in self._by_stage[stage]:
            self._finalize_for(stage, parameter)

    def finish(self, divisor: torch.Tensor | None) -> bool:
        """Waits until every gradient is in place; returns whether copies must be compared."""
        if self.is_accumulating and self.state is not State.CLOSED:
            with self._failures.refusing(begins=False):
                if divisor is not None:
                    raise StepError(
                        "finish() inside accumulate() takes no divisor: give that of all "
                        "accumulated steps to the last finish()"
                    )
            self._failures.end()
            return False
        self.check("finish")
        with self._failures.refusing(begins=False):
            unfinished = sorted({s for p in self._parameters.values() for s in p.waiting})
            if unfinished:
                raise StepError(f"finish() before stage_final() of stages {unfinished}")
            if self._divides_late != (divisor is not None):
                raise StepError(
                    "one of prepare() and finish() takes the divisor: give it to finish() if it "
                    "was None in prepare(), and only then"
                )
        try:
            if self._late_error is not None:
                raise self._late_error
            exposed_seconds = self._reducer.wait()
            compares = self._keeps_equal and self._drift.count(self._failures.step)
            if self._is_together(compares=compares):
                # A failed rank takes part in this collective, too. So after it, the board says
                # whether to compare, and no rank compares alone.
                self._reducer.wait_for(self._reducer.meet())
            self._reducer.refuse_failed()
        except BaseException as error:
            self.abort(error)
            raise
        scaler = self.watch.scaler()
        if divisor is not None and scaler is None:
            self._divide(divisor)
        self._put_in_place(exposed_seconds)
        if divisor is not None and scaler is not None:
            scaler.divide_by(divisor)
        return compares

    def _divide(self, divisor: torch.Tensor) -> None:
        """Divides what this rank has of all gradients, before it is put in place."""
        # Whole buckets, not single gradients: the fewest operations, and each bucket is divided
        # once, whoever holds its gradients.
        rank, buffers = self._plan.rank, self._reducer.buffers.values()
        results = [b.payload for b in buffers if has_result(b.bucket.route, rank)]
        self._part_unreduced()
        unreduced = [p.gradient for p in self._parameters.values() if p.buffer is None]
        divide_([*results, *(g for g in unreduced if g is not None)], divisor)

    def _part_unreduced(self) -> None:
        """Copies gradients that nobody reduces and that share memory, before each is divided."""
        # Autograd may give two parameters, such as the terms of a sum, views of one gradient.
        taken = set[int]()
        for parameter in self._parameters.values():
            if parameter.buffer is None:
                parameter.keep_apart(taken)

    def _put_in_place(self, exposed_seconds: float) -> None:
        """Step 7 of the journey of a gradient, after the wait."""
        parameters = self._parameters.values()
        early = sum(parameter.left_early for parameter in parameters)
        if any(p.buffer is None and p.pending_divisor != 1 for p in parameters):
            self._part_unreduced()
        copies = sum(parameter.finish() for parameter in parameters)
        for buffer in self._reducer.buffers.values():
            buffer.end_step()
        self._reducer.room.free()
        self._go("finish")
        self._ending.note_in_vain(False)
        self._parameter_sync.expect()
        self.watch.expect(has_gradients=True)
        self._failures.end()
        launched = self._reducer.num_launched
        assert launched == len(self._plan.launches)
        self.statistics = Statistics(
            steps=self.statistics.steps + 1,
            collectives=launched,
            reduced_bytes=self._plan.reduced_bytes,
            copies=copies,
            early=early,
            published_bytes=self._plan.published_bytes,
            exposed_seconds=exposed_seconds + self._parameter_sync.take_blocked_seconds(),
        )

    def abort(self, error: BaseException, *, begun: bool = True, final: bool = False) -> str | None:
        """Ends a step that failed on this rank; see `GradientSync.abort`."""
        if self.state is State.CLOSED:
            return None
        if self._failures.has_posted(error):
            return self._failures.cause()
        if not begun:
            self._failures.settle()
            if self._failures.are_final:
                return None  # `prepare` has posted it
        # A step that only accumulates may be followed by the next one without `finish`.
        begins = not begun and (not self.is_open or self._only_accumulates)
        is_unfinished = self.is_open or not begun
        self._go("drop_gradients")
        accumulates = self._only_accumulates if begun else self.is_accumulating
        reduces = is_unfinished and not accumulates
        launches = reduces and bool(self._plan.launches)
        final = final or (launches and (self._keeps_state or self._reducer.has_failed))
        cause = self._failures.post(error, begins=begins, final=final)
        if is_unfinished:
            self.drop_gradients()
        if reduces and not final:
            # The same order as in a step that ends well: the collectives, the meeting of `finish`,
            # and the parameter sync that other ranks may publish after it. Otherwise ranks would
            # wait for each other; see [Note: failed steps].
            if launches or self._plan.independent_axes:
                self._give_up(begun=begun)
            compares = self._keeps_equal and self._drift.count(self._failures.step)
            if self._is_together(compares=compares):
                self._reducer.meet()
            if launches:
                self._parameter_sync.send()
        return cause

    def _is_together(self, *, compares: bool) -> bool:
        """Whether all ranks meet at the end of this step. The second call for a step returns False.

        Args:
            compares: Whether they compare copies then.
        """
        # Replicas that train alone send each other no gradients. By this collective they fail
        # together, and count the same steps.
        before, self._last_together = self._last_together, self._failures.step
        return compares or (bool(self._plan.independent_axes) and before != self._failures.step)

    def drop_gradients(self) -> None:
        """Sets all gradients to None, also those of accumulated steps."""
        self._go("drop_gradients")
        self.watch.expect(has_gradients=False)
        for parameter in self._parameters.values():
            parameter.drop()

    @outside_of_graphs
    def publish_stepped(self) -> None:
        """Publishes after a step of an optimizer of `GradientSync.optimizer`."""
        if self.state is State.BETWEEN:
            self._parameter_sync.publish_stepped()

    def close(self) -> None:
        """Refuses all verbs from now on, and removes all hooks."""
        self._go("close")
        self.watch.remove()
        for parameter in self._parameters.values():
            parameter.unwatch()

    # Inside.

    def _check_stage(self, verb: str, stage: int) -> None:
        if self.state is not State.CLOSED and stage not in self._by_stage:
            raise StepError(f"stage {stage} is not on this rank, which has {list(self._by_stage)}")
        self.check(verb)
        if stage in self._parameter_sync.coming:
            raise StepError(
                f"stage {stage} has computed while its parameters were on their way: call "
                f"stage_first_use({stage}) before its first forward"
            )

    def _note_versions(self, *stages: int) -> None:
        for stage in stages:
            self._versions[stage] = [p.live._version for p in self._unwritten[stage]]

    def _refuse_written(self, stage: int) -> None:
        """Makes `finish` fail if a stage has written parameters since it might compute."""
        before, unwritten = self._versions[stage], self._unwritten[stage]
        if before == (now := [p.live._version for p in unwritten]) or self._late_error is not None:
            return
        keys = [p.record.key for p, *v in zip(unwritten, before, now, strict=True) if v[0] != v[1]]
        self._late_error = StepError(
            f"stage {stage} has written {keys[0]!r} in its forward or backward, as "
            f"nn.Embedding(max_norm=), a clamp of weights inside forward and optimizer.step() in a "
            f"hook do: no copy, shard or main parameter of it gets what was written. Write it on "
            f"every rank between optimizer.step() and the next step, or compute with a changed "
            f"copy of it"
        )

    def _refresh(self, *, continues: bool) -> None:
        """Looks up all parameters for this step, and refuses changes that would make it wrong."""
        for tree in self._trees.values():
            tree.check()
        for buffer in self._reducer.buffers.values():
            buffer.look_again()
        for parameter in self._parameters.values():
            parameter.refresh(continuing=continues)

    def _on_accumulated(self, parameter: LiveParameter) -> None:
        """Called by autograd, perhaps in its own threads, after each accumulation."""
        if not self.is_open:
            return
        # Steps 2 and 3 of the journey of a gradient. Before the last backward of a stage, more
        # accumulations will follow.
        if not parameter.waiting <= self._last_backwards:
            parameter.adopt()
            parameter.pause()
            return
        is_complete = parameter.completes()
        if parameter.final:
            self._late_error = StepError(
                f"autograd added to the gradient of {parameter.record.key!r} after it was final; "
                f"a module that runs backward inside backward must do so in every step, and where "
                f"a stage has several backwards (an auxiliary loss, say) stage_last_backward() is "
                f"called before the very last one, or not at all"
            )
        elif is_complete:
            self._finalize(parameter)
        else:
            parameter.adopt()

    def _finalize_for(self, stage: int, parameter: LiveParameter) -> None:
        """Finalizes a parameter after `stage`, if no other local stage will add to it."""
        if parameter.stage_is_done(stage):
            self._finalize(parameter)

    def _finalize(self, parameter: LiveParameter) -> None:
        if self.state is State.OPEN:
            self.state = State.LEAVING
        if self._late_error is not None:
            # `finish` posts it, and only then launches what is left: no rank ends this step before.
            return
        try:
            gradient = parameter.close()
        except StepError as error:  # `finish` raises it, and posts it for other ranks
            self._late_error = error
            return
        if parameter.buffer is not None:
            self._reducer.announce(
                parameter.record.key,
                gradient,
                contributed=parameter.contributed,
                divisor=parameter.pending_divisor,
            )
            parameter.leave()

    def _give_up(self, *, begun: bool) -> None:
        """Launches the remaining collectives of a failed step, also those of `prepare`."""
        if not begun:
            if self._parameter_sync.is_taken:
                self._parameter_sync.publish_if_due()
            self._reducer.begin()
            for buffer in self._reducer.buffers.values():
                buffer.reset(())
            self._reducer.expect()
        self._reducer.give_up()

    def _refused(self, error: PipegradError) -> None:
        """Posts that an optimizer was refused on this rank, for ranks without an optimizer step."""
        if not self.is_open:
            self.abort(error, begun=False)
