"""Pair exchange: two ranks sum a gradient with one message in each direction.

The second rank sends its whole part when it is final, while the first rank still computes. The
first rank sends its part when that is final: the whole part, or only the rows that are not zero.
Both ranks add the same two terms, so both have the bits of an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from pipegrad.comm import collectives
from pipegrad.comm.collectives import Arriving
from pipegrad.comm.messages import (
    BACK,
    COUNTS,
    RECEIVED,
    SENT,
    can_send,
    real,
    receive,
    send,
)
from pipegrad.comm.work import Done, LateWork, Work
from pipegrad.errors import ReduceError
from pipegrad.plan.buckets import Bucket

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
        rows: The rows of the buffer, if the first rank sends only rows that are not zero; otherwise
            empty.
        back: The communicator for messages of the first rank. The other communicator has a receive
            that was posted early. It would block these messages on a backend without tags.
    """

    def __init__(self, rows: Sequence[Rows], *, back: dist.ProcessGroup) -> None:
        self._buffer: torch.Tensor
        self._rows = rows
        self._back = back
        self._scratch: torch.Tensor | None = None  # for the whole part of the first rank
        self._receiving: Work | None = None
        self._sending: list[tuple[torch.Tensor, Work]] = []

    def place(self, buffer: torch.Tensor) -> None:
        """Makes `buffer` the tensor that is summed: payload and flags, flat."""
        self._buffer = buffer

    def begin(self, arriving: Arriving | None, group: dist.ProcessGroup) -> Work:
        """Sends this rank's part; the returned work ends when the sum is in the buffer.

        Args:
            arriving: On the first rank, the posted receive of the second rank's part.
            group: Of the two ranks.

        Sync: the first rank sends a copy, and both ranks go on meanwhile. On the second rank, the
        work is a `LateWork`. If only rows are sent, the host needs their number: that blocks the
        host, on devices too.
        """
        # The second rank (a later stage) is final first. The first rank answers at the end of its
        # step. If the second rank waited here, all later collectives of its comm stream would wait
        # for another rank's backward. So it waits late.
        if not can_send(group, self._buffer.device):
            work: Work = dist.all_reduce(self._buffer, group=group, async_op=True)
            return work
        if dist.get_rank(group) == 0:
            if self._rows:  # the host waits for the number of rows: late, unless in a thread
                return LateWork(partial(self._send_and_add, arriving, group), in_threads=False)
            self._send_and_add(arriving, group)
            return Done()
        collectives.reduce_chain(self._buffer, None, group)
        if not self._rows:
            self._receiving = receive(self._whole(), 0, self._back, BACK)
        return LateWork(self._add_rows if self._rows else self._add_all)

    def settle(self) -> None:
        """Waits until the last messages of this rank were sent."""
        for _, work in self._sending:
            SENT(work)
        self._sending.clear()

    def _send_and_add(self, arriving: Arriving | None, group: dist.ProcessGroup) -> None:
        """Sends the first rank's part, then adds the second rank's part."""
        # The message is a copy of the part before the sum, since the sum overwrites the part. The
        # copy of the last step must have been sent before its memory is used again.
        self.settle()
        if self._rows:
            self._send_rows()
        else:
            self._send(self._whole().copy_(self._buffer), BACK)
        collectives.reduce_chain(self._buffer, arriving, group)

    def _add_all(self) -> None:
        """Adds the first rank's part to the second rank's part."""
        assert self._receiving is not None
        RECEIVED(self._receiving)
        real(self._buffer).add_(real(self._whole()))

    def _send_rows(self) -> None:
        """Sends the rows that have a bit that is not zero. Other rows would change nothing."""
        flat = real(self._buffer)
        parts = [rows.of(flat) for rows in self._rows]
        touched = [part.view(torch.uint8).any(dim=1).nonzero().flatten() for part in parts]
        counts = [len(numbers) for numbers in touched]
        message = _Message(self._rows, counts, flat)
        for part, numbers, (to_numbers, to_values) in zip(parts, touched, message, strict=True):
            to_numbers.copy_(numbers)
            torch.index_select(part, 0, numbers, out=to_values)
        # The receiver needs the counts first: they say how long the message is.
        self._send(torch.tensor(counts, device=self._buffer.device), COUNTS)
        self._send(message.content, BACK)

    def _add_rows(self) -> None:
        """Adds the first rank's rows to those of the second rank's part."""
        flat = real(self._buffer)
        counts = torch.empty(len(self._rows), dtype=torch.int64, device=flat.device)
        RECEIVED(receive(counts, 0, self._back, COUNTS))
        numbers_of = counts.tolist()
        # They say how much memory the message needs.
        if any(n not in range(r.num_rows + 1) for n, r in zip(numbers_of, self._rows, strict=True)):
            raise ReduceError(f"another rank sends {numbers_of} rows, more than there are")
        message = _Message(self._rows, numbers_of, flat)
        RECEIVED(receive(message.content, 0, self._back, BACK))
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

    def _whole(self) -> torch.Tensor:
        if self._scratch is None:
            self._scratch = torch.empty_like(self._buffer)
        return self._scratch


class _Message:
    """Rows that are not zero, in one tensor of bytes: the values of all, then their numbers.

    Args:
        rows: All rows of the buffer.
        counts: For each entry of `rows`, the number of rows in the message.
        like: A tensor with the dtype and device of the values.
    """

    def __init__(self, rows: Sequence[Rows], counts: Sequence[int], like: torch.Tensor) -> None:
        self._counts = counts
        self._widths = [each.width for each in rows]
        numel = sum(n * width for n, width in zip(counts, self._widths, strict=True))
        aligned = -(-numel * like.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        nbytes = aligned + sum(counts) * torch.int32.itemsize
        self.content = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        self._values = self.content[: numel * like.itemsize].view(like.dtype)
        self._numbers = self.content[aligned:].view(torch.int32)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields numbers ``(count,)`` and values ``(count, width)`` for each entry of `rows`."""
        numbers = self._numbers.split(list(self._counts))
        sizes = [n * width for n, width in zip(self._counts, self._widths, strict=True)]
        values = self._values.split(sizes)
        for index, width in enumerate(self._widths):
            yield numbers[index], values[index].view(-1, width)
