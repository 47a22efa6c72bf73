"""The exchange of a tied gradient between two ranks, by one message in each direction.

[Note: pair exchange] Two ranks sum a gradient. The second rank sends its whole part when it is
final, while the first rank still computes. The first rank sends the rows of its part that are not
zero, when they are final. Both ranks have the bits of one all-reduce, because both add the same two
terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from pipegrad.comm.collectives import (
    BACK,
    COUNTS,
    RECEIVED,
    SENT,
    Arriving,
    can_send,
    real,
    receive,
    reduce_chain,
    send,
)
from pipegrad.comm.sync_points import LateWork, Work
from pipegrad.errors import ReduceError
from pipegrad.plan.buckets import Bucket

_ALIGN_BYTES = 8  # in a message, row numbers follow values of any dtype


def rows_of(buffer: torch.Tensor, bucket: Bucket, region: range) -> list[torch.Tensor]:
    """Returns a buffer as views ``(num_rows, width)``: rows of parameters, then all flags as one.

    A row is one index of a parameter's outermost dimension in memory. A region may begin or end
    inside a row; that part is a separate view. A complex number has the width 2.

    Args:
        buffer: The region of the bucket, then the flags; flat.
        bucket: The bucket.
        region: The elements of its payload.
    """
    # Rows, because the first stage changes only the rows of a tied embedding for the tokens in its
    # batch.
    pieces = list[tuple[int, int, int]]()  # begin, end, width
    for slot in bucket.slots:
        part = slot.within(region)
        begin, end = part.start, part.stop
        steps = [step for step, size in zip(slot.stride, slot.shape, strict=True) if size > 1]
        width = max(steps) if len(steps) > 1 else slot.numel
        while begin < end:
            into = begin % width
            whole = (end - begin) // width * width if into == 0 else 0
            numel = whole or min(width - into, end - begin)
            at = slot.offset + begin - region.start
            pieces.append((at, at + numel, width if whole else numel))
            begin += numel
    pieces.append((len(region), len(buffer), len(bucket.slots)))
    return [
        real(buffer[begin:end]).view((end - begin) // width, -1) for begin, end, width in pieces
    ]


class PairSum:
    """The exchange of one bucket between two ranks, in each step. Runs on a comm stream.

    Args:
        parts: The rows of the buffer: see `rows_of`.
        back: The communicator for messages of the first rank. It is a separate one, because the
            receive that was posted early on the other communicator would block these messages on a
            backend without tags.
    """

    def __init__(self, parts: Sequence[torch.Tensor], *, back: dist.ProcessGroup) -> None:
        self._parts = parts
        self._back = back
        self._sending: list[tuple[torch.Tensor, Work]] = []

    def begin(
        self, buffer: torch.Tensor, arriving: Arriving | None, group: dist.ProcessGroup
    ) -> Work:
        """Sends this rank's part; the returned work ends when the sum is in the buffer.

        Sync: the work is a `LateWork`. Its wait blocks the host, on devices too, because the host
        needs the number of rows.
        """
        # The second rank (a later stage) is final first. It waits late, because the first rank
        # answers at the end of its step: all later collectives of its comm stream would wait for
        # another rank's backward.
        if not can_send(group, buffer.device):
            work: Work = dist.all_reduce(buffer, group=group, async_op=True)
            return work
        if dist.get_rank(group) == 0:  # the host waits for the number of rows, unless in a thread
            return LateWork(partial(self._send_and_add, buffer, arriving, group), in_threads=False)
        reduce_chain(buffer, None, group)
        return LateWork(partial(self._add_rows, buffer))

    def wait_sent(self) -> None:
        """Waits until the last messages of this rank were sent."""
        for _, work in self._sending:
            SENT(work)
        self._sending.clear()

    def _send_and_add(
        self, buffer: torch.Tensor, arriving: Arriving | None, group: dist.ProcessGroup
    ) -> None:
        """Sends the first rank's rows that have a bit that is not zero, then adds the other part.

        Other rows would change nothing.
        """
        # The messages of the last step hold their memory until here, because a wait right after the
        # sends would have lasted until the other rank came to its receives.
        self.wait_sent()
        parts = self._parts
        touched = [part.view(torch.uint8).any(dim=1).nonzero().flatten() for part in parts]
        counts = [len(numbers) for numbers in touched]
        content, message = _message(parts, counts)
        for part, numbers, (to_numbers, to_values) in zip(parts, touched, message, strict=True):
            to_numbers.copy_(numbers)
            torch.index_select(part, 0, numbers, out=to_values)
        # Send the counts first, because the receiver computes the length of the message from them.
        for tensor, tag in ((torch.tensor(counts, device=buffer.device), COUNTS), (content, BACK)):
            self._sending.append((tensor, send(tensor, 1, self._back, tag)))
        # Wait after the sends, because the other rank needs them to end its step, and would wait
        # for this rank as long as this rank waits for it.
        reduce_chain(buffer, arriving, group)

    def _add_rows(self, buffer: torch.Tensor) -> None:
        """Adds the first rank's rows to the second rank's part."""
        counts = torch.empty(len(self._parts), dtype=torch.int64, device=buffer.device)
        RECEIVED(receive(counts, 0, self._back, COUNTS))
        numbers_of = counts.tolist()
        # Check them, because they determine the memory of the message.
        if any(n not in range(len(x) + 1) for n, x in zip(numbers_of, self._parts, strict=True)):
            raise ReduceError(f"another rank sends {numbers_of} rows, more than there are")
        content, message = _message(self._parts, numbers_of)
        RECEIVED(receive(content, 0, self._back, BACK))
        sums = []
        for part, (numbers, values) in zip(self._parts, message, strict=True):
            sums.append((part, numbers.long(), part[numbers].add_(values)))
        # All sums are computed before this line, and written after it. Add zeros, because both
        # ranks must have the same bits: the first rank has added zeros for the rows that were not
        # sent, which turns -0.0 to 0.0.
        real(buffer).add_(0.0)
        for part, numbers, values in sums:
            part.index_copy_(0, numbers, values)


def _message(
    parts: Sequence[torch.Tensor], counts: Sequence[int]
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Returns one tensor of bytes for some of the rows: all values, then the row numbers.

    It also returns views of it: numbers ``(count,)`` and values ``(count, width)`` for each of
    `parts`.
    """
    like, widths = parts[0], [part.shape[1] for part in parts]
    sizes = [count * width for count, width in zip(counts, widths, strict=True)]
    nbytes = sum(sizes) * like.itemsize
    aligned = -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    num_bytes = aligned + sum(counts) * torch.int32.itemsize
    content = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
    values = content[:nbytes].view(like.dtype).split(sizes)
    numbers = content[aligned:].view(torch.int32).split(list(counts))
    views = zip(numbers, values, widths, strict=True)
    return content, [(n, v.view(-1, width)) for n, v, width in views]
