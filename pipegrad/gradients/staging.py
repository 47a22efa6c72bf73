"""Staging: the inputs of many sums, copied side by side for one collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipegrad.comm import sync_points
from pipegrad.errors import PlanError
from pipegrad.gradients.bucket_buffer import FlatBuffer

Callback = Callable[[torch.Tensor], object]

FILL_FREE = sync_points.Wait(
    "staging.fill-free", "it may be zeroed, or read, on another stream still"
)
WRITTEN = sync_points.Record(
    "staging.written", "a collective must not read before inputs are copied"
)


class Key(NamedTuple):
    """The properties that inputs must share to lie in one bucket.

    Two groups with the same ranks are different: they have different communicators.

    Attributes:
        kind: ``reduce_scatter`` or ``all_reduce``.
        num_rows: Number of tensors in an input: one for each rank, or with an all-reduce 1.
        dtype: Of inputs and sum.
        device: Of inputs and sum.
        group: The sum is over its ranks.
    """

    kind: str
    num_rows: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup

    @property
    def in_place(self) -> bool:
        """Whether the sum is in the memory of the inputs."""
        return self.kind == "all_reduce"

    def room(self, capacity_bytes: int) -> int:
        """Returns the number of elements in each row, if all rows together fill the capacity."""
        return capacity_bytes // (self.num_rows * self.dtype.itemsize)


class Calls(list[tuple[int, torch.Size, Callback]]):
    """For each input: the offset of its sum in the result, its shape, and the callback."""

    def call_back(self, result: torch.Tensor) -> list[Exception]:
        """Calls each callback with its part of the sum; returns the errors of callbacks."""
        errors = []
        for offset, shape, callback in self:
            try:
                callback(result[offset : offset + shape.numel()].view(shape))
            except Exception as error:  # noqa: BLE001 - `flush` raises it after all callbacks
                errors.append(error)
        return errors


class Staging:
    """A bucket that is being filled: a matrix of inputs, and the callbacks for their sums.

    Args:
        key: The properties of all inputs.
        flat: Memory for ``num_rows * room`` elements. It is overwritten.
    """

    # Row j of the matrix holds the inputs for rank j, side by side. So a row is a shard of one
    # reduce-scatter, however many inputs it holds.

    def __init__(self, key: Key, flat: FlatBuffer) -> None:
        self.key = key
        self.flat = flat
        self.room = flat.buffer.numel() // key.num_rows
        self.numel = 0  # elements of each row that are filled
        self.written: list[torch.Event | None] = []
        self.calls = Calls()

    @property
    def rows(self) -> torch.Tensor:
        """The inputs that were added, ``(num_rows, numel)``."""
        return self._row_slice(0, self.numel)

    def add(self, inputs: Sequence[torch.Tensor], callback: Callback) -> None:
        """Copies one tensor to the end of each row.

        Sync: writes on the current stream, after the buffer's last use. A reader must wait for the
        events in `written`.
        """
        # The inputs are copied at once, so the caller may change or free them after the call.
        end = self.numel + inputs[0].numel()
        slots = self._row_slice(self.numel, end).view(len(inputs), *inputs[0].shape)
        self.flat.acquire(FILL_FREE)
        with torch.no_grad():
            torch.stack(tuple(inputs), out=slots)
        self.written.append(self.flat.written(WRITTEN))
        self.calls.append((self.numel, inputs[0].shape, callback))
        self.numel = end

    def _row_slice(self, start: int, end: int) -> torch.Tensor:
        return self.flat.buffer.view(self.key.num_rows, self.room)[:, start:end]


def check(
    kind: str,
    inputs: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    callback: Callback,
) -> Key:
    """Returns the key of inputs, after a check that they can be summed. Changes nothing.

    Raises:
        PlanError: If they cannot be summed, or this rank is not in the group.
    """
    group = dist.group.WORLD if group is None else group
    if group is None or dist.get_rank(group) < 0:
        raise PlanError(f"{kind}: this rank is not in the group, only its ranks call")
    expected = 1 if kind == "all_reduce" else dist.get_world_size(group)
    if len(inputs) != expected:
        raise PlanError(
            f"{kind}: {len(inputs)} inputs, expected {expected}: one for each of the ranks "
            f"{dist.get_process_group_ranks(group)}"
        )
    traits = {(tuple(x.shape), x.dtype, x.device, x.layout): None for x in inputs}
    if len(traits) > 1:
        listing = "; ".join(" ".join(map(str, each)) for each in traits)
        raise PlanError(f"{kind}: expected inputs of one shape, dtype and device, found {listing}")
    (_, dtype, device, layout), *_ = traits
    if layout is not torch.strided:
        raise PlanError(f"{kind}: inputs are {layout}, expected torch.strided: use to_dense()")
    if dtype is torch.bool:
        raise PlanError(f"{kind}: inputs are {dtype}, which has no sum: use an integer dtype")
    if not callable(callback):
        raise PlanError(f"{kind}: callback is {callback!r}, expected a function of the sum")
    return Key(kind, len(inputs), dtype, device, group)
