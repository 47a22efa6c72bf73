"""A bucket's life in a step: gradients accumulate in it, it leaves complete, results come back.

Steps 1 to 4 and 7 of the journey of a gradient in docs/internals.md.

[Note: slots] From `begin` to `finish` the gradient of each parameter is its slot in the bucket:
zeros, to which autograd adds in place, and whoever else computes gradients. So nothing is copied,
and whether this rank has contributed is the version of the slot. A gradient may be elsewhere when
the bucket is complete: with ``create_graph=True`` autograd makes a new tensor, a user may set one,
and another one may have been there before. It is copied then.

Only the announced last backward of a bucket has hooks. Each counts how often its parameter was
added to. When all have come to what they came to in earlier steps, the bucket leaves at the next
hook, so that hooks of users behind ours have run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from operator import add, attrgetter, is_, ne
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from pipegrad.comm import sync_points
from pipegrad.errors import StepError
from pipegrad.gradients.bucket_memory import BucketMemory
from pipegrad.gradients.parameter import Param
from pipegrad.interop.private import accumulate_hooks
from pipegrad.model.dtensor import (
    as_dtensor,
    is_dtensor,
    local,
    redistribute_gradient,
)
from pipegrad.model.main_grad import MainGrad, gradients_of, set_gradient, take_gradient
from pipegrad.plugins.handler import Placement

NOTHING = {type(None)}
_VERSION = attrgetter("_version")
_NAMED = 1 << 30  # the count of a gradient that is final by its name: more than any other


class BucketState(Enum):
    """The states of a bucket."""

    RESTS = "between two steps, or its gradients were dropped"
    OPEN = "gradients accumulate"
    FINAL = "all gradients are in their slots, and it may be on its way"


class Hook:
    """A hook of ours on one parameter. It rests until `run`, without any cost.

    torch has the hooks of a parameter in a dictionary, and calls what is in it, in its order.
    """

    # The garbage collector does not see that a parameter holds its hooks. So what is called may
    # hold neither the parameter nor its bucket.

    def __init__(self, parameter: nn.Parameter) -> None:
        handle = parameter.register_post_accumulate_grad_hook(_nothing)
        self.hooks = accumulate_hooks(parameter)  # the handle refers to them weakly
        self.number: int = handle.id
        self.rest()

    def run(self, call: Callable[[nn.Parameter], None]) -> None:
        """Makes autograd call this behind all hooks that the parameter has now."""
        self.hooks.pop(self.number, None)
        self.hooks[self.number] = call

    def rest(self) -> None:
        """Calls nothing until `run`."""
        self.hooks.pop(self.number, None)

    def __del__(self) -> None:
        if hasattr(self, "number"):  # it is missing if torch has refused the hook
            self.rest()


def _nothing(_: nn.Parameter) -> None:
    """Is never called."""


class GradientBucket:
    """The gradients of one bucket on this rank, during a step.

    Args:
        parameters: By slot.
        memory: Of the bucket.
        may_leave_early: Whether a gradient may be final before its stage's backward ends.
        main_grad: Where gradients live; None for ``.grad``.

    Attributes:
        stages: Stages of this rank that add to these gradients.
        waiting: Those that may still do so in this step.
        num_early: How many gradients were final before the backward of their stage ended.
    """

    def __init__(
        self,
        parameters: Sequence[Param],
        memory: BucketMemory,
        *,
        may_leave_early: bool,
        main_grad: MainGrad | None = None,
    ) -> None:
        self.parameters = parameters
        self.memory = memory
        self.stages = frozenset(parameters[0].homes)
        self.waiting: set[int] = set()
        self.num_early = 0
        self.state = BucketState.RESTS
        self._fixed_divisor = memory.bucket.divisor
        self._may_leave_early = may_leave_early
        self._main_grad = main_grad
        self._divisor = 1.0
        self._main_shards = [p.apart for p in parameters]
        self._is_sharded = any(leg.placement is Placement.SHARD for leg in memory.bucket.route)
        self._has_result = any(p.main for p in parameters)
        # Whether slots are the results, so that nothing is put in place.
        self._is_plain = (
            not (self._is_sharded or memory.goes or any(self._main_shards))
            and parameters[0].main is not None
        )
        number = len(parameters)
        self._announced: set[int] = set()  # stages whose next backward is the last
        self._is_last = False  # whether this holds for all that are waiting
        # Additions to each in the last backward, and the most in the steps before. A parameter that
        # was not used so far is expected to be final only when its stage is.
        self._counts, self._expected = [0] * number, [0] * number
        self._left = [number]  # how many are not final; hooks share these three lists
        self._named: set[int] = set()  # final by `parameters_final`
        # What `.grad` is in a step: the slots. A DTensor holds its slot.
        self._gradients: list[torch.Tensor] = []
        self._present: list[torch.Tensor | None] = []  # read last
        self._own: set[int] = set()  # that a user had set when the step began
        self._touched: set[int] = set()  # whose hook has run, with `main_grad`
        self._begun: list[int] = []  # versions of the slots when the step began
        self._final: list[int] = []  # and when they were final
        self._absent: list[int] = []
        self._cleared: set[int] = set()  # results that were zeroed in place
        self._shown: dict[int, TensorWeakRef] = {}  # results that are in `main_grad`, too
        self._results: Sequence[torch.Tensor | TensorWeakRef | None] = ()
        self._result_versions: list[int] = []
        self._takes: list[Callable[[nn.Parameter], None]] = []
        if main_grad is not None:
            self._takes = [taking(i, weakref.ref(self)) for i in range(number)]
        self.follow()

    def connect(
        self,
        ready: dict[GradientBucket, None],
        leave: Callable[[], None],
        late: Callable[[StepError], None],
    ) -> None:
        """Sets what hooks use, perhaps in a thread of autograd. It does not keep an object alive.

        Args:
            ready: Gets the bucket when its last gradient is final in a backward.
            leave: A bound method; called at the next hook.
            late: A bound method; it makes the step fail in `finish`.
        """
        # The step holds its buckets. Strong references back would be a circle, and hooks and memory
        # of a GradientSync that nobody holds any more would stay until Python's collector runs.
        self._ready, self._on_late = ready, weakref.WeakMethod(late)
        self._calls = self._counting(weakref.ref(self), weakref.WeakMethod(leave))

    def _counting(
        self,
        called: weakref.ref[GradientBucket],
        on_leave: weakref.WeakMethod[Callable[[], None]],
    ) -> list[Callable[[nn.Parameter], None]]:
        """Returns the hooks of the last backward."""
        # They count in plain lists, without the bucket: each runs for its parameter in each step.
        counts, expected, left, ready = self._counts, self._expected, self._left, self._ready

        def counting(number: int) -> Callable[[nn.Parameter], None]:
            def count(_: nn.Parameter) -> None:
                # Those that became complete at an earlier hook: hooks of users have run by now.
                if ready and (leave := on_leave()) is not None:
                    leave()
                counts[number] = now = counts[number] + 1
                if now == expected[number]:
                    left[0] -= 1
                    if not left[0] and (bucket := called()) is not None:
                        bucket.counted()
                elif now > expected[number] and (bucket := called()) is not None:
                    bucket.counted_again(number)

            return count

        return list(map(counting, range(len(counts))))

    def follow(self) -> None:
        """Takes the present tensors of the parameters. Hooks of the tensors before are removed."""
        self._live = [p.tensor for p in self.parameters]
        self._has_dtensors = any(map(is_dtensor, self._live))
        # They are made when they first run: from then on autograd looks for hooks of the parameter
        # in each backward.
        self._hooks: list[Hook] = []
        self._taking: list[Hook] = []  # with `main_grad`
        self._gradients = []

    def unfollow(self) -> None:
        """Removes all hooks."""
        self._hooks, self._taking = [], []

    # The verbs of a step, in order.

    def check(self, *, continuing: bool) -> None:
        """Refuses gradients of the last step that would be reduced once more.

        Args:
            continuing: Whether the step continues accumulated steps.

        Raises:
            StepError: Names the parameter.
        """
        self._present = present = self._read_all()
        has_any = set(map(type, present)) != NOTHING
        if continuing:
            return
        self._cleared = set()
        if not self._results or not (has_any or any(self._main_shards)):
            return
        left: dict[int, torch.Tensor] = {}
        for number in reversed(range(len(present))):  # the order of the model
            gradient, main_shard = present[number], self._main_shards[number]
            result = gradient if main_shard is None else main_shard.tensor.grad
            if result is not None and result is self._last_result(number):
                left[number] = result
        for number in self._not_zeroed(left):
            raise StepError(
                f"the gradient of {self._key(number)!r} is already reduced, and another "
                f"backward would add to it: call optimizer.zero_grad() before the step, to "
                f"make it zero or None. optimizer.zero_grad() does so for the parameters that "
                f"this optimizer has, module.zero_grad() for all whose gradient is in .grad. "
                f"Or accumulate with 'with sync.accumulate():' around all steps but the last"
            )
        self._cleared = {*left}

    def refuse_values(self) -> None:
        """Refuses gradients that this step would add to, and then divide once more.

        Raises:
            StepError: If there is a gradient that is not zero.

        Sync: blocks the host if a gradient was zeroed, and not set to None.
        """
        for number, gradient in self._set_by_user():
            refuse_value(self._key(number), gradient)

    def _set_by_user(self) -> list[tuple[int, torch.Tensor]]:
        """Returns the gradients that are neither what this bucket has left, nor its slots."""
        held: Sequence[object] = self._gradients or [None] * len(self._present)
        return [
            (number, gradient)
            for number, (gradient, slot) in enumerate(zip(self._present, held, strict=True))
            if gradient is not None and gradient is not slot and number not in self._cleared
            if number not in self._shown or gradient is not self._shown[number]()
        ]

    def begin(self, divisor: float, *, continuing: bool) -> None:
        """Starts a step, or continues it: each gradient is its slot.

        Args:
            divisor: Of this step.
            continuing: Whether it continues accumulated steps.

        Sync: on the current stream.
        """
        # Everything that may refuse the step has run in `check` and `refuse_values`, for all
        # buckets: this changes gradients.
        before, self._divisor = self._divisor, divisor * self._fixed_divisor
        own, present = self._set_by_user(), self._present
        self._present, self._results, self._shown = [], (), {}
        self._restart(continuing=continuing)
        slots = self.memory.slots
        for number, gradient in enumerate(present) if continuing else ():
            if gradient is None:  # a user has dropped what had accumulated
                slots[number].zero_()
                self._own.discard(number)
                self._begun[number] = self._versions()[number]
        if own:
            self._own.update(number for number, _ in own)
            self.memory.copy([local(gradient) for _, gradient in own], [i for i, _ in own])
        # Now one division at the end is right for the gradients of all steps. One that a user has
        # set is not divided by the divisor of its step.
        if continuing and before != self._divisor:
            self.memory.scale(self._divisor / before)
        for number, _ in own if not continuing and divisor != 1 else ():
            slots[number].mul_(divisor)
        for parameter, gradient in zip(self._live, self._gradients, strict=True):
            set_gradient(parameter, gradient, self._main_grad)
        if not continuing:
            for main_shard in filter(None, self._main_shards):  # it would keep memory that is gone
                main_shard.set_grad(None)
            self._begun = self._versions()
        if self._main_grad is not None:
            self._run(self._taking, self._takes)

    def _restart(self, *, continuing: bool) -> None:
        """Makes all gradients open."""
        self.memory.reset(continuing=continuing)
        if not continuing:
            self._own = set()
        if not self._gradients or (self.memory.goes and not continuing):
            self._gradients = [self._hold(i, s) for i, s in enumerate(self.memory.slots)]
        self.state = BucketState.OPEN
        self.waiting = set(self.stages)
        self._announced.clear()
        self._is_last = False
        number = len(self.parameters)
        self._counts[:] = [0] * number
        self._left[0] = number
        self._named = set()
        self._touched = set()
        self._absent = []

    @property
    def has_final(self) -> bool:
        """Whether a gradient is final: the step cannot be continued."""
        return self._left[0] < len(self.parameters)

    def _run(self, hooks: list[Hook], calls: Sequence[Callable[[nn.Parameter], None]]) -> None:
        """Makes autograd call these, behind all hooks that the parameters have now."""
        if not hooks:
            hooks += map(Hook, self._live)
        for hook, call in zip(hooks, calls, strict=True):
            hook.run(call)

    def announce(self, stage: int) -> None:
        """Lets gradients become final one by one in the next backward of a stage."""
        self._announced.add(stage)
        self._update_last()

    def _update_last(self) -> None:
        is_open = self.state is BucketState.OPEN and bool(self.waiting)
        is_last = is_open and self.waiting <= self._announced
        if is_last and not self._is_last and self._may_leave_early:
            calls = self._calls
            if sync_points.in_use.current(self.memory.device) is not None:
                calls = [_on_streams(call, self.memory) for call in calls]
            self._run(self._hooks, calls)
        self._is_last = is_last

    def counted(self) -> None:
        """Called by the hook of the last gradient that becomes final."""
        if self.state is BucketState.OPEN:
            self._ready[self] = None

    def counted_again(self, number: int) -> None:
        """Called by a hook that runs more often than in earlier steps."""
        if self.state is BucketState.FINAL and (late := self._on_late()) is not None:
            late(too_late(repr(self._key(number))))

    def parameters_final(self, stage: int, numbers: Sequence[int]) -> bool:
        """Marks some gradients as final, if no other stage of this rank adds to them.

        Returns:
            Whether all are: the bucket must leave now.

        Sync: the current stream must be after everything that wrote them.
        """
        # Another stage of this rank may still add to these gradients. Then nobody divides or sends
        # them yet: the last of these stages makes them final.
        if self.state is not BucketState.OPEN or self.waiting != {stage}:
            return False
        self.memory.add_stream()
        for number in numbers:
            if number not in self._named:
                self._named.add(number)
                self._left[0] -= not 0 < self._expected[number] <= self._counts[number]
                self._counts[number] = _NAMED
        return not self._left[0]

    def stage_is_final(self, stage: int) -> bool:
        """Takes a stage out of `waiting`; returns whether the bucket must be filled now.

        Sync: the current stream must be after everything that wrote the stage's gradients.
        """
        self.waiting.discard(stage)
        if not self.waiting:
            # Once no backward runs: autograd may walk the hooks of a parameter until then.
            self._rest()
        if self.state is not BucketState.OPEN:
            return False
        self.memory.add_stream()
        # One stage fewer is waited for. So a backward that was announced before may be the last one
        # of the bucket now, and its hooks must count.
        self._update_last()
        return not self.waiting

    def fill(self) -> None:
        """Ends the step for these gradients: all are in their slots.

        Raises:
            StepError: If autograd has added to a gradient, and it was set to None.

        Sync: on the current stream, behind all streams that wrote.
        """
        for number, tensor in enumerate(self._live) if self._main_grad is not None else ():
            if tensor.grad is not None:  # torch's split backwards call no hooks
                self.take(number)
        absent, unsure, elsewhere = self._sorted()
        with self.memory.gathering():
            for number in absent:
                if number in self._own:
                    self.memory.slots[number].zero_()
            self.memory.copy([self._placed(number) for number in elsewhere], elsewhere)
            self.memory.lack(absent, unsure)
        for number in elsewhere:
            self._set(number, self._gradients[number])
        self.state, self._absent = BucketState.FINAL, [*absent, *unsure]
        self.num_early = len(self.parameters) - self._left[0]
        self._final = self._versions()
        self.memory.complete(self._divisor)

    def _sorted(self) -> tuple[list[int], list[int], list[int]]:
        """Returns which gradients are absent, which may be, and which are not in their slots."""
        absent, unsure, elsewhere = list[int](), list[int](), list[int]()
        present, versions = self._read_all(), self._versions()
        if all(map(is_, present, self._gradients)) and all(map(ne, versions, self._begun)):
            return absent, unsure, elsewhere
        for number, gradient in enumerate(present):
            is_written = versions[number] != self._begun[number]
            if gradient is None:
                self._refuse_gone(number, is_written=is_written)
                absent.append(number)
            elif gradient is not self._gradients[number]:
                elsewhere.append(number)
            elif not (is_written or number in self._own or number in self._touched):
                # A kernel may have written to an address, which no counter shows.
                (absent if self._main_grad is None else unsure).append(number)
        return absent, unsure, elsewhere

    def _refuse_gone(self, number: int, *, is_written: bool) -> None:
        if is_written:
            raise StepError(
                f"the gradient of {self._key(number)!r} is gone: autograd added to it in this "
                f"step, and it was set to None since, so nothing is left to reduce. Call "
                f"optimizer.step() after finish(), not in a hook; to drop a gradient inside a "
                f"step, zero it"
            )

    def _placed(self, number: int) -> torch.Tensor:
        """Returns a gradient that is elsewhere; of a DTensor, this rank's part of it."""
        redistribute_gradient(self._live[number])  # as autograd does before it adds
        gradient = self._read(number)
        assert gradient is not None
        return local(gradient)

    def give_up(self) -> None:
        """Fills the bucket with zeros, for other ranks that wait for it after a failed step."""
        self._rest()
        self.state = BucketState.FINAL
        with self.memory.gathering():
            self.memory.zero()
        self.memory.complete(1.0)

    def late(self) -> StepError | None:
        """Returns the error of a gradient that was added to after it was final."""
        if self.state is not BucketState.FINAL:
            return None
        self._present, versions = self._read_all(), self._versions()
        is_there = all(map(is_, self._present, self._gradients))
        if is_there and versions == self._final and self._main_grad is None:
            return None
        for number, gradient in enumerate(self._present):
            is_moved = gradient is not None and gradient is not self._gradients[number]
            is_added = self._main_grad is not None and self._live[number].grad is not None
            if is_moved or is_added or versions[number] != self._final[number]:
                return too_late(repr(self._key(number)))
        return None

    def finish(self) -> int:
        """Puts the results in place; returns how many were copied out of the bucket."""
        self.state = BucketState.RESTS
        self._rest()
        if self._may_leave_early:
            counts = (0 if i in self._named else n for i, n in enumerate(self._counts))
            self._expected[:] = map(max, self._expected, counts)
        self.memory.end_step()
        nobody = self._nobody() if self._absent else ()
        if nobody or not self._is_plain or not all(map(is_, self._present, self._gradients)):
            for number in range(len(self._live)):
                self._put_result(number, has_any=number not in nobody)
        self._present = []
        if self.memory.goes:
            self._gradients = []
        self.note_results()
        has_copies = self.memory.is_apart and not self.memory.goes and self._has_result
        return len(self._live) - len(nobody) if has_copies else 0

    def _nobody(self) -> Collection[int]:
        """Returns the slots to which no rank contributed. Blocks the host if this rank has some."""
        # As in one process, a result that was zeroed, and not set to None, stays zeros if no
        # rank contributed: zeros have travelled.
        asked = [i for i in self._absent if i not in self._cleared]
        if not asked or not self._has_result:
            return ()
        # The flags were summed with the gradients. To read them blocks the host, so a rank reads
        # them for gradients that it lacks itself, and in most steps not at all.
        contributed = self.memory.contributed()
        return {i for i in asked if not contributed[i]}

    def _put_result(self, number: int, *, has_any: bool) -> None:
        """Puts one result where its placement says."""
        main_shard = self._main_shards[number]
        if self._is_sharded:
            self._set(number, None)
            if main_shard is not None:
                begin, end = main_shard.begin, main_shard.begin + main_shard.tensor.numel()
                main_shard.set_grad(self.memory.shard(number, begin, end) if has_any else None)
            return
        has_any = has_any and self.parameters[number].main is not None
        result = self.memory.result(number) if has_any else None
        if main_shard is not None:
            main_shard.set_grad(result)
            if self._main_grad is None:
                # Another optimizer might step the parameter with it.
                result = None
            elif result is not None:  # left there until the next step, for users
                self._shown[number] = TensorWeakRef(result)
        self._set(number, None if result is None else self._hold(number, result))

    def note_results(self) -> None:
        """Takes the gradients as they are now for those of the step."""
        gradients = [self.result(number) for number in range(len(self._live))]
        # Weak references: a gradient that the user drops must be freed before the next step. Slots
        # stay.
        self._results = gradients
        if not self._is_plain:
            self._results = [None if g is None else TensorWeakRef(g) for g in gradients]
        self._result_versions = [
            -1 if g is None else self._writes(i, g) for i, g in enumerate(gradients)
        ]

    def result(self, number: int) -> torch.Tensor | None:
        """Returns what this rank's optimizer steps with."""
        main_shard = self._main_shards[number]
        return self._read(number) if main_shard is None else main_shard.tensor.grad

    def _last_result(self, number: int) -> torch.Tensor | None:
        last = self._results[number] if self._results else None
        return last() if isinstance(last, TensorWeakRef) else last

    def _writes(self, number: int, gradient: torch.Tensor) -> int:
        """Returns the number of writes to a gradient."""
        held = self._gradients[number] if self._gradients else None
        part = self.memory.slots[number] if gradient is held else local(gradient)
        return gradient._version + (part._version if part is not gradient else 0)

    def _is_unwritten(self, number: int, result: torch.Tensor) -> bool:
        return self._writes(number, result) == self._result_versions[number]

    def _not_zeroed(self, results: Mapping[int, torch.Tensor]) -> Sequence[int]:
        """Returns which results were not zeroed in place. Reads values only after writes."""
        # To read values blocks the host on a device, once for all. A result that nobody has written
        # since the step cannot have been zeroed.
        unwritten = [i for i, result in results.items() if self._is_unwritten(i, result)]
        if unwritten or not results:
            return unwritten
        sizes = torch.stack(torch._foreach_norm([*map(local, results.values())], 1)).tolist()
        return [number for number, size in zip(results, sizes, strict=True) if size != 0]

    def drop(self) -> None:
        """Sets all gradients to None, after a failed step: they may not be complete."""
        self.state, self._results, self._shown = BucketState.RESTS, (), {}
        self._rest()
        for number, main_shard in enumerate(self._main_shards):
            self._set(number, None)
            self._live[number].grad = None  # `main_grad` may not have it yet
            if main_shard is not None:
                main_shard.set_grad(None)

    # How gradients are read and set.

    def _key(self, number: int) -> str:
        return self.parameters[number].record.key

    def _read(self, number: int) -> torch.Tensor | None:
        tensor: Any = self._live[number]
        return tensor.grad if self._main_grad is None else getattr(tensor, "main_grad", None)

    def _read_all(self) -> list[torch.Tensor | None]:
        return gradients_of(self._live, self._main_grad)

    def _set(self, number: int, gradient: torch.Tensor | None) -> None:
        set_gradient(self._live[number], gradient, self._main_grad)

    def _hold(self, number: int, slot: torch.Tensor) -> torch.Tensor:
        """Returns what `.grad` must be, so that a gradient is this slot."""
        parameter = self._live[number]
        return slot if not is_dtensor(parameter) else as_dtensor(slot, parameter)

    def _versions(self) -> list[int]:
        """Returns how often each slot was written. DTensor counts writes in the whole one."""
        slots = self.memory.slots
        versions = list(map(_VERSION, slots))
        if self._has_dtensors:
            versions = list(map(add, versions, map(_VERSION, self._gradients)))
        return versions

    def _rest(self) -> None:
        for hook in self._hooks:
            hook.rest()

    def take(self, number: int) -> None:
        """Adds a gradient to ``main_grad``, perhaps in a thread of autograd."""
        if self.state is BucketState.OPEN:
            self._touched.add(number)
            assert self._main_grad is not None
            take_gradient(self._live[number], self._main_grad.dtype)


def _on_streams(
    count: Callable[[nn.Parameter], None], memory: BucketMemory
) -> Callable[[nn.Parameter], None]:
    def count_on_stream(parameter: nn.Parameter) -> None:
        memory.add_stream()  # on which autograd has added
        count(parameter)

    return count_on_stream


def taking(number: int, called: weakref.ref[Any]) -> Callable[[nn.Parameter], None]:
    """Returns a hook that calls `take` of an object, as long as somebody holds it."""

    def take(_: nn.Parameter) -> None:
        if (bucket := called()) is not None:
            bucket.take(number)

    return take


def refuse_value(key: str, gradient: torch.Tensor) -> None:
    """Refuses a gradient that is not zero, where the divisor of a step is known only at its end.

    Raises:
        StepError: If it is not zero.
    """
    if gradient.is_sparse or bool(local(gradient).any()):
        raise StepError(
            f"the parameter {key!r} has a gradient already, and the divisor of "
            f"this step is known only at its end, so it would be divided too: call "
            f"optimizer.zero_grad() before the step; or accumulate with "
            f"'with sync.accumulate():' around all steps but the last"
        )


def too_late(what: str) -> StepError:
    """Returns the error of a gradient that was added to after it was final."""
    return StepError(
        f"autograd added to the gradient of {what} after it was final; "
        f"a module that runs backward inside backward must do so in every step, and where "
        f"a stage has several backwards (an auxiliary loss, say) stage_last_backward() is "
        f"called before the very last one, or not at all"
    )
