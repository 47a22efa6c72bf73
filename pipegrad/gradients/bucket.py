"""A bucket's life in a step: gradients enter it, it leaves complete, and results come back.

Steps 1 to 4 and 7 of the journey of a gradient in docs/internals.md.

[Note: the unit of work] What happens to every gradient is done once a bucket: by one operator over
many tensors, or on the flat memory. In the last backward of a stage each parameter has a hook that
counts. A large gradient is copied by its hook, while it is in the cache. So a parameter costs the
host a call of Python, and an entry in some lists.

[Note: where a gradient is] Where ``.grad`` points to says how far a gradient is:

=========================== ===================================================================
None                        Nothing was added in this step, or the bucket is final and its memory
                            goes.
memory of autograd's        Something was added. A large gradient moves into its slot at once.
its slot                    It has moved: autograd adds to the slot. Or the bucket is final.
the result of the last step It was zeroed in place, or the step is refused.
=========================== ===================================================================

What is rare is in careful.py: gradients elsewhere than in ``.grad``, DTensors, and buckets that are
sent in another dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from pipegrad.comm import sync_points
from pipegrad.errors import StepError
from pipegrad.gradients.bucket_buffer import BucketBuffer, write
from pipegrad.gradients.parameter import LiveParameter
from pipegrad.model.dtensor import local

# 64 KiB of fp32: its copy takes longer than the call of a hook. Not tuned.
LARGE_NUMEL = 16384
NOTHING = {type(None)}
_HOOKS = attrgetter("_post_accumulate_grad_hooks")  # of users, while ours rest
_NEVER = 1 << 40  # no bucket has as many parameters


class BucketState(Enum):
    """The states of a bucket."""

    RESTS = "between two steps, or its gradients were dropped"
    OPEN = "gradients accumulate"
    FINAL = "all gradients are in their slots, and it may be on its way"


class Hook:
    """A hook of ours on one parameter, behind all hooks of users. It rests until `run`.

    torch has the hooks of a parameter in a dictionary, and calls what is in it. So a hook rests
    without any cost by leaving the dictionary.
    """

    # The garbage collector does not see that a parameter holds its hooks. So what is called may
    # hold neither the parameter nor its bucket.

    def __init__(self, parameter: nn.Parameter) -> None:
        handle = parameter.register_post_accumulate_grad_hook(_nothing)
        # The handle has only a weak reference to the dictionary.
        self.hooks: dict[int, Any] = handle.hooks_dict_ref() or {}
        self.number: int = handle.id
        self.rest()

    def run(self, call: Callable[[nn.Parameter], None]) -> None:
        """Makes autograd call this behind all hooks that the parameter has now."""
        # A hook of the user may change the gradient, so it must run before ours.
        self.hooks.pop(self.number, None)
        self.hooks[self.number] = call

    def rest(self) -> None:
        """Calls nothing until `run`."""
        self.hooks.pop(self.number, None)

    @property
    def runs_last(self) -> bool:
        """Whether no hook of the user has come behind this one."""
        return next(reversed(self.hooks), self.number) == self.number

    def __del__(self) -> None:
        if hasattr(self, "number"):  # it is missing if torch has refused the hook
            self.rest()


def _nothing(_: nn.Parameter) -> None:
    """Is never called."""


class GradientBucket:
    """The gradients of one bucket on this rank, during a step.

    Args:
        parameters: By slot.
        buffer: The memory.
        mean: Besides their divisors, they are divided by this before they are sent.
        may_leave_early: Whether a gradient may be final before its stage's backward ends.

    Attributes:
        stages: Stages of this rank that add to these gradients.
        waiting: Those that may still do so in this step.
        num_early: How many gradients were final before the backward of their stage ended.
    """

    def __init__(
        self,
        parameters: Sequence[LiveParameter],
        buffer: BucketBuffer,
        *,
        mean: int,
        may_leave_early: bool,
    ) -> None:
        self.parameters = parameters
        self.buffer = buffer
        self.stages = parameters[0].stages
        self.waiting: set[int] = set()
        self.num_early = 0
        self.state = BucketState.RESTS
        self._device = buffer.device
        self._fixed_divisor = buffer.bucket.divisor
        self._mean = mean
        self._divisor = 1.0
        number = len(parameters)
        self._is_large = [p.live.numel() >= LARGE_NUMEL for p in parameters]
        # Parameters whose hook runs from the beginning of a step. Witnesses see whether gradients
        # that were made are gone at its end: two, as one of them may be unused. Later it is a
        # parameter that is used.
        self._watched = {i for i, large in enumerate(self._is_large) if large}
        self._witnesses = {0, number - 1}
        self._main_shards = [p.main_shard for p in parameters]
        self._is_sharded = parameters[0].is_sharded
        self._is_plain = (
            not (self._is_sharded or buffer.goes or any(self._main_shards))
            and parameters[0].has_result
        )
        # Whether one accumulation in the last backward is the whole gradient, for each parameter.
        # None: unknown before the first step. With a checkpoint that runs backward inside backward
        # each accumulation adds only a part.
        self._accumulates_once: bool | None = None if may_leave_early else False
        self._again = False
        self._announced: set[int] = set()  # stages whose next backward is the last
        self._is_last = False  # whether this holds for all that are waiting
        self._final = bytearray(number)  # 1: by its hook, 2: by `parameters_final`
        self._left = [0]  # how many are not; shared with the hooks
        self._num_named = 0
        self._fired = bytearray(number)  # of those whose hook runs from the beginning
        self._divided: set[int] = set()
        self._absent = frozenset[int]()
        self._cleared: set[int] = set()  # results that were zeroed in place
        self._are_zero: bool | None = None  # all slots, as far as this check has read them
        self._to_share: Sequence[int] = ()  # slots to which somebody adds without autograd
        self._before: list[torch.Tensor | None] | None = None
        self._has_streams = False
        self._num_writes = 0  # into the slots, when they were final, and when they had the results
        self._lacks = False  # whether a gradient is None when the step ends
        self._results: Sequence[torch.Tensor | TensorWeakRef | None] = ()
        self._result_versions: list[int] = []
        self.follow()

    def connect(
        self, complete: Callable[[GradientBucket], None], late: Callable[[StepError], None]
    ) -> None:
        """Sets what to call, perhaps in a thread of autograd. It does not keep their object alive.

        Args:
            complete: A bound method; called when the last gradient is final in a backward.
            late: A bound method; it makes the step fail in `finish`.
        """
        # The step holds its buckets. Strong references back would be a circle, and hooks and memory
        # of a GradientSync that nobody holds any more would stay until Python's collector runs.
        self._on_complete, self._on_late = weakref.WeakMethod(complete), weakref.WeakMethod(late)

    def follow(self) -> None:
        """Takes the present tensors of the parameters. Hooks of the tensors before are removed."""
        self._live = [p.live for p in self.parameters]
        # A hook is made when it first runs: from then on autograd looks for hooks of the parameter
        # in each backward, which costs as much as half of a call.
        self._hooks: dict[int, Hook] = {}
        this = weakref.ref(self)
        self._watch = [_watching(i, this) for i in range(len(self._live))]
        self._last_calls = [
            self._watch[i] if large else _counting(i, self._final, self._left, this)
            for i, large in enumerate(self._is_large)
        ]

    def unfollow(self) -> None:
        """Removes all hooks."""
        self._hooks = {}

    # How gradients are read and set. CarefulBucket does both in another way.

    def read(self, number: int) -> torch.Tensor | None:
        """Returns a gradient."""
        return self._live[number].grad

    def _key(self, number: int) -> str:
        return self.parameters[number].record.key

    def _read_all(self) -> list[torch.Tensor | None]:
        return [tensor.grad for tensor in self._live]

    def _set(self, number: int, gradient: torch.Tensor | None) -> None:
        self._live[number].grad = gradient

    # The verbs of a step, in order.

    def check(self, *, continuing: bool) -> None:
        """Refuses gradients of the last step that would be reduced once more.

        Args:
            continuing: Whether the step continues accumulated steps.

        Raises:
            StepError: Names the parameter.
        """
        self._are_zero = None
        present = self._read_all()
        has_any = set(map(type, present)) != NOTHING
        self._before = present if has_any else None
        if continuing:
            return
        self._cleared = set()
        if not self._results or not (has_any or any(self._main_shards)):
            return
        for number in reversed(range(len(present))):  # the order of the model
            gradient, main_shard = present[number], self._main_shards[number]
            result = gradient if main_shard is None else main_shard.tensor.grad
            if result is None or result is not self._last_result(number):
                continue
            if not self._is_zeroed(number, result):
                raise StepError(
                    f"the gradient of {self._key(number)!r} is already reduced, and another "
                    f"backward would add to it: call optimizer.zero_grad() before the step, to "
                    f"make it zero or None. optimizer.zero_grad() does so for the parameters that "
                    f"this optimizer has, module.zero_grad() for all whose gradient is in .grad. "
                    f"Or accumulate with 'with sync.accumulate():' around all steps but the last"
                )
            self._cleared.add(number)

    def refuse_values(self) -> None:
        """Refuses gradients that this step would add to, and then divide once more.

        Raises:
            StepError: If there is a gradient that is not zero.

        Sync: blocks the host if a gradient was zeroed, and not set to None.
        """
        for number, gradient in enumerate(self._before or ()):
            if gradient is not None and number not in self._cleared:
                refuse_value(self._key(number), gradient)

    def begin(self, divisor: float, *, continuing: bool) -> None:
        """Starts a step, or continues it.

        Args:
            divisor: Of this step.
            continuing: Whether it continues accumulated steps.

        Sync: on the current stream. It may scale gradients of earlier steps.
        """
        # Everything that may refuse the step has run in `check` and `refuse_values`, for all
        # buckets: this changes gradients.
        before, self._divisor = self._divisor, divisor * self._fixed_divisor
        if self._before is not None:
            # Now one division at the end is right for the gradients of all steps. One that the
            # user has set is not divided by the step's divisor.
            scale = self._divisor / (before if continuing else self._fixed_divisor)
            for number, gradient in enumerate(self._before):
                if gradient is None or (number in self._cleared and not continuing):
                    continue
                if scale != 1:
                    with torch.no_grad():
                        gradient.mul_(scale)
            # The list would hold the memory of gradients that move into their slots in this step.
            self._before = None
        self._results = ()
        if not continuing:
            self._fired[:] = bytes(len(self._fired))
            if self._cleared:
                self._drop_zeros()
        self._restart()
        # A slot that is written by its first gradient needs no zeros. So only slots are zeroed to
        # which somebody adds without autograd.
        self.buffer.reset(self._to_share)
        self._begin_hooks()

    @property
    def has_final(self) -> bool:
        """Whether a gradient is final, and perhaps divided: the step cannot be continued."""
        return bool(self._num_named or (self._accumulates_once and any(self._final)))

    def _restart(self) -> None:
        """Makes all gradients open."""
        self.state = BucketState.OPEN
        self.waiting = set(self.stages)
        self._announced.clear()
        self._is_last = self._again = False
        number = len(self.parameters)
        self._final[:] = bytes(number)
        self._left[0] = number if self._accumulates_once else number + _NEVER
        self._num_named = self.num_early = 0
        self._divided = set()
        self._absent = frozenset()

    def _begin_hooks(self) -> None:
        # A parameter with hooks of a user is watched, since they may drop its gradient. And where
        # there are streams every parameter is: its hook says on which stream its gradient was made.
        self._has_streams = sync_points.in_use.current(self._device) is not None
        watched: Collection[int] = range(len(self._live))
        if not self._has_streams:
            watched = self._watched | self._witnesses
            self._rest()
            tables = list(map(_HOOKS, self._live))
            if any(tables):
                watched = watched.union(i for i, table in enumerate(tables) if table)
        self._run(watched, self._watch)

    def _run(self, numbers: Iterable[int], calls: Sequence[Callable[[nn.Parameter], None]]) -> None:
        """Makes autograd call these, behind all hooks that the parameters have now."""
        hooks = self._hooks
        for number in numbers:
            if (hook := hooks.get(number)) is None:
                hook = hooks[number] = Hook(self._live[number])
            # As `Hook.run`, without a call for each parameter.
            hook.hooks.pop(hook.number, None)
            hook.hooks[hook.number] = calls[number]

    def _runs_last(self, number: int) -> bool:
        """Whether no hook of a user comes behind ours, if there is ours."""
        hook = self._hooks.get(number)
        return hook is None or hook.runs_last

    def announce(self, stage: int) -> None:
        """Lets gradients become final one by one in the next backward of a stage."""
        self._announced.add(stage)
        self._update_last()

    def _update_last(self) -> None:
        is_open = self.state is BucketState.OPEN and bool(self.waiting)
        is_last = is_open and self.waiting <= self._announced
        if is_last and not self._is_last:
            calls = self._watch if self._has_streams else self._last_calls
            self._run(range(len(self._live)), calls)
        self._is_last = is_last

    def accumulated(self, number: int) -> None:
        """Called by a hook after each accumulation, perhaps in a thread of autograd.

        Sync: on the stream on which autograd has added.
        """
        if self.state is not BucketState.OPEN:
            return  # `late` compares
        if self._has_streams:
            self.buffer.add_stream()
        self._fired[number] = 1
        if not self._is_last:
            if self._is_large[number]:
                self._move(number)
            # On CPU one call in a step says enough: a gradient was made. On a device the next
            # microbatch may run on another stream, for which `fill` must wait, too. So there the
            # hook goes on.
            if not self._has_streams:
                self._hooks[number].rest()
            return
        if self._final[number]:
            self.accumulated_again(number)
            return
        self._final[number] = 1
        self._left[0] -= 1
        if self._is_large[number]:
            (self._take if self._accumulates_once else self._move)(number)
        if not self._left[0]:
            self.counted(number)

    def counted(self, number: int) -> None:
        """Called by the hook of the last gradient that becomes final."""
        # Behind a user's hook the gradient may change. Then the end of its stage completes it.
        if self.state is BucketState.OPEN and self._runs_last(number):
            self._complete()

    def accumulated_again(self, number: int) -> None:
        """Called by a hook that runs twice in the last backward of a stage."""
        self._again = True
        if number in self._divided and (late := self._on_late()) is not None:
            late(too_late(repr(self._key(number))))

    def parameters_final(self, stage: int, numbers: Sequence[int]) -> None:
        """Marks some gradients as final, if no other stage of this rank adds to them.

        Sync: the current stream must be after everything that wrote them.
        """
        # Another stage of this rank may still add to these gradients. Then nobody divides or sends
        # them yet: the last of these stages makes them final.
        if self.state is not BucketState.OPEN or self.waiting != {stage}:
            return
        if self._has_streams:
            self.buffer.add_stream()
        for number in numbers:
            if self._final[number] != 2:
                self._num_named += 1
                self._left[0] -= not self._final[number]
                self._final[number] = 2
                if self._is_large[number]:
                    self._take(number)
        if not self._left[0] or self._num_named == len(self.parameters):
            self._complete()

    def stage_is_final(self, stage: int) -> bool:
        """Takes a stage out of `waiting`; returns whether the bucket must be filled now.

        Sync: the current stream must be after everything that wrote the stage's gradients.
        """
        self.waiting.discard(stage)
        if self.state is not BucketState.OPEN:
            return False
        if self._has_streams:
            self.buffer.add_stream()
        # One stage fewer is waited for. So a backward that was announced before may be the last one
        # of the bucket now, and its hooks must count.
        self._update_last()
        return not self.waiting

    def _complete(self) -> None:
        if (complete := self._on_complete()) is not None:
            complete(self)

    def _move(self, number: int) -> None:
        """Moves a new gradient into its slot; autograd adds the next ones to it.

        Sync: on the current stream, on which autograd has made the gradient.
        """
        gradient = self._live[number].grad
        # With create_graph=True autograd makes a new tensor for each sum.
        if gradient is None or gradient.requires_grad:
            return
        if self.buffer.slots and gradient is self.buffer.slots[number]:
            return
        # The stream that has made the gradient copies it. So the gradient may be freed at once: who
        # gets its memory next, on that stream, runs behind the copy.
        slot = self.buffer.claim()[number]
        write(slot, gradient)
        self._live[number].grad = slot

    def move_all(self) -> None:
        """Moves all new gradients into their slots.

        Sync: as `_move`.
        """
        if self.state is not BucketState.OPEN:
            return
        slots = self.buffer.slots
        present = self._read_all()
        fresh = [
            number
            for number, gradient in enumerate(present)
            if gradient is not None and not (slots and gradient is slots[number])
            if not (self._final[number] or gradient.requires_grad)
        ]
        if fresh:
            if self._has_streams:
                self.buffer.add_stream()
            with self.buffer.filling():
                self.buffer.fill([g for i in fresh if (g := present[i]) is not None], fresh, ())
            for number in fresh:
                self._live[number].grad = self.buffer.slots[number]

    def claim(self, number: int) -> torch.Tensor | None:
        """Returns a slot for a caller that writes the first gradient; None if it may not.

        Sync: afterwards the current stream may write to it.
        """
        is_free = self._live[number].grad is None and not self._final[number]
        if self.state is not BucketState.OPEN or not is_free:
            return None
        return self.buffer.claim()[number]

    def _take(self, number: int) -> None:
        """Copies a final gradient into its slot, divided in the same pass.

        Sync: as `_move`.
        """
        gradient, divisor = self._live[number].grad, self._divisor * self._mean
        if (
            gradient is None
            or gradient.is_sparse
            or not self._runs_last(number)
            or (self.buffer.slots and gradient is self.buffer.slots[number])
        ):
            # `fill` does what is left. It runs behind all hooks of users, and one of theirs behind
            # this one may still change the gradient.
            return
        slot = self.buffer.claim()[number]
        write(slot, gradient, divisor)
        self._divided.add(number)
        self._live[number].grad = None if self.buffer.goes else slot

    def fill(self) -> None:
        """Moves all gradients into their slots: they are final.

        Raises:
            StepError: If autograd has made a gradient, and it was set to None.

        Sync: on the current stream, behind all streams that wrote.
        """
        # All gradients are final. What autograd adds from here on is seen by `late`, from version
        # counters, so no hook costs anything until the next step.
        self._rest()
        self.buffer.allocated()
        slots, present = self.buffer.slots, self._read_all()
        # In most steps all gradients are new, or all are in their slots. One look says so.
        numbers = [
            i for i, (g, slot) in enumerate(zip(present, slots, strict=True)) if g is not slot
        ]
        absent = []
        if type(None) in set(map(type, present)):
            absent = [i for i in numbers if present[i] is None]
            numbers = [i for i in numbers if present[i] is not None]
            if self.buffer.goes:
                absent = [i for i in absent if i not in self._divided]
            self._refuse_gone(absent)
        gradients: list[Any] = (
            present if len(numbers) == len(present) else [present[i] for i in numbers]
        )
        with self.buffer.filling():
            self.buffer.fill(gradients, numbers, absent)
        # Only behind `filling`: the streams that have made these gradients wait for the copy by
        # now, so they may take the memory again. Where the memory of the bucket goes, no gradient
        # may stay a view of it, or all of it would stay.
        live, goes = self._live, self.buffer.goes
        for number in range(len(live)) if goes else numbers:
            live[number].grad = None if goes else slots[number]
        self._end_fill(absent)

    def _rest(self) -> None:
        for hook in self._hooks.values():
            hook.hooks.pop(hook.number, None)

    def _refuse_gone(self, absent: Sequence[int]) -> None:
        for number in absent:
            if self._fired[number] or self._final[number] == 1:
                raise StepError(
                    f"the gradient of {self._key(number)!r} is gone: autograd added to it in this "
                    f"step, and it was set to None since, so nothing is left to reduce. Call "
                    f"optimizer.step() after finish(), not in a hook; to drop a gradient inside a "
                    f"step, zero it"
                )

    def _end_fill(self, absent: Sequence[int]) -> None:
        self.state, self._absent = BucketState.FINAL, frozenset(absent)
        by_hook = self._final.count(1) if self._accumulates_once else 0
        self.num_early = self._final.count(2) + by_hook
        self._num_writes = self.buffer.slots[0]._version
        self.buffer.complete(self._divisor * self._mean, self._divided)

    def give_up(self) -> None:
        """Fills the bucket with zeros, for other ranks that wait for it after a failed step."""
        self._rest()
        self.state = BucketState.FINAL
        with self.buffer.filling():
            self.buffer.fill([], (), range(len(self.parameters)))
        self.buffer.complete(1.0)

    def late(self) -> StepError | None:
        """Returns the error of a gradient that was added to after it was final."""
        if self.state is not BucketState.FINAL:
            return None
        gradients, slots = self._read_all(), self.buffer.slots
        self._lacks = type(None) in set(map(type, gradients))
        if not self.buffer.goes:
            if self.buffer.slots[0]._version != self._num_writes:
                several = len(slots) > 1
                return too_late(self.buffer.bucket.names if several else repr(self._key(0)))
            if all(map(is_, gradients, slots)):
                return None
        # `fill` has set each gradient to None if the memory goes. So a gradient that is there now
        # has come later.
        for number, gradient in enumerate(gradients):
            if gradient is not None and (self.buffer.goes or gradient is not slots[number]):
                return too_late(repr(self._key(number)))
        return None

    def finish(self) -> int:
        """Puts the results in place; returns how many were copied out of the bucket."""
        self.state = BucketState.RESTS
        if self._again:
            self._accumulates_once = False
        # Known from the first step on: until then only the end of a stage proves that a gradient is
        # complete.
        elif self._accumulates_once is None and any(f == 1 for f in self._final):
            self._accumulates_once = True
        # No witness had a gradient, so none could have missed one. Another parameter takes over,
        # one that is used.
        if self._witnesses <= self._absent:
            used = (i for i in range(len(self._live)) if i not in self._absent)
            self._witnesses = {next(used, 0)}
        nobody = self._nobody() if self._absent else ()
        if self._is_plain:
            for number in range(len(self._live)) if self._lacks else ():
                has_any = number not in nobody
                self._live[number].grad = self.buffer.slots[number] if has_any else None
        else:
            for number in range(len(self._live)):
                self._put_result(number, has_any=number not in nobody)
        self.note_results()
        return 0

    def _nobody(self) -> Collection[int]:
        """Returns the slots to which no rank contributed. Blocks the host if this rank has some."""
        # As in one process, a result that was zeroed, and not set to None, stays zeros if no
        # rank contributed: zeros have travelled.
        asked = [i for i in self._absent if i not in self._cleared]
        if not asked or not any(p.has_result for p in self.parameters):
            return ()
        # The flags were summed with the gradients. To read them blocks the host, so a rank reads
        # them for gradients that it lacks itself, and in most steps not at all.
        contributed = self.buffer.contributed()
        return {i for i in asked if not contributed[i]}

    def _put_result(self, number: int, *, has_any: bool) -> None:
        """Puts one result where its placement says."""
        main_shard = self._main_shards[number]
        if self._is_sharded:
            self._set(number, None)
            if main_shard is not None:
                part = main_shard.main_range
                main_shard.take(
                    self.buffer.shard(number, part.begin, part.end) if has_any else None
                )
            return
        has_any = has_any and self.parameters[number].has_result
        result = self.buffer.result(number) if has_any else None
        if main_shard is None:
            self._set(number, result)
        else:
            self._set(number, None)
            main_shard.take(result)

    def note_results(self) -> None:
        """Takes the gradients as they are now for those of the step."""
        if self._is_plain:
            self._results = self.buffer.slots
            self._num_writes = self.buffer.slots[0]._version
            return
        gradients = [self.result(number) for number in range(len(self._live))]
        # Weak references: a gradient that the user drops must be freed before the next step.
        self._results = [None if g is None else TensorWeakRef(g) for g in gradients]
        self._result_versions = [
            -1 if g is None else self._writes(i, g) for i, g in enumerate(gradients)
        ]

    def result(self, number: int) -> torch.Tensor | None:
        """Returns what this rank's optimizer steps with."""
        main_shard = self._main_shards[number]
        return self.read(number) if main_shard is None else main_shard.tensor.grad

    def changed_result(self) -> list[str]:
        """Returns parameters one of whose results somebody has written since, or replaced."""
        written = list[str]()
        for number in range(len(self._results)):
            gradient, last = self.result(number), self._last_result(number)
            if gradient is None or last is None:
                continue
            if gradient is not last:
                return [self._key(number)]
            if not self._is_unwritten(number, gradient):
                written.append(self._key(number))
        # Slots of one buffer have one counter of writes.
        return written if self._is_plain else written[:1]

    def _last_result(self, number: int) -> torch.Tensor | None:
        last = self._results[number] if self._results else None
        return last() if isinstance(last, TensorWeakRef) else last

    def _writes(self, number: int, gradient: torch.Tensor) -> int:
        """Returns the number of writes to a gradient."""
        return gradient._version

    def _is_unwritten(self, number: int, result: torch.Tensor) -> bool:
        """Whether nobody has written a result. With one number for all slots, none of them."""
        if self._is_plain:
            return self.buffer.slots[0]._version == self._num_writes
        return self._writes(number, result) == self._result_versions[number]

    def _is_zeroed(self, number: int, result: torch.Tensor) -> bool:
        """Whether a result was zeroed in place. Reads its values only after a write."""
        # To read values blocks the host on a device. A result that nobody has written since the
        # step cannot have been zeroed, so it is not read.
        if self._is_unwritten(number, result):
            return False
        slots = self.buffer.slots
        if slots and result is slots[number]:
            if self._are_zero is None:
                self._are_zero = self.buffer.is_zero()
            if self._are_zero:
                return True
        return not bool(result.any())

    def _drop_zeros(self) -> None:
        """Removes zeroed results in memory that is made again in each step."""
        # The zeros lie in memory of the last step. Autograd would add to them there, and that
        # memory would stay beside the new one.
        for number in self._cleared:
            main_shard = self._main_shards[number]
            if self._is_sharded and main_shard is not None:
                main_shard.take(None)
            elif main_shard is None and self.buffer.goes:
                self._set(number, None)

    def drop(self) -> None:
        """Sets all gradients to None, after a failed step: they may not be complete."""
        self.state, self._results = BucketState.RESTS, ()
        self._rest()
        for number, main_shard in enumerate(self._main_shards):
            self._set(number, None)
            if main_shard is not None:
                main_shard.take(None)


def _watching(number: int, called: weakref.ref[GradientBucket]) -> Callable[[nn.Parameter], None]:
    def watch(_: nn.Parameter) -> None:
        if (bucket := called()) is not None:
            bucket.accumulated(number)

    return watch


def _counting(
    number: int, final: bytearray, left: list[int], called: weakref.ref[GradientBucket]
) -> Callable[[nn.Parameter], None]:
    # It counts in two plain buffers, without the bucket: this runs for each parameter in each step.
    # The bucket is called for the last one alone, by a weak reference: see `Hook`.
    def count(_: nn.Parameter) -> None:
        if final[number]:
            if (bucket := called()) is not None:
                bucket.accumulated_again(number)
            return
        final[number] = 1
        left[0] -= 1
        if not left[0] and (bucket := called()) is not None:
            bucket.counted(number)

    return count


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
