"""Two holders bring their gradients together: one message each way, and a sum on each.

The second one's part leaves whole when it is final, while the first one still computes; the first
one's when its own is final: all of it, or the rows that it has touched. Both add the same two
terms, so both have the bits that an all-reduce would give.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    real,
    receive,
    send,
)
from pipegrad.comm.work import Done, LateWork, Work
from pipegrad.plan.buckets import Bucket

_ALIGN_BYTES = 8  # row numbers lie behind values of any dtype


@dataclass(frozen=True)
class Rows:
    """Rows of one width, one behind the other, in a flat tensor."""

    begin: int
    num_rows: int
    width: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns them as a view ``(num_rows, width)``."""
        return flat[self.begin : self.begin + self.num_rows * self.width].view(-1, self.width)


def rows_of(bucket: Bucket, region: range) -> tuple[Rows, ...]:
    """Returns what a region of a bucket is made of: rows of parameters, then the flags as one.

    A row is what lies together of one index of the outermost dimension, as memory has it; what a
    region cuts off of one counts as a row of its own. Of complex numbers each part counts.
    """
    parts = 2 if bucket.wire_dtype.is_complex else 1
    found = []
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
            found.append(Rows(at, whole, width) if whole else Rows(at, 1, numel))
            begin += numel
    found.append(Rows(len(region), 1, len(bucket.slots)))
    return tuple(Rows(rows.begin * parts, rows.num_rows, rows.width * parts) for rows in found)


class PairSum:
    """What two ranks exchange of a bucket, each step anew. On a comm stream.

    Args:
        buffer: Payload and flags, flat.
        rows: What it is made of, where only what was touched goes back; else empty.
        back: The communicator of the way back: receives of the way there are posted early, and
            would block what is sent behind them where messages have no tags.
    """

    def __init__(
        self, buffer: torch.Tensor, rows: Sequence[Rows], *, back: dist.ProcessGroup
    ) -> None:
        self._buffer = buffer
        self._rows = rows
        self._back = back
        self._room: torch.Tensor | None = None  # for all of the first one's part
        self._coming: Work | None = None
        self._leaving: list[tuple[torch.Tensor, Work]] = []

    def begin(self, arriving: Arriving | None, group: dist.ProcessGroup) -> Work:
        """Sends this rank's part; the work that is returned ends when the sum is here.

        Args:
            arriving: On the first rank what was expected from the second.
            group: Of the two.

        Sync: what the first one sends is a copy, which leaves while both go on. The second one's
        work ends late: nothing of its comm stream has to wait behind what comes at the end of the
        step. Where only rows go back the host must know how many: that blocks it, on devices too.
        """
        if not collectives.can_send(group, self._buffer.device):
            work: Work = dist.all_reduce(self._buffer, group=group, async_op=True)
            return work
        if dist.get_rank(group) == 0:
            if self._rows:  # the host reads how many rows, so it waits: late, unless in a thread
                return LateWork(partial(self._give, arriving, group), in_threads=False)
            self._give(arriving, group)
            return Done()
        collectives.reduce_chain(self._buffer, None, group)
        if not self._rows:
            self._coming = receive(self._whole(), 0, self._back, BACK)
        return LateWork(self._take_rows if self._rows else self._take_all)

    def settle(self) -> None:
        """Waits until what this rank sent last is gone."""
        for _, work in self._leaving:
            SENT(work)
        self._leaving.clear()

    def _give(self, arriving: Arriving | None, group: dist.ProcessGroup) -> None:
        """Sends the first rank's part, then adds what has come from the second."""
        self.settle()
        if self._rows:
            self._give_rows()
        else:
            self._send(self._whole().copy_(self._buffer), BACK)
        collectives.reduce_chain(self._buffer, arriving, group)

    def _take_all(self) -> None:
        """Adds what comes back to the second rank's part."""
        assert self._coming is not None
        RECEIVED(self._coming)
        real(self._buffer).add_(real(self._whole()))

    def _give_rows(self) -> None:
        """Sends the rows with a bit that is not zero: no other changes what the second has."""
        flat = real(self._buffer)
        parts = [rows.of(flat) for rows in self._rows]
        touched = [part.view(torch.uint8).any(dim=1).nonzero().flatten() for part in parts]
        counts = [len(numbers) for numbers in touched]
        message = _Message(self._rows, counts, flat)
        for part, numbers, (to_numbers, to_values) in zip(parts, touched, message, strict=True):
            to_numbers.copy_(numbers)
            torch.index_select(part, 0, numbers, out=to_values)
        self._send(torch.tensor(counts, device=self._buffer.device), COUNTS)
        self._send(message.content, BACK)

    def _take_rows(self) -> None:
        """Adds the rows that come back to those of the second rank's part."""
        flat = real(self._buffer)
        counts = torch.empty(len(self._rows), dtype=torch.int64, device=flat.device)
        RECEIVED(receive(counts, 0, self._back, COUNTS))
        message = _Message(self._rows, counts.tolist(), flat)
        RECEIVED(receive(message.content, 0, self._back, BACK))
        sums = []
        for rows, (numbers, values) in zip(self._rows, message, strict=True):
            part = rows.of(flat)
            sums.append((part, numbers.long(), part[numbers].add_(values)))
        flat.add_(0.0)  # the first one adds zeros there, which turns -0.0 to 0.0
        for part, numbers, values in sums:
            part.index_copy_(0, numbers, values)

    def _send(self, tensor: torch.Tensor, tag: int) -> None:
        self._leaving.append((tensor, send(tensor, 1, self._back, tag)))

    def _whole(self) -> torch.Tensor:
        if self._room is None:
            self._room = torch.empty_like(self._buffer)
        return self._room


class _Message:
    """Touched rows in one tensor of bytes: the values of all, then their numbers.

    Args:
        rows: Of what they are rows.
        counts: How many of each were touched.
        like: Whose dtype and device values have.
    """

    def __init__(self, rows: Sequence[Rows], counts: Sequence[int], like: torch.Tensor) -> None:
        self._counts = counts
        self._widths = [each.width for each in rows]
        numel = sum(n * width for n, width in zip(counts, self._widths, strict=True))
        behind = -(-numel * like.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        nbytes = behind + sum(counts) * torch.int32.itemsize
        self.content = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        self._values = self.content[: numel * like.itemsize].view(like.dtype)
        self._numbers = self.content[behind:].view(torch.int32)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields numbers ``(count,)`` and values ``(count, width)`` of each."""
        numbers = self._numbers.split(list(self._counts))
        sizes = [n * width for n, width in zip(self._counts, self._widths, strict=True)]
        values = self._values.split(sizes)
        for index, width in enumerate(self._widths):
            yield numbers[index], values[index].view(-1, width)
