"""The verbs of a step, with their contracts: the states in one table, and the code of each verb."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn

from pipegrad.comm.comm_stream import outside_of_graphs
from pipegrad.comm.failures import elsewhere
from pipegrad.comm.watch import Bounded
from pipegrad.errors import PipegradError, ReduceError, StepError, following, root_of
from pipegrad.gradients.bucket import BucketState, GradientBucket
from pipegrad.gradients.norm import divide_
from pipegrad.gradients.optimizer_watch import Gradients, News, OptimizerWatch, steps_alike
from pipegrad.gradients.parameter import Param
from pipegrad.gradients.set_up import Agreed, Parts
from pipegrad.model.wrappers import reshard
from pipegrad.plan.routes import has_result
from pipegrad.plugins.handler import GradientHandler


@dataclass(frozen=True)
class Statistics:
    """Numbers of the last finished step on this rank.

    Attributes:
        steps: Steps finished so far.
        early: Parameters whose gradient was sent before the backward of their stage ended.
        exposed_seconds: Time for which `finish` waited for collectives, and `stage_first_use`
            before it for parameters.
    """

    steps: int = 0
    early: int = 0
    exposed_seconds: float = 0.0


class State(Enum):
    """The states of a GradientSync."""

    BETWEEN = "between two steps"
    OPEN = "gradients accumulate"
    LEAVING = "some gradients are final, and may be on their way"
    CLOSED = "closed"


@dataclass
class OpenStep:
    """The state of one step; `prepare` makes it.

    Attributes:
        accumulates: Whether it only accumulates, because it began inside `accumulate`.
        divides_late: Whether `finish` is given the divisor.
        waiting: Stages that are not final.
        error: `finish` raises it.
        versions: Stage -> versions of parameters that it must not write, when it may first compute.
    """

    accumulates: bool = False
    divides_late: bool = False
    waiting: set[int] = field(default_factory=set)
    error: StepError | None = None
    versions: dict[int, list[int]] = field(default_factory=dict)


# For each verb, the states in which it may be called, and the state after it. In any other state it
# raises StepError. A gradient that becomes final also leads from OPEN to LEAVING, by any verb or
# hook. A step that only accumulates stays OPEN until it is reduced.
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
    "publish": _BETWEEN | _INSIDE,  # inside a step there is nothing to send
    **dict.fromkeys(
        (
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


class Step(Parts):
    """The verbs of a step, and its state. `GradientSync` has the verbs before and after a step.

    Args:
        agreed: The agreed model and plan.
        modules: This rank's stages.
        agree_seconds: How long the ranks wait for each other.
    """

    def __init__(
        self, agreed: Agreed, modules: Mapping[int, nn.Module], *, agree_seconds: float
    ) -> None:
        super().__init__(agreed, modules, agree_seconds=agree_seconds)
        self.plan = agreed.plan
        self.name = agreed.name
        self.agreed = agreed
        self._state = State.BETWEEN
        self._statistics = Statistics()
        self._is_accumulating = False
        handlers = agreed.plugins.values()
        # True if a handler may keep a state, because that may differ between ranks after a failed
        # step. A communication hook of a user may keep one outside of `state_dict`.
        self._keeps_state = any(
            handler.leaves == "mean" or type(handler).state_dict is not GradientHandler.state_dict
            for handler in handlers
        )
        self._keeps_equal = all(handler.keeps_equal for handler in handlers)
        self._ready: dict[GradientBucket, None] = {}  # complete, and not launched yet
        for bucket in self._buckets.values():
            bucket.connect(self._ready, self._leave_ready)
        # Backward completes the last parameter of a stage first. Buckets leave in that order.
        self._by_stage = {
            stage: [bucket for bucket in self._buckets.values() if stage in bucket.stages]
            for stage in sorted(agreed.topology.local_stages)
        }
        # A stage's forward may write none of these, because the values reach no other rank.
        unwritten = [p for p in self._parameters.values() if p.is_reduced or p.apart]
        self._unwritten = {s: [p for p in unwritten if s in p.homes] for s in self._by_stage}
        self._open = OpenStep()  # the last one that began
        self._last_together = 0  # the last step with a barrier at its end
        self._last_unused = 0  # the last step whose gradients no optimizer has used
        # The errors after which this rank cannot go on, and of a step whose collectives may still
        # run. The board has neither, because an error refers to this object by its frames.
        self._final: BaseException | None = None
        self._doubt: BaseException | None = None
        self._watch = OptimizerWatch(
            self._parameters.values(),
            parameter_sync=self._parameter_sync,
            name=agreed.name,
            alike=steps_alike(agreed.manifest, agreed.plan, agreed.topology),
            on_refusal=self._refused,
            refuse_reduced=self._refuse_reduced,
        )
        # (parameter, bucket of its gradient, its number there)
        self._by_id: dict[int, tuple[Param, GradientBucket | None, int]] = {
            id(p.tensor): (p, None, 0) for p in self._parameters.values()
        }
        for bucket in self._buckets.values():
            of_bucket = enumerate(bucket.parameters)
            self._by_id |= {id(p.tensor): (p, bucket, i) for i, p in of_bucket}

    # The verbs of a step, in order.

    @outside_of_graphs
    def prepare(self, *, divisor: float | None = 1.0) -> None:
        """Starts a step, or continues an accumulated step.

        ``.grad`` of each trained parameter is a view of a bucket until `finish`: zeros, to which
        autograd adds. A gradient that is elsewhere when the step ends is copied.

        Args:
            divisor: The gradients of this step are divided by it once, when they are final. It is
                the number of microbatches if the loss of each is a mean. The sum of all
                microbatches must fit into the gradient's dtype. With float16, divide the loss
                instead, or set ``parameter.grad_dtype`` to float32. Accumulated steps may have
                different divisors. A gradient that you set yourself is not divided. None if the
                divisor is unknown until the end: pass it to `finish` then; no parameter may have a
                gradient when the step begins. Steps that accumulate together all pass a number, or
                all pass None, and the last `finish` gets the divisor of all of them.

        Sync: zeroes the gradients of this step, or scales the accumulated ones, on the current
        stream. Call backward, and the verbs of this step, on this stream, or on a stream that waits
        for it.

        Raises:
            StepError: If a reduced gradient of the last step is still there and not zero, if there
                is any gradient and the divisor is None, if the divisor is None and accumulated
                steps have a number, or the reverse, if a parameter is not as the ranks agreed, if a
                parameter was changed after `publish`, or if gradients of this step are already
                sent. Then call it again, because other ranks wait for this one.
            ReduceError: If this rank cannot go on because an earlier step failed in a comm stream.
        """
        with self.bounded("prepare()"):
            self.refuse_closed()
            if self._state is State.OPEN and any(b.has_final for b in self._buckets.values()):
                self._state = State.LEAVING
            self._prepare(divisor)

    def _prepare(self, divisor: float | None) -> None:
        self._refuse_final()
        self._check("prepare")
        continues = self.is_in_step
        if continues and self._open.divides_late != (divisor is None):
            raise StepError(
                "the accumulated steps before gave prepare() a number, and this one None, or the "
                "reverse: give it a number in all of them, or None and their divisor to the last "
                "finish()"
            )
        # Publish, because the user's optimizer may have no hook of ours, and its writes must reach
        # the other ranks before their forward. Refuse writes after `publish`, because they would
        # never reach them.
        if self._parameter_sync.is_needed:
            self._parameter_sync.publish()
            self._parameter_sync.check_published()
        if not continues and self._wrapped:
            # Not in a continued step, because it may use again the parameters that FSDP2 has
            # gathered.
            reshard(self._wrapped)
        self._tensors.check_held()
        self._tensors.check_memory()
        # All checks come before the first `begin`, because a step that is refused must change
        # nothing: the user may call zero_grad() and then this verb once more. Reversed, because the
        # error then names the first parameter of the model.
        for bucket in reversed(self._buckets.values()):
            bucket.check(continuing=continues)
        if not continues:
            self._watch.supersede()
        if divisor is None and not continues:
            for bucket in self._buckets.values():
                bucket.refuse_values()
        self._failures.next_step()
        self._open = OpenStep(
            accumulates=self._is_accumulating,
            divides_late=divisor is None,
            waiting=set(self._by_stage),
            error=self._open.error if continues else None,
        )
        # Step 1 of the journey of a gradient.
        self._ready.clear()
        for bucket in self._buckets.values():
            bucket.begin(1.0 if divisor is None else divisor, continuing=continues)
        self._reducer.begin()
        if not self._is_accumulating:
            # Post receives of partial sums before the first backward, because a rank that is ahead
            # then sends without waiting for this one.
            self._reducer.expect()
        self._record_versions(*self._by_stage)
        before = self._failures.step - 1
        self._last_unused = self._last_unused if self._watch.gradients is Gradients.USED else before
        self._watch.expect(has_gradients=False)
        # Change the state last, because an error above must not change it.
        self._state = TRANSITIONS["prepare"][self._state]
        self._ending.in_vain = True

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Makes steps inside only accumulate; they finalize, divide and launch nothing."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    @property
    def is_accumulating(self) -> bool:
        """True if this step only accumulates."""
        return self._is_accumulating

    @property
    def is_in_step(self) -> bool:
        """True after `prepare` until `finish`, while gradients are not reduced."""
        return self._state in (State.OPEN, State.LEAVING)

    @outside_of_graphs
    def stage_first_use(self, stage: int) -> None:
        """Waits for the parameters of `stage` that other ranks have published.

        Call it before the stage's first forward of a step, or of an evaluation.

        Sync: afterwards the current stream may read them. Blocks the host if collectives do.

        Raises:
            ReduceError: If a parameter sync failed; on every rank that waits for it.
        """
        with self.bounded("stage_first_use()"):
            self._check("stage_first_use")
            if not self._parameter_sync.is_needed:
                return
            self._parameter_sync.publish()
            if stage in self._parameter_sync.coming:
                self._parameter_sync.first_use(stage)
                self._record_versions(stage)

    @outside_of_graphs
    def stage_last_backward(self, stage: int) -> None:
        """Announces the last backward of `stage`: in it, parameters become final one by one.

        Optional, and for whole backwards only. `stage_final` finalizes all other parameters.
        """
        self._check_stage("stage_last_backward", stage)
        self._refuse_written(stage)
        if not self._is_accumulating:
            for bucket in self._by_stage[stage]:
                bucket.announce(stage)

    @outside_of_graphs
    def parameters_final(self, stage: int, parameters: Iterable[nn.Parameter]) -> None:
        """Marks some parameters of `stage` as final, before `stage_final`.

        Sync: the current stream must be after everything that wrote their gradients.

        Raises:
            StepError: If a parameter is not in the agreed model.
        """
        self._check_stage("parameters_final", stage)
        if self._is_accumulating:
            return
        by_bucket: dict[GradientBucket, list[int]] = {}
        for tensor in parameters:
            parameter, bucket, number = self._by_id.get(id(tensor), (None, None, 0))
            if parameter is None or stage not in parameter.homes:
                raise StepError(
                    f"a parameter of shape {tuple(tensor.shape)} is none of those of stage "
                    f"{stage} that the ranks agreed on: make a new GradientSync on all ranks"
                )
            if bucket is not None:
                by_bucket.setdefault(bucket, []).append(number)
        for bucket, numbers in by_bucket.items():
            if bucket.parameters_final(stage, numbers):
                self._complete(bucket)

    @outside_of_graphs
    def stage_final(self, stage: int) -> None:
        """Marks all parameters of `stage` as final; launches complete buckets, in order.

        Sync: the current stream must be after everything that wrote the stage's gradients.
        """
        self._check_stage("stage_final", stage)
        self._refuse_written(stage)
        if self._is_accumulating:
            return
        if stage not in self._open.waiting:
            raise StepError(f"stage {stage} is final already: call stage_final() once a step")
        self._state = TRANSITIONS["stage_final"][self._state]
        self._open.waiting.remove(stage)
        for bucket in self._by_stage[stage]:
            if bucket.stage_is_final(stage):
                self._complete(bucket)

    @outside_of_graphs
    def finish(self, *, divisor: torch.Tensor | None = None) -> None:
        """Waits until every gradient is in place.

        If no rank contributed to a gradient, it is None again, as in one process. In the steps 2,
        4, 8 and so on, and later every `check_every` steps, all ranks compare the copies of each
        parameter by cheap checksums, and the master copies that are equal on several ranks. One bit
        that differs is an error. Ranks on machines of several kinds do not compare, because these
        may round differently. Steps that only accumulate do not count.

        Args:
            divisor: If `prepare` got None: a scalar on the device, the same on all ranks. All
                gradients are divided by it once, after their reductions. Until then they are sums,
                which must fit into the dtypes of the gradients and of the wire.

        Sync: the current stream waits for the comm streams. The host waits if collectives block it,
        and for the flag of each parameter without a gradient on this rank. With a divisor there is
        one pass over the results of this rank, on the current stream.

        Raises:
            ReduceError: If a collective failed; on every rank that waits for it. Within a second if
                collectives block the host, otherwise after the timeout of their backend.
            StepError: If a stage is not final, a gradient changed after it was final, or the
                divisor was given twice, never, or inside `accumulate`.
            DriftError: On all ranks, if copies have drifted apart.
        """
        with self.bounded("finish()"):
            if self._finish(divisor):
                reshard(self._wrapped)
                self._drift.look()

    def _finish(self, divisor: torch.Tensor | None) -> bool:
        """Ends a step; returns True if copies must be compared."""
        if self._is_accumulating and self._state is not State.CLOSED:
            if divisor is not None:
                raise StepError(
                    "finish() inside accumulate() takes no divisor: give that of all accumulated "
                    "steps to the last finish()"
                )
            return False
        self._check("finish")
        if waiting := sorted(self._open.waiting):
            raise StepError(f"finish() before stage_final() of stages {waiting}")
        if self._open.divides_late != (divisor is not None):
            raise StepError(
                "one of prepare() and finish() takes the divisor: give it to finish() if it was "
                "None in prepare(), and only then"
            )
        try:
            # Before the wait, because other ranks may already wait for this one, and `abort` posts
            # the reason for them. After it, they could use sums that lack a gradient.
            late = (bucket.late() for bucket in self._buckets.values())
            if (error := self._open.error or next(filter(None, late), None)) is not None:
                raise error
            exposed_seconds = self._reducer.wait()
            compares = self._keeps_equal and self._drift.count(self._failures.step)
            if self._is_together(compares=compares):
                # After this collective all ranks read the same on the board, and no rank compares
                # alone, because a failed rank takes part in it too.
                self._reducer.barrier()()
            self._failures.refuse_failed()
        except BaseException as error:
            self.abort(error)
            raise
        if divisor is not None:
            # Whole buckets, not single gradients, because this needs the fewest operations, and
            # divides each bucket once.
            rank, memories = self.plan.rank, [b.memory for b in self._buckets.values()]
            divide_([m.reduced for m in memories if has_result(m.bucket.route, rank)], divisor)
        self._put_in_place(exposed_seconds)
        return compares

    def _put_in_place(self, exposed_seconds: float) -> None:
        """Step 7 of the journey of a gradient, after the wait."""
        early = sum(bucket.num_early for bucket in self._buckets.values())
        for bucket in self._buckets.values():
            bucket.finish()
        self._state = TRANSITIONS["finish"][self._state]
        self._ending.in_vain = False
        if self._parameter_sync.is_needed:
            exposed_seconds += self._parameter_sync.blocked_seconds
            self._parameter_sync.expect()
        self._watch.expect(has_gradients=True)
        assert self._reducer.num_launched == len(self.plan.launches)
        self._statistics = Statistics(self._statistics.steps + 1, early, exposed_seconds)

    def abort(self, error: BaseException, *, begun: bool = True, final: bool = False) -> str | None:
        """Ends a failed step. All ranks can go on with the next step, and raise an error for this.

        Afterwards all gradients are None, also accumulated ones. This rank still launches the
        remaining collectives of the step, with zeros, because other ranks wait for them. Other
        ranks raise an error in `finish`. The next `prepare` waits for the collectives.

        The failure is final if a collective itself failed, or was not launched. It is also final if
        a handler has a communication hook or a state, which the zeros would spoil.

        Args:
            error: The error that was raised.
            begun: False if `prepare` was not called on this rank, or raised, and this rank will not
                try this step again.
            final: Whether this rank cannot go on.

        Returns:
            The message of a rank that failed before this rank, which is the cause; or None.
        """
        if self._state is State.CLOSED:
            return None
        if error is self._doubt:
            return self._failures.cause()
        if not begun:
            self._wait_for_failed()
            if self._final is not None:
                return None  # `prepare` has posted it
        # A step that only accumulates may be followed by the next one without `finish`.
        begins = not begun and (not self.is_in_step or self._open.accumulates)
        is_unfinished = self.is_in_step or not begun
        self._state = TRANSITIONS["drop_gradients"][self._state]
        accumulates = self._open.accumulates if begun else self._is_accumulating
        reduces = is_unfinished and not accumulates
        launches = reduces and bool(self.plan.launches)
        final = final or (launches and (self._keeps_state or self._reducer.has_failed))
        cause = self._post(error, begins=begins, final=final)
        if is_unfinished:
            self._drop()
        if reduces and not final:
            # Keep the order of a step that ends well, because ranks would otherwise wait for each
            # other: the collectives, the barrier of `finish`, and the parameter sync that other
            # ranks may publish after it. See [Note: failed steps].
            if launches or self.plan.independent_axes:
                self._give_up(begun=begun)
            # Count a failed step too, because this rank would otherwise compare copies in another
            # step than the others, and all would wait.
            compares = self._keeps_equal and self._drift.count(self._failures.step)
            if self._is_together(compares=compares):
                # Start it, because the other ranks wait for it in `finish`. Do not wait for it,
                # because the user must see this rank's error now.
                self._reducer.barrier()
            if launches:
                self._parameter_sync.send()
        return cause

    def _is_together(self, *, compares: bool) -> bool:
        """True if this step ends with a barrier. The second call for a step returns False.

        Args:
            compares: Whether ranks compare copies then.
        """
        # Replicas that train alone need it to fail together, and to count the same steps, because
        # they send each other no gradients. If waits do not block the host, a rank needs it because
        # it could read the board before a slower rank has posted, and step with its zeros.
        before, self._last_together = self._last_together, self._failures.step
        always = bool(self.plan.independent_axes) or self._reducer.needs_barrier
        return compares or (always and before != self._failures.step)

    def drop_gradients(self) -> None:
        """Sets all gradients to None, also the gradients of accumulated steps.

        Raises:
            StepError: Inside a step that reduces gradients.
        """
        if self.is_in_step and not self._open.accumulates:
            raise StepError(
                "drop_gradients() inside a step, which other ranks are in, too: call it after "
                "finish(); or give up the step on all ranks, by abort()"
            )
        self._drop()

    def _drop(self) -> None:
        self._state = TRANSITIONS["drop_gradients"][self._state]
        self._watch.expect(has_gradients=False)
        for bucket in self._buckets.values():
            bucket.drop()

    def news(self) -> News:
        """Returns flags of this rank's optimizers since the last call; see `OptimizerWatch`."""
        return self._watch.news()

    def refuse_closed(self) -> None:
        """Raises StepError after `close`."""
        if self._state is State.CLOSED:
            raise refusal("prepare", self._state)

    def bounded(self, what: str, ranks: Sequence[int] = ()) -> Bounded:
        """Returns a context that limits the time of a verb, or of a wait; see `Bounded`."""
        return Bounded(what, ranks, within_seconds=self.agreed.options.step_timeout_seconds)

    # Inside.

    def _check(self, verb: str) -> None:
        """Refuses a verb that the present state does not allow; see `TRANSITIONS`.

        Raises:
            StepError: If the state does not allow it. It names the verb to call first.
        """
        if self._state not in TRANSITIONS[verb]:
            raise refusal(verb, self._state)

    def _check_stage(self, verb: str, stage: int) -> None:
        if self._state is not State.CLOSED and stage not in self._by_stage:
            raise StepError(f"stage {stage} is not on this rank, which has {list(self._by_stage)}")
        self._check(verb)
        if stage in self._parameter_sync.coming:
            raise StepError(
                f"stage {stage} has computed while its parameters were on their way: call "
                f"stage_first_use({stage}) before its first forward"
            )

    def _record_versions(self, *stages: int) -> None:
        for stage in stages:
            self._open.versions[stage] = [p.tensor._version for p in self._unwritten[stage]]

    def _refuse_written(self, stage: int) -> None:
        """Makes `finish` fail if a stage has written parameters since it might compute."""
        before, unwritten = self._open.versions[stage], self._unwritten[stage]
        now = [p.tensor._version for p in unwritten]
        if before == now or self._open.error is not None:
            return
        keys = [p.record.key for p, *v in zip(unwritten, before, now, strict=True) if v[0] != v[1]]
        self._open.error = StepError(
            f"stage {stage} has written {keys[0]!r} in its forward or backward, as "
            f"nn.Embedding(max_norm=), a clamp of weights inside forward and optimizer.step() in a "
            f"hook do: no copy, shard or main parameter of it gets what was written. Write it on "
            f"every rank between optimizer.step() and the next step, or compute with a changed "
            f"copy of it"
        )

    def _leave_ready(self) -> None:
        """Sends the buckets that hooks have found complete. Autograd's threads may call it."""
        # Two threads may find the same ones. The second one does nothing.
        for bucket in list(self._ready):
            self._ready.pop(bucket, None)
            self._complete(bucket)

    def _complete(self, bucket: GradientBucket) -> None:
        """Sends a bucket whose gradients are all final. Autograd's threads may call it."""
        if not self.is_in_step or bucket.state is not BucketState.OPEN:
            return
        # Set the state before a bucket leaves. From now on `prepare` raises StepError, because no
        # division can be undone.
        self._state = State.LEAVING
        if self._open.error is not None:
            # `finish` posts it, and then launches the rest, because no rank may end this step
            # before the post.
            return
        try:
            self._reducer.leave(bucket.memory.bucket.index, bucket.fill)
        except StepError as error:  # `finish` raises it, and posts it for other ranks
            self._open.error = error

    def _post(self, error: BaseException, *, begins: bool, final: bool) -> str | None:
        """Posts the error of a step that failed on this rank; returns the result of `abort`.

        Args:
            error: The error.
            begins: Whether the step has not begun on this rank.
            final: Whether this rank cannot go on.
        """
        if begins:
            self._failures.next_step()
        # Set first, because an interrupt may come during the messages below.
        self._doubt = error
        if final:
            self._final = self._final or error
        return self._failures.fail(root_of(error), final=final)  # torch wraps what a stage raises

    def _wait_for_failed(self) -> None:
        """Waits until everything that a failed step launched on this rank has ended."""
        # Wait, because the failed step and the next step use the same communicators. If a
        # collective never ends, the communicators of two ranks are at different collectives, and a
        # later collective would receive the data of another one.
        doubt, self._doubt = self._doubt, None
        if doubt is not None and self._final is None:
            try:
                self._reducer.wait()
            except Exception:  # noqa: BLE001 - a collective failed, or never ends
                self._final = doubt

    def _refuse_final(self) -> None:
        """Raises an error if this rank cannot go on after an earlier step.

        Raises:
            ReduceError: If an earlier failure is final. It contains that failure.
        """
        # Some ranks have made a step, and others have not.
        failed = self._failures.last_failed()
        if (
            self._watch.gradients is Gradients.USED
            and self._last_unused < failed <= self._failures.step
        ):
            self._final = self._final or StepError(
                f"step {failed} has failed on another rank after it ended on this one, and "
                f"optimizer.step() has used its gradients here, so the parameters of ranks are of "
                f"different steps"
            )
        self._wait_for_failed()
        if self._failures.has_failures and (words := self._failures.read_final()) is not None:
            self._final = self._final or elsewhere(ReduceError, words)
        if self._final is not None:
            self._failures.next_step()
            # Post the reason on the board of this step, because the other ranks begin this step
            # too, and wait for this rank.
            self._failures.post(f"it failed before: {self._final}", final=True)
            raise following(
                ReduceError(
                    f"this GradientSync failed before and the ranks are out of step; end the "
                    f"process and resume from a checkpoint. The failure: {self._final}"
                )
            ) from self._final

    def _refuse_reduced(self) -> None:
        """Refuses a step of another sync with the same parameters, which would add to gradients."""
        if self.is_in_step:
            raise StepError(
                "another Scheduler of the same parameters is inside accumulate(): end its step, "
                "and call optimizer.zero_grad(), before a step of this one"
            )
        for bucket in reversed([*self._buckets.values()]):
            bucket.check(continuing=False)

    def _give_up(self, *, begun: bool) -> None:
        """Launches the remaining collectives of a failed step, also the receives of `prepare`."""
        if not begun:
            if self._parameter_sync.is_taken:
                self._parameter_sync.publish()
            self._reducer.begin()
            for bucket in self._buckets.values():
                bucket.memory.reset()
            self._reducer.expect()
        self._reducer.give_up()
        for index, bucket in self._buckets.items():
            self._reducer.leave(index, bucket.give_up)
        self._reducer.run_late()

    def _refused(self, error: PipegradError) -> None:
        """Posts the error of an optimizer on this rank, for ranks without an optimizer step."""
        if not self.is_in_step:
            self.abort(error, begun=False)
