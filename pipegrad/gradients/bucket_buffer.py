"""Flat buffers that several streams write and a comm stream reads, and their views.

Steps 1 to 4 of the journey of a gradient (docs/internals.md) write here, step 6 reduces what is
here, and step 7 reads the results. What happens to the gradients themselves is in bucket.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from operator import attrgetter

import torch

from pipegrad.comm import sync_points
from pipegrad.plan.buckets import Bucket
from pipegrad.plan.routes import steps_taken

ALLOCATED = sync_points.Record("buffer.allocated", "fresh memory may be zeroed or in use still")
RESET_FREE = sync_points.Wait(
    "buffer.reset-free", "the last step may still be read on another stream"
)
RESET = sync_points.Record("buffer.reset", "what a producer writes must not be zeroed over")
CLAIM_FREE = sync_points.Wait(
    "buffer.claim-free", "the memory may be zeroed, or read, on another stream still"
)
FILL_FREE = sync_points.Wait("buffer.fill-free", "the zeroing may still run on another stream")
WRITTEN = sync_points.Record(
    "buffer.written", "a collective must not read before the producer wrote"
)
WROTE = sync_points.Record(
    "buffer.wrote", "what another stream has written must be read, and not be overwritten"
)
GATHER = sync_points.Wait("buffer.gather", "gradients of other streams are copied on this one")
COPIED = sync_points.Record("buffer.copied", "a gradient that was copied is freed at once")
FREED = sync_points.Wait(
    "buffer.freed", "the stream that has made a gradient takes its memory again at once"
)
PART_FREE = sync_points.Wait(
    "buffer.part-free", "fresh memory may still be in use on the stream where a step begins"
)
PART_TAKEN = sync_points.Record(
    "buffer.part-taken", "memory that goes must not be used again while the part is copied"
)
GONE = sync_points.Wait("buffer.gone", "its allocation stream takes freed memory again at once")
RELEASED = sync_points.Record(
    "buffer.released", "a later step must not overwrite what is being read"
)
_LAYOUT = attrgetter("layout")


class FlatBuffer:
    """A new flat tensor that any stream may write to, and the event for which writers must wait.

    A writer calls `acquire`, writes, and calls `written`. The reader waits for the events of all
    writers, reads, and calls `release`. All of these are on the current stream of their caller.
    """

    # One event is enough to protect the buffer: the last `release` comes after all earlier uses. So
    # a writer on any stream waits for this event, and no stream needs a list of the others.

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.device = buffer.device
        self._home = sync_points.in_use.current(buffer.device)
        self._free = ALLOCATED(buffer.device)

    def acquire(self, site: sync_points.Wait) -> None:
        """Makes the current stream wait until the buffer may be written to."""
        site(self._free, self.device)

    def written(self, site: sync_points.Record) -> torch.Event | None:
        """Returns the event for which a reader must wait, recorded after a write."""
        return site(self.device)

    def release(self, site: sync_points.Record) -> None:
        """Makes the next writers wait for everything on the current stream until now."""
        self._free = site(self.device)

    def return_home(self, site: sync_points.Wait) -> None:
        """Makes the stream on which the buffer was allocated wait, like a writer."""
        # torch's allocator gives freed memory back to the stream of its allocation, without a wait
        # for the other streams that have used it.
        site(self._free, self.device, self._home)


class BucketBuffer:
    """The memory of one bucket: a slot for each gradient, and a flag for each slot.

    The memory is flat, ``(numel,)`` of the wire dtype: first the slots, then the flags. Without
    SHARD or WHOLE it stays. With them it is made at the first write of a step, and goes when this
    rank's part was taken out of it; see [Note: shards]. The part goes with the last gradient that
    is in it.

    Args:
        bucket: The bucket.
        device: Of the memory.
        rank: This rank, which has one part after a reduction with SHARD or WHOLE.
        on_making: Called right before memory is made that goes again.

    Attributes:
        bucket: The bucket.
        slots: Views, in the order of the bucket. Empty while there is no memory. They have one
            version, which grows with each write into any of them, but by an address.
        payload: The part of the slots that this rank has after the reductions so far.
        scatters_at: The number of this rank's first reduction with SHARD or WHOLE; None if there is
            none.
        goes: Whether the memory goes in each step, when this rank's part was taken out of it.
        is_taken: Whether the part of this step was taken out of the memory.
        event: A launch must wait for it, if there is one: all slots are written then.
    """

    def __init__(
        self,
        bucket: Bucket,
        device: torch.device,
        *,
        rank: int = 0,
        on_making: Callable[[], object] = lambda: None,
    ) -> None:
        self.bucket = bucket
        self.slots: list[torch.Tensor] = []
        self.is_taken = False
        self._on_making = on_making
        taken = bucket.route[: steps_taken(bucket.route, rank)]
        self.scatters_at = next((i for i, h in enumerate(taken) if h.placement.scatters), None)
        self.goes = self.scatters_at is not None
        # The element of the payload at which the part begins that is taken out.
        taken_to = None if self.scatters_at is None else self.scatters_at + 1
        self._part_start = 0 if taken_to is None else bucket.region(rank, taken_to).start
        self.device = device
        self._home = sync_points.in_use.current(device)  # where the present step has begun
        self._rank = rank
        self._memory: FlatBuffer | None = None
        self._counts_each = False
        self._making = threading.Lock()  # threads of autograd may write first
        self._part: torch.Tensor | None = None  # until the gradients of this step have it
        self._divisor = 1.0
        self._divided: Collection[int] = ()
        # On CPU there is none: a task is submitted only after the writes of all threads.
        self.event: torch.Event | None = None
        # Streams that wrote into slots, or made gradients: the keys, in their order.
        self._streams: dict[torch.Stream, None] = {}

    @property
    def buffer(self) -> torch.Tensor:
        """All slots and flags, flat."""
        return self.allocated().buffer

    def reset(self, zeroed: Sequence[int] = ()) -> None:
        """Begins a step, and zeroes some slots.

        Args:
            zeroed: Numbers of slots to which others add without autograd.

        Sync: writes on the current stream, after the last reader of the memory. Later writers wait
        for this.
        """
        # Step 1 of the journey of a gradient. The collective of the last step may still read on its
        # comm stream. Others write to the slots on streams that know nothing of this one, so an
        # event is recorded for them.
        self.is_taken = False
        self._streams.clear()
        self._part = None  # after a failed step, nobody has taken it
        if self.goes:
            self._home = sync_points.in_use.current(self.device)
            if self._memory is None and not zeroed:
                return
        memory = self.allocated()
        memory.acquire(RESET_FREE)
        if len(zeroed) == len(self.slots):
            memory.buffer.zero_()
        else:
            for number in zeroed:
                self.slots[number].zero_()
        if self.goes:
            self._locate(memory.buffer)
        self._flags.fill_(1)
        memory.release(RESET)

    def claim(self) -> list[torch.Tensor]:
        """Returns the slots, for a caller that overwrites some of them.

        Sync: the current stream may write to them then.
        """
        self.allocated().acquire(CLAIM_FREE)
        return self.slots

    def add_stream(self) -> None:
        """Adds the current stream to those that made gradients, or wrote slots."""
        # The event comes when the bucket is filled: one for all gradients of the stream.
        if (stream := sync_points.in_use.current(self.device)) is not None:
            self._streams[stream] = None

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Orders what is written inside behind all streams that wrote.

        Sync: the current stream waits for them, and they for it: what they have made may be freed.
        """
        current = sync_points.in_use.current(self.device) if self._streams else None
        others = [stream for stream in self._streams if stream != current]
        # One wait for each stream, not for each gradient: an event covers all that a stream has
        # done before it.
        for stream in others:
            GATHER(WROTE(self.device, stream), self.device)
        self.allocated().acquire(FILL_FREE)
        yield
        if others:
            copied = COPIED(self.device)
            for stream in others:
                FREED(copied, self.device, stream)

    def fill(
        self, gradients: list[torch.Tensor], slots: Sequence[int], absent: Sequence[int]
    ) -> None:
        """Writes the gradients that are not in the bucket yet, inside of `filling`.

        They are not divided.

        Args:
            gradients: In any memory.
            slots: The number of the slot of each.
            absent: Slots without a gradient on this rank: they are zeroed, and so are their flags.

        Sync: writes on the current stream.
        """
        every = len(slots) == len(self.slots)
        into = self.slots if every else [self.slots[number] for number in slots]
        with torch.no_grad():
            if set(map(_LAYOUT, gradients)) - {torch.strided}:
                for gradient, slot in zip(gradients, into, strict=True):
                    write(slot, gradient)
            elif gradients:
                torch._foreach_copy_(into, gradients)
        if len(absent) == len(self.slots):
            self.buffer.zero_()
        else:
            for number in absent:
                self.slots[number].zero_()
                self._flags[number].zero_()

    def flag_values(self, slots: Sequence[int]) -> None:
        """Sets the flags of slots to which somebody may have added: whether a value is not zero.

        Sync: as `fill`, behind it. The host does not wait.
        """
        for number in slots:
            self._flags[number].copy_(self.slots[number].any())

    def complete(self, divisor: float, divided: Collection[int] = ()) -> None:
        """Ends the writes of a step: the bucket may leave.

        Args:
            divisor: All gradients must still be divided by this; `divide` does so.
            divided: Numbers of the slots that are divided already.

        Sync: the current stream must be after all writes.
        """
        # One event for the whole bucket: whoever completes it has made the current stream wait for
        # all other streams that wrote.
        self._divisor, self._divided = divisor, divided
        self.event = self.allocated().written(WRITTEN)

    def divide(self) -> None:
        """Divides the gradients, but those that are divided; call it once, before any reduction.

        Sync: on the current stream, after all producers.
        """
        if self._divisor == 1:
            return
        if not self._divided:
            self.payload.div_(self._divisor)
            return
        # What lies between two slots that are divided is one piece, with its gaps, which are zero.
        begin = 0
        for number in sorted(self._divided):
            slot = self.bucket.slots[number]
            if begin < slot.offset:
                self.payload[begin : slot.offset].div_(self._divisor)
            begin = slot.offset + slot.numel
        if begin < len(self.payload):
            self.payload[begin:].div_(self._divisor)

    def end_reduction(self, step: int, divisor: int) -> None:
        """Ends a reduction: divides what this rank has then, and takes its part.

        Args:
            step: The number of the reduction.
            divisor: 1 if there is nothing to divide.

        Sync: on the current stream, a comm stream.
        """
        if self.scatters_at is None:  # this rank has all of the bucket
            if divisor != 1:
                self.buffer.div_(divisor)
            return
        if step != self.scatters_at:
            part = self.part(step + 1)
            if divisor != 1:
                part.div_(divisor)
            self._locate(part)
            return
        assert self._memory is not None
        region = self.bucket.region(self._rank, step + 1)
        source = self._memory.buffer[region.start : region.stop + len(self.bucket.slots)]
        self._part = self._new_part(source)
        write(self._part, source, divisor)
        self._memory.release(PART_TAKEN)
        self._locate(self._part)
        self.is_taken = True

    def _new_part(self, like: torch.Tensor) -> torch.Tensor:
        """Returns memory for this rank's part.

        Sync: the current stream, a comm stream, may write to it then.
        """
        # The optimizer reads gradients on the stream where the step begins, and users drop them
        # there. torch's allocator gives freed memory back to the stream of its allocation. So it is
        # allocated on that stream, like any gradient, and nobody must keep it for a wait.
        with sync_points.in_use.running(self._home):
            part = FlatBuffer(torch.empty_like(like))
        part.acquire(PART_FREE)
        return part.buffer

    def let_go(self) -> None:
        """Frees the memory of the bucket, if this rank's part was taken. It waits for nothing.

        Sync: the stream on which it was made waits for the comm stream.
        """
        if self._memory is not None and self.is_taken:
            # The host frees memory that the comm stream may still read. So its first stream waits
            # before the allocator gives it out again there.
            self._memory.return_home(GONE)
            self._memory, self.slots = None, []

    def end_step(self) -> None:
        """Ends a step, whose results are in place. A part belongs to the gradients in it now.

        Sync: the next writers wait for everything on the current stream until now.
        """
        if self._memory is not None:
            self._memory.release(RELEASED)
        if self._part is not None:
            # A view of the part, here or in `payload`, would keep its memory when the user has
            # dropped all gradients.
            self._part = None
            self._locate(self.nothing())

    def count_each(self) -> None:
        """Gives each slot a version of its own from now on."""
        self._counts_each = True
        self.slots = [slot.data for slot in self.slots]

    def is_zero(self) -> bool:
        """Whether the bits of all slots are zero.

        False does not prove a gradient: a zero may have a sign, and another slot may have old
        values.

        Sync: blocks the host.
        """
        # One read for the whole bucket, as integers of 64 bits, is much faster than one for each
        # slot in its dtype.
        payload = self.buffer[: self.bucket.payload_numel]
        nbytes = payload.numel() * payload.element_size()
        if not nbytes or nbytes % 8:
            return False
        return not bool(torch.stack(payload.view(torch.int64).aminmax()).any())

    def contributed(self) -> list[bool]:
        """Returns for each slot whether any rank has a gradient. Blocks the host."""
        return [flag != 0 for flag in self._flags.tolist()]

    def shard(self, number: int, begin: int, end: int) -> torch.Tensor:
        """Returns the elements ``begin:end`` of a slot, flat, in the order of memory.

        They must be in this rank's shard, and the step may not have ended.
        """
        assert self._part is not None
        start = self.bucket.slots[number].offset - self._part_start
        return self._part[start + begin : start + end]

    def result(self, number: int) -> torch.Tensor:
        """Returns the slot of a gradient that this rank has whole, after all reductions.

        The step may not have ended.
        """
        if self._part is None:
            return self.slots[number]
        slot = self.bucket.slots[number]
        offset = slot.offset - self._part_start
        return self._part.as_strided(slot.shape, slot.stride, offset).data

    def part(self, num_steps: int) -> torch.Tensor:
        """Returns this rank's part after `num_steps` reductions: payload and flags, flat."""
        region, start, flat = self.bucket.region(self._rank, num_steps), 0, self._part
        if self.scatters_at is None or num_steps <= self.scatters_at:
            flat = self.buffer
        else:
            start = self._part_start
        assert flat is not None
        return flat[region.start - start : region.stop - start + len(self.bucket.slots)]

    def nothing(self) -> torch.Tensor:
        """Returns no elements, of the wire dtype, on the device."""
        return torch.empty(0, dtype=self.bucket.wire_dtype, device=self.device)

    def _locate(self, flat: torch.Tensor) -> None:
        """Uses the payload and the flags in `flat` from now on; there are none if it is empty."""
        end = max(len(flat) - len(self.bucket.slots), 0)
        self.payload, self._flags = flat[:end], flat[end:]

    def allocated(self) -> FlatBuffer:
        """Returns the memory, which is made if there is none.

        Sync: zeroes the gaps between slots on the current stream, if it is made.
        """
        if (memory := self._memory) is not None:
            return memory
        with self._making:
            if self._memory is None:
                if self.goes:
                    self._on_making()
                bucket = self.bucket
                flat = torch.empty(bucket.numel, dtype=bucket.wire_dtype, device=self.device)
                # Nobody writes into the gaps, but handlers and hooks read all of the payload.
                ends = [(s.offset, s.offset + s.numel) for s in bucket.slots]
                for (_, end), (begin, _) in pairwise([*ends, (bucket.payload_numel, 0)]):
                    if end < begin:
                        flat[end:begin].zero_()
                self._locate(flat)
                self._flags.fill_(1)
                # Views share the version counter of their base, but `.data` has its own counter.
                # So one number says whether any slot was written, whatever comm streams write.
                base = flat.data
                self.slots = [
                    base.as_strided(slot.shape, slot.stride, slot.offset) for slot in bucket.slots
                ]
                if self._counts_each:
                    self.slots = [slot.data for slot in self.slots]
                # Last: other threads read it without the lock, and must find the slots then.
                self._memory = FlatBuffer(flat)
            return self._memory


def write(slot: torch.Tensor, gradient: torch.Tensor, divisor: float = 1.0) -> None:
    """Overwrites a slot with a gradient, divided.

    Sync: on the current stream. One pass over both, if the slot's dtype is not the wider one.
    """
    with torch.no_grad():
        if gradient.is_sparse:
            slot.zero_().add_(gradient)
        elif divisor != 1 and torch.promote_types(gradient.dtype, slot.dtype) == gradient.dtype:
            torch.div(gradient.detach(), divisor, out=slot)
            return
        else:
            slot.copy_(gradient.detach())
        if divisor != 1:
            # A division in the narrower dtype would round once more.
            slot.div_(divisor)
