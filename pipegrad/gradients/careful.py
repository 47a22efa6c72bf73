"""The careful way of rare gradients: correct, and slower than the common one of bucket.py.

It is taken by a bucket whose gradients live elsewhere than in ``.grad``, which has a DTensor, or
which is sent in another dtype than its gradients have. Nothing in bucket.py asks for these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from pipegrad.errors import StepError
from pipegrad.gradients.bucket import BucketState, GradientBucket, too_late
from pipegrad.gradients.bucket_buffer import write
from pipegrad.model.dtensor import is_dtensor, is_misplaced, redistribute_gradient
from pipegrad.model.gradient_storage import GradAttribute, GradientAccessor


class CarefulBucket(GradientBucket):
    """A bucket that asks for each gradient where it is, and what it is.

    Args:
        accessor: Where gradients live.
        others: Those of GradientBucket.
    """

    def __init__(self, accessor: GradientAccessor, *args: Any, **others: Any) -> None:  # noqa: ANN401 - GradientBucket's
        self._accessor = accessor
        self._is_attribute = isinstance(accessor, GradAttribute)
        super().__init__(*args, **others)
        bucket = self.buffer.bucket
        # Whether autograd can add to a slot. Otherwise the result is copied back.
        self._can_share = bucket.dtype == bucket.wire_dtype
        self._is_plain = False
        # Somebody may add to a slot without autograd, and no hook tells which one. So each slot
        # counts its writes here, and one counter for all does not do.
        self.buffer.count_each()
        self._watched = set(range(len(self.parameters)))
        self._zeroed_versions: dict[int, int] = {}
        self._final_writes: list[int] = []
        self._shown = ShownResults(accessor)
        self._num_copied = 0

    def read(self, number: int) -> torch.Tensor | None:
        """Returns a gradient; of a DTensor, this rank's part."""
        return self._accessor.read(self._live[number])

    def _read_all(self) -> list[torch.Tensor | None]:
        # The part of a misplaced DTensor cannot be had: it is only compared.
        return [
            tensor.grad if is_misplaced(tensor) else self._accessor.read(tensor)
            for tensor in self._live
        ]

    def _set(self, number: int, gradient: torch.Tensor | None) -> None:
        self._accessor.write(self._live[number], gradient)

    def _is_slot(self, number: int, gradient: torch.Tensor | None) -> bool:
        slots = self.buffer.slots
        return bool(slots) and self._can_share and gradient is slots[number]

    def check(self, *, continuing: bool) -> None:
        """Refuses gradients of the last step that would be reduced once more."""
        super().check(continuing=continuing)
        if not continuing and self._before is not None:
            self._shown.leave_out(self._before)

    def begin(self, divisor: float, *, continuing: bool) -> None:
        """Starts a step, or continues it; shares zeroed slots with an accessor."""
        if not continuing:
            self._shown.drop(self._live)
            self._zeroed_versions.clear()
        super().begin(divisor, continuing=continuing)
        for number in self._to_share:
            slot = self.buffer.slots[number]
            self._set(number, slot)
            self._zeroed_versions[number] = self._writes(number, slot)

    def _restart(self) -> None:
        super()._restart()
        # Autograd makes gradients in ``.grad``. Elsewhere somebody adds to what is there.
        if self._can_share and not self._is_attribute:
            self._to_share = [i for i, g in enumerate(self._read_all()) if g is None]

    def accumulated(self, number: int) -> None:
        """Called by a hook after each accumulation; the accessor may move the gradient."""
        if self.state is BucketState.OPEN:
            self._accessor.accumulated(self._live[number])
        super().accumulated(number)
        if self.state is BucketState.OPEN and not self._is_attribute:
            # The accessor must see each accumulation, so this hook does not rest until the next
            # step.
            self._run([number], self._watch)

    def _update_last(self) -> None:
        super()._update_last()
        if self._is_last and not self._is_attribute:
            self._run(range(len(self._live)), self._watch)

    def _move(self, number: int) -> None:
        if not (self._is_attribute and self._can_share):
            return
        tensor = self._live[number]
        if is_misplaced(tensor):
            redistribute_gradient(tensor)  # as autograd does before it adds to a gradient
        gradient = self.read(number)
        if gradient is not None and not gradient.requires_grad:
            slot = self.buffer.claim()[number]
            if gradient is not slot:
                write(slot, gradient)
                self._set(number, slot)

    def move_all(self) -> None:
        """Moves all new gradients into their slots."""
        if self.state is BucketState.OPEN:
            if self._has_streams:
                self.buffer.add_stream()
            for number, final in enumerate(self._final):
                if not final:
                    self._move(number)

    def _take(self, number: int) -> None:
        """Leaves a final gradient to `fill`."""

    def claim(self, number: int) -> torch.Tensor | None:
        """Returns a slot only if autograd could make the gradient there, in that dtype."""
        is_common = self._is_attribute and self._can_share and not is_dtensor(self._live[number])
        return super().claim(number) if is_common else None

    def fill(self) -> None:
        """Moves all gradients into their slots, divided if they are written."""
        self._rest()
        for number, tensor in enumerate(self._live):
            if tensor.grad is not None and not self._is_attribute:
                self._accessor.accumulated(tensor)  # torch's split backwards call no hooks
                self._fired[number] = 1
            if is_misplaced(tensor):
                redistribute_gradient(tensor)
        present, divisor = self._read_all(), self._divisor * self._mean
        absent = [number for number, gradient in enumerate(present) if gradient is None]
        self._refuse_gone(absent)
        untouched = [i for i, g in enumerate(present) if self._is_untouched(i, g)]
        with self.buffer.filling():
            self.buffer.fill([], (), absent)
            for number, gradient in enumerate(present):
                if gradient is not None and not self._is_slot(number, gradient):
                    write(self.buffer.slots[number], gradient, divisor)
                    self._divided.add(number)
            # A kernel may have written to an address, which no counter shows. So the values say
            # whether this rank contributed.
            self.buffer.flag_values(untouched)
        for number, gradient in enumerate(present):
            if self._is_sharded or self.buffer.goes:
                self._set(number, None)
            elif gradient is not None and self._can_share and number in self._divided:
                self._set(number, self.buffer.slots[number])
        self._end_fill([*absent, *untouched])
        self._final_writes = [
            -1 if g is None else self._writes(i, g) for i, g in enumerate(self._read_all())
        ]

    def _is_untouched(self, number: int, gradient: torch.Tensor | None) -> bool:
        """Whether no write into the zeroed slot is known.

        A kernel that writes to an address does not change the version. If autograd ran it, the hook
        has fired. Otherwise the bucket looks at the values of the slot.
        """
        if self._fired[number] or not self._is_slot(number, gradient):
            return False
        assert gradient is not None
        return self._zeroed_versions.get(number) == self._writes(number, gradient)

    def _writes(self, number: int, gradient: torch.Tensor) -> int:
        """Returns the number of writes, also of those to a DTensor that holds the gradient."""
        whole = self._live[number].grad
        return gradient._version + (whole._version if is_dtensor(whole) else 0)

    def late(self) -> StepError | None:
        """Returns the error of a gradient that was added to after it was final."""
        if self.state is not BucketState.FINAL:
            return None
        for number, gradient in enumerate(self._read_all()):
            is_added = not self._is_attribute and self._live[number].grad is not None
            if is_added or (
                gradient is not None
                and self._writes(number, gradient) != self._final_writes[number]
            ):
                return too_late(self.parameters[number].record.key)
        return None

    def finish(self) -> int:
        """Puts the results in place; returns how many were copied out of the bucket."""
        self._num_copied = 0
        super().finish()
        return self._num_copied

    def _put_result(self, number: int, *, has_any: bool) -> None:
        if self._is_sharded:
            super()._put_result(number, has_any=has_any)
            return
        if has_any and self.parameters[number].has_result:
            self._take_result(number, self.buffer.result(number))
        else:
            self._set(number, None)
        main_shard = self._main_shards[number]
        if main_shard is not None:
            main_shard.take(self.read(number))
            self._shown.show(number, self._live[number])

    def _take_result(self, number: int, result: torch.Tensor) -> None:
        gradient, tensor = self.read(number), self._live[number]
        if self._can_share:
            if gradient is not result:
                self._set(number, result)
            return
        self._num_copied += 1
        if gradient is None or gradient.is_sparse or gradient.requires_grad:
            self._set(number, result.to(self._accessor.dtype(tensor)))
        else:
            gradient.copy_(result)

    def drop(self) -> None:
        """Sets all gradients to None, after a failed step: they may not be complete."""
        super().drop()
        for tensor in self._live:
            tensor.grad = None  # the accessor may not have moved it yet


class ShownResults:
    """Results that main parameters have, left in the accessor until the next step, for users.

    ``.grad`` is set to None instead: another optimizer might step the parameter with it.

    Args:
        accessor: Where gradients live.
    """

    def __init__(self, accessor: GradientAccessor) -> None:
        self._accessor = accessor
        self._results: dict[int, TensorWeakRef] = {}  # by number of the parameter

    def show(self, number: int, tensor: nn.Parameter) -> None:
        """Leaves what the accessor has of a parameter."""
        if isinstance(self._accessor, GradAttribute):
            self._accessor.write(tensor, None)
        elif (gradient := self._accessor.read(tensor)) is not None:
            self._results[number] = TensorWeakRef(gradient)

    def leave_out(self, gradients: list[torch.Tensor | None]) -> None:
        """Replaces these results by None: they are no gradients of the next step."""
        for number, last in self._results.items():
            if gradients[number] is not None and gradients[number] is last():
                gradients[number] = None

    def drop(self, live: Sequence[nn.Parameter]) -> None:
        """Removes these results from the accessor, but what the user has set since."""
        for number, last in self._results.items():
            gradient = self._accessor.read(live[number])
            if gradient is not None and gradient is last():
                self._accessor.write(live[number], None)
        self._results.clear()
