"""Staging: the inputs of many sums side by side, on their way into one collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipegrad.comm import sync_points
from pipegrad.errors import PlanError
from pipegrad.reduce.bucket_buffer import FlatBuffer

Callback = Callable[[torch.Tensor], object]

FILL_FREE = sync_points.Wait(
    "staging.fill-free", "it may be zeroed, or read, on another stream still"
)
WRITTEN = sync_points.Record(
    "staging.written", "a collective must not read before inputs are copied"
)


class Key(NamedTuple):
    """Inputs of one key share buckets. Groups with equal members are two: two communicators.

    Attributes:
        kind: ``reduce_scatter`` or ``all_reduce``.
        num_rows: How many tensors an input is: one a rank that gets a sum of its own, else one.
        dtype: Of inputs and sum.
        device: Likewise.
        group: Whose ranks are summed over.
    """

    kind: str
    num_rows: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup

    @property
    def in_place(self) -> bool:
        """Whether the sum lands where the inputs are."""
        return self.kind == "all_reduce"

    def room(self, capacity_bytes: int) -> int:
        """Returns how many elements of a row fit into the capacity of all rows."""
        return capacity_bytes // (self.num_rows * self.dtype.itemsize)


class Calls(list[tuple[int, torch.Size, Callback]]):
    """Who gets which part of a sum: where it begins, its shape, the callback."""

    def call_back(self, result: torch.Tensor) -> list[Exception]:
        """Gives each call its part of the sum; returns what callbacks raised."""
        errors = []
        for offset, shape, callback in self:
            try:
                callback(result[offset : offset + shape.numel()].view(shape))
            except Exception as error:  # noqa: BLE001 - flush raises it, once all have run
                errors.append(error)
        return errors


class Staging:
    """A bucket before it leaves: rows of inputs, and whom to call with their sums.

    Args:
        key: What all inputs have in common.
        flat: Has space for ``num_rows * room`` elements; what is in there is overwritten.
    """

    def __init__(self, key: Key, flat: FlatBuffer) -> None:
        self.key = key
        self.flat = flat
        self.room = flat.buffer.numel() // key.num_rows
        self.numel = 0  # of each row, taken
        self.written: list[torch.Event | None] = []
        self.calls = Calls()

    @property
    def rows(self) -> torch.Tensor:
        """What has been added: ``(num_rows, numel)``."""
        return self._row_slice(0, self.numel)

    def add(self, inputs: Sequence[torch.Tensor], callback: Callback) -> None:
        """Copies one tensor to the end of each row.

        Sync: writes on the current stream, behind the buffer's last use; `written` tells a reader.
        """
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
    """Returns the key of inputs that can be summed; nothing is touched.

    Raises:
        PlanError: If they cannot, or this rank is not in the group.
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
    found = {(tuple(x.shape), x.dtype, x.device, x.layout): None for x in inputs}
    if len(found) > 1:
        some = "; ".join(" ".join(map(str, facts)) for facts in found)
        raise PlanError(f"{kind}: expected inputs of one shape, dtype and device, found {some}")
    (_, dtype, device, layout), *_ = found
    if layout is not torch.strided:
        raise PlanError(f"{kind}: inputs are {layout}, expected torch.strided: use to_dense()")
    if dtype is torch.bool:
        raise PlanError(f"{kind}: inputs are {dtype}, which has no sum: use an integer dtype")
    if not callable(callback):
        raise PlanError(f"{kind}: callback is {callback!r}, expected a function of the sum")
    return Key(kind, len(inputs), dtype, device, group)
