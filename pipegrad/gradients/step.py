"""One step of a GradientSync: states and verbs in one table, and the code of each verb."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter, eq, is_
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipegrad.comm.comm_stream import outside_of_graphs
from pipegrad.comm.ending import Ending
from pipegrad.comm.failures import FailedSteps
from pipegrad.errors import PipegradError, StepError
from pipegrad.gradients.bucket import BucketState, GradientBucket
from pipegrad.gradients.drift import DriftCheck
from pipegrad.gradients.local_gradients import LocalGradients
from pipegrad.gradients.norm import divide_
from pipegrad.gradients.optimizer_watch import OptimizerWatch
from pipegrad.gradients.param_sync import ParameterSync
from pipegrad.gradients.parameter import LiveParameter, ModuleTree
from pipegrad.gradients.reducer import Reducer
from pipegrad.model.gradient_storage import GradAttribute, GradientAccessor
from pipegrad.model.wrappers import reshard
from pipegrad.plan.plan import Plan
from pipegrad.plan.routes import has_result

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class Statistics:
    """Numbers of the last finished step on this rank.

    Attributes:
        steps: Steps finished so far.
        collectives: Collectives launched.
        reduced_bytes: Bytes of gradients that they reduced. A communication hook sends fewer.
        copies: Gradients copied out of a bucket; 0 if all are views.
        early: Parameters whose gradient was sent before the backward of their stage ended.
        published_bytes: Bytes of its parameter sync, to this rank and from it.
        exposed_seconds: Time for which `finish` waited for collectives, and `stage_first_use`
            before it for parameters.
    """

    steps: int = 0
    collectives: int = 0
    reduced_bytes: int = 0
    copies: int = 0
    early: int = 0
    published_bytes: int = 0
    exposed_seconds: float = 0.0


class State(Enum):
    """The states of a GradientSync."""

    BETWEEN = "between two steps"
    OPEN = "gradients accumulate"
    LEAVING = "some gradients are final, and may be on their way"
    CLOSED = "closed"


# For each verb, the states in which it may be called, and the state after it. In any other state it
# is refused. A gradient that becomes final also leads from OPEN to LEAVING, whichever verb or hook
# has made it final. A step that only accumulates stays OPEN until it is reduced.
_INSIDE = {State.OPEN: State.OPEN, State.LEAVING: State.LEAVING}
_BETWEEN = {State.BETWEEN: State.BETWEEN}
TRANSITIONS: Mapping[str, Mapping[State, State]] = {
    "prepare": {State.BETWEEN: State.OPEN, State.OPEN: State.OPEN},
    "stage_first_use": _BETWEEN | _INSIDE,
    "stage_last_backward": _INSIDE,
    "parameters_final": _INSIDE,
    "stage_final": {State.OPEN: State.LEAVING, State.LEAVING: State.LEAVING},
    "finish": {State.OPEN: State.BETWEEN, State.LEAVING: State.BETWEEN},
    "drop_gradients": dict.fromkeys(State, State.BETWEEN) | {State.CLOSED: State.CLOSED},
    "publish_if_due": _BETWEEN | _INSIDE,
    **dict.fromkeys(
        (
            "publish",
            "wait_parameters",
            "clip_grad_norm_",
            "non_finite",
            "check_replicas",
            "synchronize_parameters",
            "state_dict",
            "load_state_dict",
        ),
        _BETWEEN,
    ),
    "close": dict.fromkeys(State, State.CLOSED),
}


def refusal(verb: str, state: State) -> StepError:
    """Returns the error of a verb in a state that `TRANSITIONS` does not list for it.

    It names the verb to call first.
    """
    if state is State.CLOSED:
        return StepError("this GradientSync is closed: make another one, on all ranks")
    if verb == "prepare":
        return StepError("prepare() inside a step whose gradients are leaving: call finish()")
    if verb == "finish":
        return StepError("finish() without prepare(): there is no step to finish")
    if state is State.BETWEEN:
        return StepError(f"{verb}() outside a step: call prepare() first")
    return StepError(f"{verb}() inside a step: call finish() first")


_TRAITS = tuple(map(attrgetter, ("requires_grad", "dtype", "grad_dtype", "shape")))


class Step:
    """The present step on this rank. `GradientSync` has the same verbs, with their contracts.

    Args:
        plan: Of this rank.
        parameters: Of this rank, by key.
        buckets: Of this rank, by number.
        local: The gradients that nobody reduces.
        accessor: Where gradients live.
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
        buckets: Mapping[int, GradientBucket],
        local: LocalGradients,
        accessor: GradientAccessor,
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
        self._buckets = buckets
        self._placed = [p for p in parameters.values() if p.placed.is_updated_elsewhere]
        self._local = local
        self._everything: list[GradientBucket | LocalGradients] = [*buckets.values(), local]
        self._is_plain = isinstance(accessor, GradAttribute)
        for bucket in buckets.values():
            bucket.connect(self)
        # Backward completes the last parameter of a stage first. Buckets leave in that order.
        self._by_stage = {
            stage: [b for b in buckets.values() if stage in b.stages] for stage in sorted(trees)
        }
        # A stage's forward may write none of these: what it writes reaches no other rank.
        self._unwritten = {
            stage: [p for p in parameters.values() if p.is_elsewhere and stage in p.stages]
            for stage in self._by_stage
        }
        self._versions: dict[int, list[int]] = {}  # by stage, when it may compute
        self._only_accumulates = False  # whether the present step began inside `accumulate`
        self._divides_late = False  # whether `finish` is given the divisor
        self._final_stages: set[int] = set()
        self._waiting: set[int] = set()  # stages that are not final in this step
        self._late_error: StepError | None = None
        self._last_together = 0  # the last step of which all ranks have met at its end
        self.watch = OptimizerWatch(
            parameters.values(),
            parameter_sync=parameter_sync,
            alike=alike,
            on_refusal=self._refused,
            on_step=self.publish_stepped,
            find_changed=self.changed_result,
        )
        self._locate()
        self._follow()

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
        if self.state is State.OPEN and any(b.has_final for b in self._buckets.values()):
            self.state = State.LEAVING
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
            for gradients in self._everything:
                gradients.refuse_values()
        self._failures.begin()
        self._late_error = self._late_error if continues else None
        # Step 1 of the journey of a gradient.
        for gradients in self._everything:
            gradients.begin(1.0 if divisor is None else divisor, continuing=continues)
        self._reducer.begin()
        if not self.is_accumulating:
            # Receives of partial sums are posted before the first backward: a rank that is ahead
            # sends without waiting for this one.
            self._reducer.expect()
        self._final_stages.clear()
        self._waiting = set(self._by_stage)
        self._note_versions(*self._by_stage)
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
            for bucket in self._by_stage[stage]:
                bucket.announce(stage)

    def parameters_final(self, stage: int, parameters: Iterable[nn.Parameter]) -> None:
        """Marks some gradients of a stage as final."""
        self._check_stage("parameters_final", stage)
        if self.is_accumulating:
            return
        by_bucket: dict[int, list[int]] = {}
        for tensor in parameters:
            parameter, bucket, number = self._by_id.get(id(tensor), (None, None, 0))
            if parameter is None or stage not in parameter.stages:
                raise StepError(
                    f"a parameter of shape {tuple(tensor.shape)} is none of those of stage "
                    f"{stage} that the ranks agreed on: make a new GradientSync on all ranks"
                )
            if bucket is not None:
                by_bucket.setdefault(bucket, []).append(number)
        for bucket, numbers in by_bucket.items():
            self._buckets[bucket].parameters_final(stage, numbers)

    def adopt(self, stage: int) -> None:
        """Moves gradients of a stage that were made without autograd into their slots."""
        for bucket in self._by_stage[stage] if self.is_open else ():
            bucket.adopt()

    def claim(self, tensor: nn.Parameter) -> torch.Tensor | None:
        """Returns memory for the first gradient of a parameter; None if it may not be written."""
        parameter, bucket, number = self._by_id.get(id(tensor), (None, None, 0))
        if parameter is None or not self.is_open or not parameter.record.requires_grad:
            return None
        gradients = self._local if bucket is None else self._buckets[bucket]
        return gradients.claim(number)

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
        self._waiting.discard(stage)
        for bucket in self._by_stage[stage]:
            if bucket.stage_is_final(stage):
                self.complete(bucket)

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
            if self._waiting:
                unfinished = sorted(self._waiting)
                raise StepError(f"finish() before stage_final() of stages {unfinished}")
            if self._divides_late != (divisor is not None):
                raise StepError(
                    "one of prepare() and finish() takes the divisor: give it to finish() if it "
                    "was None in prepare(), and only then"
                )
        try:
            late = (b.late() for b in self._buckets.values())
            if (error := self._late_error or next(filter(None, late), None)) is not None:
                raise error
            self._local.settle()
            exposed_seconds = self._reducer.wait()
            compares = self._keeps_equal and self._drift.count(self._failures.step)
            if self._is_together(compares=compares):
                # A failed rank takes part in this collective, too. So after it, the board says
                # whether to compare, and no rank compares alone.
                self._reducer.meet()()
            self._reducer.refuse_failed()
        except BaseException as error:
            self.abort(error)
            raise
        scaler = self.watch.scaler()
        divides = divisor if scaler is None else None
        if divides is not None:
            # Whole buckets, not single gradients: the fewest operations, and each bucket is divided
            # once, whoever holds its gradients.
            rank, buffers = self._plan.rank, self._reducer.buffers.values()
            divide_([b.payload for b in buffers if has_result(b.bucket.route, rank)], divides)
        self._put_in_place(exposed_seconds, divides)
        if divisor is not None and scaler is not None:
            scaler.divide_by(divisor)
        return compares

    def _put_in_place(self, exposed_seconds: float, divisor: torch.Tensor | None) -> None:
        """Step 7 of the journey of a gradient, after the wait."""
        early = sum(bucket.num_early for bucket in self._buckets.values())
        copies = sum(bucket.finish() for bucket in self._buckets.values())
        self._local.finish(divisor)
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
        # together, and count the same steps. And where waits do not block the host, a rank could
        # read the board before a slower rank has posted, and step with its zeros.
        before, self._last_together = self._last_together, self._failures.step
        always = bool(self._plan.independent_axes) or self._reducer.meets_always
        return compares or (always and before != self._failures.step)

    def drop_gradients(self) -> None:
        """Sets all gradients to None, also those of accumulated steps."""
        self._go("drop_gradients")
        self.watch.expect(has_gradients=False)
        for gradients in self._everything:
            gradients.drop()

    @outside_of_graphs
    def publish_stepped(self) -> None:
        """Publishes after a step of an optimizer of `GradientSync.optimizer`."""
        if self.state is State.BETWEEN:
            self._parameter_sync.publish_stepped()

    def close(self) -> None:
        """Refuses all verbs from now on, and removes all hooks."""
        self._go("close")
        self.watch.remove()
        for gradients in self._everything:
            gradients.unfollow()

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
        replaced = [tree for tree in self._trees.values() if not tree.check()]
        if replaced or not self._is_as_agreed():
            before = self._live
            for parameter in self._parameters.values():
                parameter.look_up()
            self._locate()
            if not all(map(is_, before, self._live)):
                self._follow()
        for parameter in self._placed:
            parameter.placed.check(parameter.live)
        for gradients in reversed(self._everything):
            gradients.check(continuing=continues)

    def _is_as_agreed(self) -> bool:
        """Whether all parameters are the tensors of the last step, with the agreed properties."""
        # This is done for each parameter in each step, so without bytecode for each. No list of
        # shapes is made: it would be garbage that Python counts, and looks through.
        found = map(dict.get, self._tables, self._names)
        return (
            self._is_plain
            and all(map(is_, found, self._held))
            and all(
                all(map(eq, map(get, self._live), agreed))
                for get, agreed in zip(_TRAITS, self._agreed, strict=True)
            )
        )

    def _locate(self) -> None:
        """Remembers where all parameters are, and what was agreed on them."""
        parameters = self._parameters.values()
        homes = [(p, tree, name) for p in parameters for tree, name in p.homes]
        owners = [tree.owner(name) for _, tree, name in homes]
        self._tables, self._names = [table for table, _ in owners], [name for _, name in owners]
        self._held = [p.live for p, *_ in homes]
        self._live = [p.live for p in parameters]
        self._agreed = [list(map(get, self._live)) for get in _TRAITS]

    def _follow(self) -> None:
        """Uses the present tensors of the parameters from now on."""
        # (parameter, number of its bucket, its number there)
        by_id: dict[int, tuple[LiveParameter, int | None, int]] = {
            id(p.live): (p, None, 0) for p in self._parameters.values()
        }
        everything: list[tuple[int | None, GradientBucket | LocalGradients]]
        everything = [*self._buckets.items(), (None, self._local)]
        for index, gradients in everything:
            gradients.follow()
            by_id |= {id(p.live): (p, index, i) for i, p in enumerate(gradients.parameters)}
        self._by_id = by_id
        self.watch.follow({id(p.live): p for p in self._parameters.values()})

    def complete(self, bucket: GradientBucket) -> None:
        """Sends a bucket whose gradients are all final. Autograd's threads may call it."""
        if not self.is_open or bucket.state is not BucketState.OPEN:
            return
        self.state = State.LEAVING
        if self._late_error is not None:
            # `finish` posts it, and only then launches what is left: no rank ends this step before.
            return
        try:
            self._reducer.leave(bucket.buffer.bucket.index, bucket.fill)
        except StepError as error:  # `finish` raises it, and posts it for other ranks
            self._late_error = error

    def late(self, error: StepError) -> None:
        """Makes `finish` fail."""
        self._late_error = self._late_error or error

    def note_results(self) -> None:
        """Takes the gradients as they are now for those of the step."""
        for gradients in self._everything:
            gradients.note_results()

    def changed_result(self) -> str | None:
        """Returns a parameter whose result was changed since the end of the step."""
        return next(filter(None, (each.changed_result() for each in self._everything)), None)

    def _give_up(self, *, begun: bool) -> None:
        """Launches the remaining collectives of a failed step, also those of `prepare`."""
        if not begun:
            if self._parameter_sync.is_taken:
                self._parameter_sync.publish_if_due()
            self._reducer.begin()
            for bucket in self._buckets.values():
                bucket.buffer.reset()
            self._reducer.expect()
        self._reducer.give_up()
        for index, bucket in self._buckets.items():
            self._reducer.leave(index, bucket.give_up)
        self._reducer.run_late()

    def _refused(self, error: PipegradError) -> None:
        """Posts that an optimizer was refused on this rank, for ranks without an optimizer step."""
        if not self.is_open:
            self.abort(error, begun=False)
