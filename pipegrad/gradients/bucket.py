"""A bucket's life in a step: gradients accumulate in it, it leaves complete, results come back.

Steps 1 to 4 and 7 of the journey of a gradient in docs/internals.md. Gradients without a reduction
are in buckets too, which are never sent.

[Note: slots] From `begin` to `finish` the gradient of each parameter is its slot in the bucket:
zeros, to which autograd, and any other code that computes gradients, adds in place. Nothing is
copied, and the version of the slot shows if this rank has contributed. A gradient may be elsewhere
when the bucket is complete: with ``create_graph=True`` autograd makes a new tensor, a user may set
one, and another one may have been there before. It is copied then.

Only the announced last backward of a bucket has hooks. Each counts the additions to its parameter.
When all counts have reached those of earlier steps, the bucket leaves at the next hook, because
hooks of users, which come after ours, must have run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from functools import partial
from operator import add, attrgetter, is_, ne
from typing import Any

import torch
from torch import nn

from pipegrad.comm import sync_points
from pipegrad.errors import StepError
from pipegrad.gradients.bucket_memory import RELEASED, BucketMemory
from pipegrad.gradients.parameter import Param
from pipegrad.interop.private import resting_hook
from pipegrad.model.dtensor import as_dtensor, is_dtensor, local, redistribute_gradient
from pipegrad.model.main_grad import MainGrad, take_gradient
from pipegrad.plugins.handler import Placement

# For each parameter the table of its hooks, and our number there: see `resting_hook`.
Hooks = list[tuple[dict[int, Callable[[nn.Parameter], object]], int]]
_VERSION = attrgetter("_version")
_NAMED = 1 << 30  # count of a gradient that `parameters_final` named; larger than any other


class BucketState(Enum):
    """The states of a bucket."""

    RESTS = "between two steps, or its gradients were dropped"
    OPEN = "gradients accumulate"
    FINAL = "all gradients are in their slots, and it may be on its way"


class GradientBucket:
    """The gradients of one bucket on this rank, from step to step.

    Attributes:
        stages: Stages of this rank that add to these gradients.
        waiting: Stages that may still add to them in this step.
        num_early: Count of gradients that were final before the backward of their stage ended.
    """

    def __init__(
        self,
        parameters: Sequence[Param],
        memory: BucketMemory,
        *,
        may_leave_early: bool,
        main_grad: MainGrad | None = None,
    ) -> None:
        # Made when they first run, because autograd looks for hooks of the parameter in each
        # backward from then on.
        self._hooks: Hooks = []
        self._taking: Hooks = []  # with `main_grad`
        self.parameters = parameters
        self.memory = memory
        self.stages = frozenset(parameters[0].homes)
        self.state = BucketState.RESTS
        self.waiting: set[int] = set()
        self.num_early = 0
        self._main_grad = main_grad
        self._attribute = "grad" if main_grad is None else "main_grad"
        self._main_shards = [p.apart for p in parameters]
        self._fixed_divisor = memory.bucket.divisor
        self._may_leave_early = may_leave_early
        self._divisor = 1.0
        self._is_sharded = any(leg.placement is Placement.SHARD for leg in memory.bucket.route)
        self._has_result = any(p.main for p in parameters)
        # True if nothing must be put in place, because slots are the results.
        self._is_plain = all(p.main for p in parameters) and not any(self._main_shards)
        # Where nothing is reduced, a step adds to the gradients of the last one, as autograd does.
        self._adds = self._is_plain and not memory.bucket.route
        number = len(parameters)
        self._announced: set[int] = set()  # stages whose next backward is the last
        # Additions to each in the last backward, and the most in the steps before. A parameter that
        # was not used so far is expected to be final only when its stage is.
        self._counts, self._expected = [0] * number, [0] * number
        self._left = [number]  # count of gradients that are not final; hooks share these lists
        self._begun: list[int] = []  # versions of the slots when the step began
        self._final: list[int] = []  # and when they were final
        self._absent: list[int] = []
        self._cleared: set[int] = set()  # results that were zeroed in place
        self._present: list[torch.Tensor | None] = []  # read last
        self._live = [p.tensor for p in parameters]
        self._has_dtensors = any(map(is_dtensor, self._live))
        # The slots are `.grad` in a step. A DTensor holds its slot.
        self._gradients = [
            as_dtensor(slot, tensor) if is_dtensor(tensor) else slot
            for slot, tensor in zip(memory.slots, self._live, strict=True)
        ]

    def connect(self, ready: dict[GradientBucket, None], leave: Callable[[], None]) -> None:
        """Makes the functions of the hooks, which may run in a thread of autograd.

        Args:
            ready: Gets the bucket when its last gradient is final in a backward.
            leave: A bound method; called at the next hook.
        """
        # Use weak references, because the step holds its buckets. Strong ones back would be a
        # circle: hooks and memory of an unused GradientSync would stay until Python's collector
        # runs.
        called, on_leave = weakref.ref(self), weakref.WeakMethod(leave)
        # Hooks count in plain lists, without the bucket: each runs for its parameter in each step.
        counts, expected, left = self._counts, self._expected, self._left

        def counting(number: int) -> Callable[[nn.Parameter], None]:
            def count(_: nn.Parameter) -> None:
                # Send the buckets that became complete at an earlier hook, because hooks of users
                # have run by now.
                if ready and (leave := on_leave()) is not None:
                    leave()
                counts[number] += 1
                if counts[number] == expected[number]:
                    left[0] -= 1
                    bucket = None if left[0] else called()
                    if bucket is not None and bucket.state is BucketState.OPEN:
                        ready[bucket] = None

            return count

        self._calls = list(map(counting, range(len(counts))))

    def remove_hooks(self) -> None:
        """Removes all hooks."""
        # A function that is called may hold neither a parameter nor this bucket, because the
        # garbage collector does not see that a parameter holds its hooks.
        # No name of this module either, because it has none any more when Python ends.
        for table, number in (*self._hooks, *self._taking):
            table.pop(number, None)

    __del__ = remove_hooks  # of a step that did not end

    def _run(self, hooks: Hooks, calls: Sequence[Callable[[nn.Parameter], None]]) -> None:
        """Makes autograd call these, after all hooks that the parameters have now."""
        if not hooks:
            hooks += map(resting_hook, self._live)
        _rest(hooks)  # torch calls the values of a table in its order
        for (table, number), call in zip(hooks, calls, strict=True):
            table[number] = call

    # The verbs of a step, in order.

    def check(self, *, continuing: bool) -> None:
        """Refuses gradients of the last step that would be reduced and divided once more.

        Raises:
            StepError: Names the parameter.
        """
        self._present = present = self._read()
        if continuing:
            return
        self._cleared = set()
        if not any(self._main_shards) and {*map(type, present)} == {type(None)}:
            return
        # The results of the last step that were not set to None since. They may have been zeroed in
        # place.
        results = (
            gradient if main_shard is None else main_shard.tensor.grad
            for main_shard, gradient in zip(self._main_shards, present, strict=True)
        )
        left = {
            number: result
            for number, result in enumerate(results)
            if result is not None
            if self._main_shards[number] is not None or result is self._gradients[number]
        }
        # Read all values at once, because each read blocks the host on a device.
        norms = torch._foreach_norm([*map(local, left.values())], 1) if left else ()
        sizes = torch.stack([*norms]).tolist() if left else []
        # Reversed: the order of the model.
        for number, size in reversed([*zip(left, sizes, strict=True)]):
            if size != 0 and not self._adds:
                raise StepError(
                    f"the gradient of {self._key(number)!r} is already reduced or divided, and "
                    f"another backward would add to it: call optimizer.zero_grad() before the "
                    f"step, to make it zero or None. optimizer.zero_grad() does so for the "
                    f"parameters that this optimizer has, module.zero_grad() for all whose "
                    f"gradient is in .grad. Or accumulate with 'with sync.accumulate():' around "
                    f"all steps but the last"
                )
        self._cleared = {*left}

    def _set_by_user(self) -> list[tuple[int, torch.Tensor]]:
        """Returns the gradients that are not the slots of this bucket."""
        of_all = enumerate(zip(self._present, self._gradients, strict=True))
        return [(i, g) for i, (g, slot) in of_all if g is not None and g is not slot]

    def refuse_values(self) -> None:
        """Refuses gradients that this step would add to, and then divide once more.

        Raises:
            StepError: If there is a gradient that is not zero.

        Sync: blocks the host if a gradient was zeroed, and not set to None.
        """
        added_to = [(i, self._gradients[i]) for i in self._cleared] if self._adds else []
        for number, gradient in [*self._set_by_user(), *added_to]:
            if gradient.is_sparse or bool(local(gradient).any()):
                raise StepError(
                    f"the parameter {self._key(number)!r} has a gradient already, and the divisor "
                    f"of this step is known only at its end, so it would be divided too: call "
                    f"optimizer.zero_grad() before the step; or accumulate with "
                    f"'with sync.accumulate():' around all steps but the last"
                )

    def begin(self, divisor: float, *, continuing: bool) -> None:
        """Starts a step, or continues it: each gradient is its slot.

        Sync: on the current stream.
        """
        # All errors must come from `check` and `refuse_values`, which have run for all buckets,
        # because this method changes gradients.
        before, self._divisor = self._divisor, divisor * self._fixed_divisor
        own, slots = self._set_by_user(), self.memory.slots
        kept = self._cleared if self._adds and not continuing else set[int]()
        self.memory.reset(continuing=continuing or bool(kept))
        for number, slot in enumerate(slots) if kept else ():
            if number in kept:
                slot.mul_(divisor)  # it must not be divided again
            else:
                slot.zero_()
        if not continuing:
            self._begun = self._versions()
            for main_shard in filter(None, self._main_shards):
                main_shard.set_grad(None)
        for number, gradient in enumerate(self._present) if continuing else ():
            if gradient is None:  # a user has dropped what had accumulated
                slots[number].zero_()
                self._begun[number] = self._versions()[number]
        if own:
            self.memory.copy([local(gradient) for _, gradient in own], [i for i, _ in own])
        # Scale, because one division at the end is then right for the gradients of all steps. A
        # gradient that a user has set is multiplied by the divisor below, because it must not be
        # divided.
        if continuing and before != self._divisor:
            self.memory.scale(self._divisor / before)
        for number, _ in own if not continuing and divisor != 1 else ():
            slots[number].mul_(divisor)
        self._present = []
        self._open()

    def _open(self) -> None:
        """Makes all gradients open: each is its slot."""
        for tensor, slot in zip(self._live, self._gradients, strict=True):
            setattr(tensor, self._attribute, slot)
        self.state = BucketState.OPEN
        self.waiting = set(self.stages)
        self._announced.clear()
        number = len(self.parameters)
        self._counts[:] = [0] * number
        self._left[0] = number
        self._absent = []
        if self._main_grad is not None:  # they run after the hooks of users
            named: Any
            for named in self._live:
                named.grad_added_to_main_grad = False  # fused kernels need the attribute to exist
            me = weakref.ref(self)
            self._run(self._taking, [partial(_take, me, i) for i in range(number)])

    def take(self, number: int) -> None:
        """Adds a gradient to ``main_grad``, perhaps in a thread of autograd."""
        if self.state is BucketState.OPEN:
            assert self._main_grad is not None
            take_gradient(self._live[number], self._main_grad.dtype)

    @property
    def has_final(self) -> bool:
        """True if a gradient is final: the step cannot be continued."""
        return self._left[0] < len(self.parameters)

    def announce(self, stage: int) -> None:
        """Lets gradients become final one by one in the next backward of a stage."""
        self._announced.add(stage)
        self._update_last()

    def _update_last(self) -> None:
        """Makes hooks count if no stage adds to these gradients after the next backward."""
        is_last = bool(self.waiting) and self.waiting <= self._announced
        if is_last and self._may_leave_early and self.state is BucketState.OPEN:
            calls = self._calls
            if sync_points.in_use.current(self.memory.device) is not None:
                calls = [_on_streams(call, self.memory) for call in calls]
            self._run(self._hooks, calls)

    def parameters_final(self, stage: int, numbers: Sequence[int]) -> bool:
        """Marks some gradients as final, if no other stage of this rank adds to them.

        Returns:
            Whether all are: the bucket must leave now.

        Sync: the current stream must be after everything that wrote them.
        """
        # Another stage of this rank may still add to these gradients. They are not divided or sent
        # then, because the last of these stages makes them final.
        if self.state is not BucketState.OPEN or self.waiting != {stage}:
            return False
        self.memory.add_stream()
        for number in numbers:
            if self._counts[number] < _NAMED:
                self._left[0] -= not 0 < self._expected[number] <= self._counts[number]
                self._counts[number] = _NAMED
        return not self._left[0]

    def stage_is_final(self, stage: int) -> bool:
        """Removes a stage from `waiting`; returns True if the bucket must be filled now.

        Sync: the current stream must be after everything that wrote the stage's gradients.
        """
        self.waiting.discard(stage)
        if not self.waiting:
            # Only when no backward runs, because autograd may walk the hooks of a parameter.
            _rest(self._hooks)
        if self.state is not BucketState.OPEN:
            return False
        self.memory.add_stream()
        # A backward that was announced before may be the last one of the bucket now, because one
        # stage fewer is waited for. Then its hooks must count.
        self._update_last()
        return not self.waiting

    def fill(self) -> None:
        """Ends the step for these gradients: all are in their slots.

        Raises:
            StepError: If autograd has added to a gradient, and it was set to None.

        Sync: on the current stream, after all streams that wrote.
        """
        for number, tensor in enumerate(self._live) if self._main_grad is not None else ():
            if tensor.grad is not None:  # it came without a hook, by torch's split backward
                self.take(number)
        absent, elsewhere = self._sorted()
        with self.memory.gathering():
            if elsewhere:
                self.memory.copy([self._placed(number) for number in elsewhere], elsewhere)
            self.memory.lack(absent)
        for number in elsewhere:
            self._set(number, self._gradients[number])
        self.state, self._absent = BucketState.FINAL, absent
        self.num_early = len(self.parameters) - self._left[0]
        self._final = self._versions()
        self.memory.complete(self._divisor)

    def _sorted(self) -> tuple[list[int], list[int]]:
        """Returns the gradients that seem to be absent, and those that are not in their slots."""
        absent, elsewhere = list[int](), list[int]()
        present, versions = self._read(), self._versions()
        if all(map(is_, present, self._gradients)) and all(map(ne, versions, self._begun)):
            return absent, elsewhere
        for number, gradient in enumerate(present):
            is_written = versions[number] != self._begun[number]
            if gradient is None and is_written:
                raise StepError(
                    f"the gradient of {self._key(number)!r} is gone: autograd added to it in this "
                    f"step, and it was set to None since, so nothing is left to reduce. Call "
                    f"optimizer.step() after finish(), not in a hook; to drop a gradient inside a "
                    f"step, zero it"
                )
            if gradient is not None and gradient is not self._gradients[number]:
                elsewhere.append(number)
            elif not is_written:
                absent.append(number)
        return absent, elsewhere

    def _placed(self, number: int) -> torch.Tensor:
        """Returns a gradient that is elsewhere; of a DTensor, this rank's part of it."""
        redistribute_gradient(self._live[number])  # as autograd does before it adds
        return local(getattr(self._live[number], self._attribute))

    def give_up(self) -> None:
        """Fills the bucket with zeros, for other ranks that wait for it after a failed step."""
        _rest(self._hooks)
        self.state = BucketState.FINAL
        with self.memory.gathering():
            self.memory.zero()
        self.memory.complete(1.0)

    def late(self) -> StepError | None:
        """Returns the error of a gradient that was added to after it was final."""
        if self.state is not BucketState.FINAL:
            return None
        self._present, versions = self._read(), self._versions()
        is_there = all(map(is_, self._present, self._gradients))
        if is_there and versions == self._final and self._main_grad is None:
            return None
        for number, gradient in enumerate(self._present):
            is_moved = gradient is not None and gradient is not self._gradients[number]
            is_added = self._main_grad is not None and self._live[number].grad is not None
            if is_moved or is_added or versions[number] != self._final[number]:
                return StepError(
                    f"autograd added to the gradient of {self._key(number)!r} after it was final; "
                    f"a module that runs backward inside backward must do so in every step, and "
                    f"where a stage has several backwards (an auxiliary loss, say) "
                    f"stage_last_backward() is called before the very last one, or not at all"
                )
        return None

    def finish(self) -> None:
        """Puts the results in place."""
        self.state = BucketState.RESTS
        if self._may_leave_early:
            counts = [n if n < _NAMED else 0 for n in self._counts]
            self._expected[:] = map(max, self._expected, counts)
        self.memory.end_step()
        nobody = self._nobody() if self._absent else ()
        if nobody or not self._is_plain or not all(map(is_, self._present, self._gradients)):
            for number in range(len(self._live)):
                self._put_result(number, has_any=number not in nobody)
        self._present = []
        self.memory.release(RELEASED)

    def _nobody(self) -> Collection[int]:
        """Returns the slots to which no rank contributed. Blocks the host if this rank has some."""
        # As in one process, a result that was zeroed, and not set to None, stays zeros if no rank
        # contributed, because zeros were reduced.
        asked = [i for i in self._absent if i not in self._cleared]
        if not asked or not self._has_result:
            return ()
        if not self.memory.bucket.route and self._main_grad is None:
            return asked
        # The flags were summed with the gradients. Read them only if this rank lacks gradients,
        # which is rare, because a read blocks the host.
        contributed = self.memory.contributed()
        return {i for i in asked if not contributed[i]}

    def _put_result(self, number: int, *, has_any: bool) -> None:
        """Puts one result into its place, which the placement determines."""
        main_shard = self._main_shards[number]
        if self._is_sharded:
            self._set(number, None)
            if main_shard is not None:
                begin, end = main_shard.begin, main_shard.begin + main_shard.tensor.numel()
                main_shard.set_grad(self.memory.shard(number, begin, end) if has_any else None)
            return
        has_any = has_any and self.parameters[number].main is not None
        if main_shard is not None:
            main_shard.set_grad(self.memory.result(number) if has_any else None)
            # Not in `.grad`, because another optimizer might step the parameter with it. In
            # `main_grad` it is left for users, until the next step.
            has_any = has_any and self._main_grad is not None
        self._set(number, self._gradients[number] if has_any else None)

    def drop(self) -> None:
        """Sets all gradients to None after a failed step, because they may be incomplete."""
        self.state = BucketState.RESTS
        _rest(self._hooks)
        for number, main_shard in enumerate(self._main_shards):
            self._set(number, None)
            self._live[number].grad = None  # `main_grad` may not have it yet
            if main_shard is not None:
                main_shard.set_grad(None)

    def _key(self, number: int) -> str:
        return self.parameters[number].record.key

    def _read(self) -> list[torch.Tensor | None]:
        """Returns the gradients of all parameters, from ``.grad`` or ``.main_grad``."""
        return [getattr(tensor, self._attribute, None) for tensor in self._live]

    def _set(self, number: int, gradient: torch.Tensor | None) -> None:
        setattr(self._live[number], self._attribute, gradient)

    def _versions(self) -> list[int]:
        """Returns the count of writes to each slot. DTensor counts writes in the whole tensor."""
        slots = self.memory.slots
        versions = list(map(_VERSION, slots))
        if self._has_dtensors:
            versions = list(map(add, versions, map(_VERSION, self._gradients)))
        return versions


def _rest(hooks: Hooks) -> None:
    for table, number in hooks:
        table.pop(number, None)


def _on_streams(
    count: Callable[[nn.Parameter], None], memory: BucketMemory
) -> Callable[[nn.Parameter], None]:
    def count_on_stream(parameter: nn.Parameter) -> None:
        memory.add_stream()  # on which autograd has added
        count(parameter)

    return count_on_stream


def _take(called: weakref.ref[GradientBucket], number: int, _: nn.Parameter) -> None:
    if (bucket := called()) is not None:
        bucket.take(number)
