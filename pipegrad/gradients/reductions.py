"""The reduction of gradients for each placement, and the parameter sync along it.

Steps 6 and 9 of the journey of a gradient (docs/internals.md) run these on comm streams.

[Note: pair exchange] Two ranks sum a gradient with one message in each direction. The second rank
sends its whole part when it is final, while the first rank still computes. The first rank sends the
rows of its part that are not zero, when they are final. Both ranks add the same two terms, so both
have the bits of an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from pipegrad.comm import collectives
from pipegrad.comm.collectives import (
    BACK,
    COUNTS,
    RECEIVED,
    SENT,
    Arriving,
    WideSum,
    can_send,
    real,
    receive,
    send,
)
from pipegrad.comm.sync_points import Done, LateWork, Work
from pipegrad.errors import ReduceError
from pipegrad.plan.buckets import Bucket, Slot
from pipegrad.plugins.handler import Placement, ReductionStep


class StepBucket:
    """The part of a bucket for one reduction; the `FlatBucket` that handlers launch.

    Args:
        buffer: Payload, then a flag for each slot; flat.
        num_flags: Number of flags.
        index: Of the bucket.
        slots: The slot of each gradient in the payload.
        scattered: How many elements each rank has after the reduction; see `Bucket.scattered`.
        sum_dtype: dtype in which the parts of ranks are added; None: that of the buffer.
        pair_sum: The exchange of two ranks, if the reduction has one.
        is_divided: Whether what is reduced was divided before, so that its sum is the mean.

    Attributes:
        is_mean: Whether the last launch leaves the mean, not the sum.
        is_divided: The argument.
        arriving: The posted receive of the next rank's sum, if the reduction is point-to-point.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        num_flags: int,
        *,
        index: int,
        slots: Sequence[Slot],
        scattered: Sequence[int],
        sum_dtype: torch.dtype | None = None,
        pair_sum: PairSum | None = None,
        is_divided: bool = False,
    ) -> None:
        self.num_flags = num_flags
        self.index = index
        self._slots = slots
        self.sum_dtype = sum_dtype or buffer.dtype
        self.scattered = scattered
        self.pair_sum = pair_sum
        self.is_mean = self.is_divided = is_divided
        self.arriving: collectives.Arriving | None = None
        self.use(buffer)

    def use(self, buffer: torch.Tensor) -> None:
        """Makes `buffer` the tensor that is reduced: the memory of a bucket may be new."""
        self.buffer = buffer
        self.payload, self.flags = buffer[: -self.num_flags], buffer[-self.num_flags :]
        if self.pair_sum is not None:
            self.pair_sum.use(buffer)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Views of the payload, one for each flag; see `FlatBucket`."""
        start = int(self.payload.storage_offset())
        return [
            self.payload.as_strided(slot.shape, slot.stride, start + slot.offset)
            for slot in self._slots
        ]

    def reduce(self, reduction: ReductionStep, group: dist.ProcessGroup) -> Work:
        """Sums over `group` as the reduction's placement says.

        Sync: on a comm stream. With SHARD and WHOLE, only this rank's part and the flags hold sums
        then.
        """
        # Each rank divides its own part before the sum: a sum of float16 may overflow although the
        # mean does not. A wider sum is divided before it is rounded.
        divisor = len(reduction.ranks) if reduction.op == "mean" and not self.is_mean else 1
        self.is_mean |= divisor != 1
        wide = None
        # Messages between two ranks add two parts, and such a sum is rounded once in any case.
        if self.sum_dtype != self.buffer.dtype and not reduction.is_point_to_point:
            wide = WideSum(self.sum_dtype.to_real(), divisor)
        elif divisor != 1:
            self.payload.div_(divisor)
        return _REDUCE[reduction.placement](self, group, wide)


def _replicate(bucket: StepBucket, group: dist.ProcessGroup, wide: WideSum | None) -> Work:
    if bucket.pair_sum is not None:
        return bucket.pair_sum.begin(bucket.arriving, group)
    if wide is not None:
        collectives.wide_all_reduce(bucket.buffer, wide, group)
        return Done()
    work: Work = dist.all_reduce(bucket.buffer, group=group, async_op=True)
    return work


def _give_to_owner(bucket: StepBucket, group: dist.ProcessGroup, _: WideSum | None) -> Work:
    # The receive was posted at the beginning of the step, so the sender need not wait for this
    # rank. See steps 1 and 6 of the journey of a gradient.
    collectives.reduce_chain(bucket.buffer, bucket.arriving, group)
    return Done()


def _scatter(bucket: StepBucket, group: dist.ProcessGroup, wide: WideSum | None) -> Work:
    numel = bucket.buffer.numel() - bucket.num_flags
    payload, flags = bucket.buffer[:numel], bucket.buffer[numel:]
    me, shards = dist.get_rank(group), payload.split(list(bucket.scattered))
    collectives.reduce_scatter(shards[me], shards, group, common=flags, wide=wide)
    # The flags are copied to right behind this rank's shard; see [Note: shards]. They overwrite the
    # next shards, which other ranks have summed by now.
    end = sum(bucket.scattered[: me + 1])
    if end < numel:
        # With WHOLE, the parts of the last ranks may be smaller than the flags.
        overlap = numel - end < bucket.num_flags
        bucket.buffer[end : end + bucket.num_flags].copy_(flags.clone() if overlap else flags)
    return Done()


def sync_parameters(
    parameters: torch.Tensor,
    placement: Placement,
    group: dist.ProcessGroup,
    *,
    scattered: Sequence[int],
) -> None:
    """Sends updated parameters backwards along a reduction.

    Args:
        parameters: The parameters of the region that the reduction has reduced, ``(numel,)``.
        placement: Of the reduction.
        group: Its communicator.
        scattered: How many elements each rank had after the reduction; see `Bucket.scattered`.

    Sync: on a comm stream.
    """
    _SYNC[placement](parameters, scattered, group)


def _gather(parameters: torch.Tensor, scattered: Sequence[int], group: dist.ProcessGroup) -> None:
    collectives.all_gather(parameters.split(list(scattered)), group)


def _give_to_all(parameters: torch.Tensor, _: Sequence[int], group: dist.ProcessGroup) -> None:
    collectives.broadcast_chain(parameters, group)


_REDUCE: Mapping[Placement, Callable[[StepBucket, dist.ProcessGroup, WideSum | None], Work]] = {
    Placement.REPLICATE: _replicate,
    Placement.OWNER: _give_to_owner,
    Placement.WHOLE: _scatter,
    Placement.SHARD: _scatter,
}
_SYNC: Mapping[Placement, Callable[[torch.Tensor, Sequence[int], dist.ProcessGroup], None]] = {
    Placement.OWNER: _give_to_all,
    Placement.WHOLE: _gather,
    Placement.SHARD: _gather,
}


_ALIGN_BYTES = 8  # in a message, row numbers follow values of any dtype


@dataclass(frozen=True)
class Rows:
    """Rows of the same width, side by side in a flat tensor."""

    begin: int
    num_rows: int
    width: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the rows as a view ``(num_rows, width)``."""
        return flat[self.begin : self.begin + self.num_rows * self.width].view(-1, self.width)


def rows_of(bucket: Bucket, region: range) -> tuple[Rows, ...]:
    """Returns the rows in a region of a bucket: those of parameters, then all flags as one row.

    A row is one index of a parameter's outermost dimension in memory. A region may begin or end
    inside a row; that part is a row by itself. A complex number has the width 2.
    """
    # Rows match the use of a tied embedding: the first stage changes only the rows of the tokens in
    # its batch.
    parts = 2 if bucket.wire_dtype.is_complex else 1
    pieces = []
    for slot in bucket.slots:
        part = slot.within(region)
        begin, end = part.start, part.stop
        steps = [step for step, size in zip(slot.stride, slot.shape, strict=True) if size > 1]
        width = max(steps) if len(steps) > 1 else slot.numel
        while begin < end:
            into = begin % width
            whole = (end - begin) // width if into == 0 else 0
            numel = whole * width or min(width - into, end - begin)
            at = slot.offset + begin - region.start
            pieces.append(Rows(at, whole, width) if whole else Rows(at, 1, numel))
            begin += numel
    pieces.append(Rows(len(region), 1, len(bucket.slots)))
    return tuple(Rows(rows.begin * parts, rows.num_rows, rows.width * parts) for rows in pieces)


class PairSum:
    """The exchange of one bucket between two ranks, in each step. Runs on a comm stream.

    Args:
        rows: The rows of the buffer.
        back: The communicator for messages of the first rank. The other communicator has a receive
            that was posted early. It would block these messages on a backend without tags.
    """

    def __init__(self, rows: Sequence[Rows], *, back: dist.ProcessGroup) -> None:
        self._buffer: torch.Tensor
        self._rows = rows
        self._back = back
        self._sending: list[tuple[torch.Tensor, Work]] = []

    def use(self, buffer: torch.Tensor) -> None:
        """Makes `buffer` the tensor that is summed: payload and flags, flat."""
        self._buffer = buffer

    def begin(self, arriving: Arriving | None, group: dist.ProcessGroup) -> Work:
        """Sends this rank's part; the returned work ends when the sum is in the buffer.

        Args:
            arriving: On the first rank, the posted receive of the second rank's part.
            group: Of the two ranks.

        Sync: the work is a `LateWork`. The host needs the number of rows: its wait blocks the host,
        on devices too.
        """
        # The second rank (a later stage) is final first. The first rank answers at the end of its
        # step. If the second rank waited here, all later collectives of its comm stream would wait
        # for another rank's backward. So it waits late.
        if not can_send(group, self._buffer.device):
            work: Work = dist.all_reduce(self._buffer, group=group, async_op=True)
            return work
        if dist.get_rank(group) == 0:  # the host waits for the number of rows, unless in a thread
            return LateWork(partial(self._send_and_add, arriving, group), in_threads=False)
        collectives.reduce_chain(self._buffer, None, group)
        return LateWork(self._add_rows)

    def wait_sent(self) -> None:
        """Waits until the last messages of this rank were sent."""
        for _, work in self._sending:
            SENT(work)
        self._sending.clear()

    def _send_and_add(self, arriving: Arriving | None, group: dist.ProcessGroup) -> None:
        """Sends the first rank's rows that have a bit that is not zero, then adds the other part.

        Other rows would change nothing.
        """
        # The messages of the last step hold their memory until here. A wait right behind the
        # sends would have lasted until the other rank came to its receives.
        self.wait_sent()
        flat = real(self._buffer)
        parts = [rows.of(flat) for rows in self._rows]
        touched = [part.view(torch.uint8).any(dim=1).nonzero().flatten() for part in parts]
        counts = [len(numbers) for numbers in touched]
        content, message = _message(self._rows, counts, flat)
        for part, numbers, (to_numbers, to_values) in zip(parts, touched, message, strict=True):
            to_numbers.copy_(numbers)
            torch.index_select(part, 0, numbers, out=to_values)
        # The receiver needs the counts first: they say how long the message is.
        self._send(torch.tensor(counts, device=flat.device), COUNTS)
        self._send(content, BACK)
        # The wait comes behind the sends. The other rank needs them to end its step, and would wait
        # for this rank as long as this rank waits for it.
        collectives.reduce_chain(self._buffer, arriving, group)

    def _add_rows(self) -> None:
        """Adds the first rank's rows to those of the second rank's part."""
        flat = real(self._buffer)
        counts = torch.empty(len(self._rows), dtype=torch.int64, device=flat.device)
        RECEIVED(receive(counts, 0, self._back, COUNTS))
        numbers_of = counts.tolist()
        # They say how much memory the message needs.
        if any(n not in range(r.num_rows + 1) for n, r in zip(numbers_of, self._rows, strict=True)):
            raise ReduceError(f"another rank sends {numbers_of} rows, more than there are")
        content, message = _message(self._rows, numbers_of, flat)
        RECEIVED(receive(content, 0, self._back, BACK))
        sums = []
        for rows, (numbers, values) in zip(self._rows, message, strict=True):
            part = rows.of(flat)
            sums.append((part, numbers.long(), part[numbers].add_(values)))
        # All sums are computed before this line, and written after it. For the rows that were not
        # sent, the first rank has added zeros, which turns -0.0 to 0.0. This does the same here, so
        # both ranks have the same bits.
        flat.add_(0.0)
        for part, numbers, values in sums:
            part.index_copy_(0, numbers, values)

    def _send(self, tensor: torch.Tensor, tag: int) -> None:
        self._sending.append((tensor, send(tensor, 1, self._back, tag)))


def _message(
    rows: Sequence[Rows], counts: Sequence[int], like: torch.Tensor
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Returns one tensor of bytes for some of the rows: the values of all, then their numbers.

    And views of it: numbers ``(count,)`` and values ``(count, width)`` for each entry of `rows`.

    Args:
        rows: All rows of the buffer.
        counts: For each entry of `rows`, the number of rows in the message.
        like: A tensor with the dtype and device of the values.
    """
    sizes = [count * each.width for count, each in zip(counts, rows, strict=True)]
    nbytes = sum(sizes) * like.itemsize
    aligned = -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    num_bytes = aligned + sum(counts) * torch.int32.itemsize
    content = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
    values = content[:nbytes].view(like.dtype).split(sizes)
    numbers = content[aligned:].view(torch.int32).split(list(counts))
    views = zip(numbers, values, rows, strict=True)
    return content, [(n, v.view(-1, each.width)) for n, v, each in views]
