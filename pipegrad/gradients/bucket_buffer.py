"""Flat buffers that several streams write and a comm stream reads, and their views.

Steps 1 to 5 of the journey of a gradient (docs/internals.md) write here, steps 6 and 7 read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from pipegrad.comm import sync_points
from pipegrad.plan.buckets import Bucket
from pipegrad.plan.routes import steps_taken

ALLOCATED = sync_points.Record("buffer.allocated", "fresh memory may be zeroed or in use still")
RESET_FREE = sync_points.Wait(
    "buffer.reset-free", "the last step may still be read on another stream"
)
RESET = sync_points.Record("buffer.reset", "what a producer writes must not be zeroed over")
ADOPT_FREE = sync_points.Wait(
    "buffer.adopt-free", "the memory may be zeroed, or read, on another stream still"
)
FILL_FREE = sync_points.Wait("buffer.fill-free", "the zeroing may still run on another stream")
WRITTEN = sync_points.Record(
    "buffer.written", "a collective must not read before the producer wrote"
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


class FlatBuffer:
    """A new flat tensor that any stream may write to, and the event for which writers must wait.

    A writer calls `acquire`, writes, and calls `written`. The reader waits for the events of all
    writers, reads, and calls `release`. All of these are on the current stream of their caller.
    """

    # One event is enough to protect the buffer: the last `release` comes after all earlier uses. So
    # a writer on any stream waits for this event, and no stream needs a list of the others.

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self._device = buffer.device
        self._home = sync_points.in_use.current(buffer.device)
        self._free = ALLOCATED(buffer.device)

    def acquire(self, site: sync_points.Wait) -> None:
        """Makes the current stream wait until the buffer may be written to."""
        site(self._free, self._device)

    def written(self, site: sync_points.Record) -> torch.Event | None:
        """Returns the event for which a reader must wait, recorded after a write."""
        return site(self._device)

    def release(self, site: sync_points.Record) -> None:
        """Makes the next writers wait for everything on the current stream until now."""
        self._free = site(self._device)

    def return_home(self, site: sync_points.Wait) -> None:
        """Makes the stream on which the buffer was allocated wait, like a writer."""
        # torch's allocator gives freed memory back to the stream of its allocation, without a wait
        # for the other streams that have used it.
        site(self._free, self._device, self._home)


@dataclass(frozen=True)
class GradientReady:
    """The record of a final gradient in its slot; see step 4 of the journey of a gradient.

    Attributes:
        key: The parameter.
        contributed: Whether this rank computed a gradient; otherwise the slot holds zeros.
        event: Recorded on the producer's stream right after the last write; None on CPU.
    """

    key: str
    contributed: bool
    event: torch.Event | None


class BucketBuffer:
    """The memory of one bucket, views of its slots, and a record of each gradient in it.

    The memory is flat, ``(numel,)`` of the wire dtype: first the slots, then a flag for each slot.
    Without SHARD or WHOLE it stays. With them it is made at the first write of a step, and goes
    when this rank's part was taken out of it; see [Note: shards]. The part goes with the last
    gradient that is in it.

    Args:
        bucket: The bucket.
        device: Of the memory.
        rank: This rank, which has one part after a reduction with SHARD or WHOLE.
        divisor: Each gradient is divided by this as it is filled, besides its own divisor.

    Attributes:
        bucket: The bucket.
        views: Key -> its slot. Empty while there is no memory.
        payload: The part of the slots that this rank has after the reductions so far.
        scatters_at: The number of this rank's first reduction with SHARD or WHOLE; None if there is
            none.
        is_taken: Whether the part of this step was taken out of the memory.
        on_making: Called right before memory is made that goes again.
    """

    def __init__(
        self, bucket: Bucket, device: torch.device, *, rank: int = 0, divisor: float = 1.0
    ) -> None:
        self.bucket = bucket
        self.views: dict[str, torch.Tensor] = {}
        self.is_taken = False
        self.on_making: Callable[[], object] | None = None
        taken = bucket.route[: steps_taken(bucket.route, rank)]
        self.scatters_at = next((i for i, h in enumerate(taken) if h.placement.scatters), None)
        # The element of the payload at which the part begins that is taken out.
        taken_to = None if self.scatters_at is None else self.scatters_at + 1
        self._part_start = 0 if taken_to is None else bucket.region(rank, taken_to).start
        self._device = device
        self._home = sync_points.in_use.current(device)  # where the present step has begun
        self._rank = rank
        self._divisor = divisor
        self._memory: FlatBuffer | None = None
        self._making = threading.Lock()  # threads of autograd may write first
        self._part: torch.Tensor | None = None  # until the gradients of this step have it
        self._slot_index = {slot.key: index for index, slot in enumerate(bucket.slots)}
        self._ready: dict[str, GradientReady] = {}
        self._undivided: dict[str, float] = {}
        self._was_zero: bool | None = None

    @property
    def keys(self) -> Sequence[str]:
        """The parameters, in the order of their slots."""
        return list(self._slot_index)

    @property
    def goes(self) -> bool:
        """Whether the memory goes in each step, when this rank's part was taken out of it."""
        return self.scatters_at is not None

    @property
    def buffer(self) -> torch.Tensor:
        """All slots and flags, flat."""
        return self._made().buffer

    def reset(self, keys: Sequence[str]) -> None:
        """Drops all records, and zeroes the slots of `keys`.

        Sync: writes on the current stream, after the last reader of the memory. Later writers wait
        for this.
        """
        # Step 1 of the journey of a gradient. The collective of the last step may still read on its
        # comm stream. Others write to the slots on streams that know nothing of this one, so an
        # event is recorded for them.
        self._ready.clear()
        self._undivided.clear()
        self.is_taken = False
        self._part = None  # after a failed step, nobody has taken it
        self._home = sync_points.in_use.current(self._device)
        if self.goes and self._memory is None and not keys:
            return
        memory = self._made()
        memory.acquire(RESET_FREE)
        if len(keys) == len(self.bucket.slots):
            memory.buffer.zero_()
        else:
            for key in keys:
                self.views[key].zero_()
        self._locate(memory.buffer)
        self._flags.fill_(1)
        memory.release(RESET)

    def adopt(self, key: str, gradient: torch.Tensor) -> torch.Tensor:
        """Copies the first gradient of a step into its slot; returns the slot.

        Sync: writes on the current stream, which must be the producer's.
        """
        slot = self.claim(key)
        write(slot, gradient)
        return slot

    def claim(self, key: str) -> torch.Tensor:
        """Returns a slot for a caller that overwrites it.

        Sync: the current stream may write then.
        """
        self._made().acquire(ADOPT_FREE)
        return self.views[key]

    def fill(
        self,
        key: str,
        gradient: torch.Tensor | None,
        *,
        contributed: bool,
        divisor: float = 1.0,
    ) -> bool:
        """Writes a gradient into its slot, unless it is there; returns whether the bucket is full.

        Args:
            key: The parameter.
            gradient: None if this rank has none; then the slot is zeroed.
            contributed: False if no write was seen. The flag is then computed from the slot.
            divisor: The gradient must be divided by this. It is, in the same pass. If it is in its
                slot already, `divide` does it.

        Sync: writes on the current stream, which must be the producer's. No write and no copy if
        `gradient` is already the slot's view.
        """
        # A kernel that writes to the address of a slot changes no version counter. So without a
        # known write, the device looks for values that are not zero, and the host need not wait.
        memory, divisor = self._made(), divisor * self._divisor
        slot = self.views[key]
        if gradient is not slot or not contributed:
            memory.acquire(FILL_FREE)
        if gradient is None:
            slot.zero_()
        elif gradient is not slot:
            write(slot, gradient, divisor)
        elif divisor != 1:
            self._undivided[key] = divisor
        if not contributed:
            flag = self._flags[self._slot_index[key]]
            flag.zero_() if gradient is None else flag.copy_(slot.any())
        # One event for each gradient: tied stages and autograd may write from different streams, so
        # no single event comes after all writes. A launch waits for all of them.
        self._ready[key] = GradientReady(key, contributed, memory.written(WRITTEN))
        return len(self._ready) == len(self.bucket.slots)

    def divide(self) -> None:
        """Divides the gradients that `fill` did not write; call it once, before any reduction.

        Sync: on the current stream, after all producers.
        """
        divisors = set(self._undivided.values())
        if len(divisors) == 1 and len(self._undivided) == len(self.bucket.slots):
            self.payload.div_(divisors.pop())
        else:
            for key, divisor in self._undivided.items():
                self.views[key].div_(divisor)
        self._undivided.clear()

    def end_reduction(self, step: int, divisor: int) -> None:
        """Notes that a reduction is done, and divides what this rank has then.

        Args:
            step: The number of the reduction.
            divisor: 1 if there is nothing to divide.

        Sync: on the current stream, a comm stream.
        """
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
            self._memory.return_home(GONE)
            self._memory, self.views = None, {}

    def end_step(self) -> None:
        """Ends a step, whose results are in place. A part belongs to the gradients in it now.

        Sync: the next writers wait for everything on the current stream until now.
        """
        if self._memory is not None:
            self._memory.release(RELEASED)
        if self._part is not None:
            self._part = None
            self._locate(self.nothing())

    def look_again(self) -> None:
        """Drops the result of `is_zero`: slots may have been written since."""
        self._was_zero = None

    def is_zero(self) -> bool:
        """Whether the bits of all slots are zero. The result is remembered until `look_again`.

        False does not prove a gradient: a zero may have a sign, and another slot may have old
        values.

        Sync: blocks the host.
        """
        # One read for the whole bucket, as integers of 64 bits, is much faster than one for each
        # slot in its dtype.
        if self._was_zero is None:
            payload = self.buffer[: self.bucket.payload_numel]
            nbytes = payload.numel() * payload.element_size()
            whole = payload.view(torch.int64) if nbytes and nbytes % 8 == 0 else payload
            self._was_zero = whole.dtype == torch.int64 and not bool(
                torch.stack(whole.aminmax()).any()
            )
        return self._was_zero

    @property
    def missing(self) -> list[str]:
        """The slots without a call of `fill` since `reset`."""
        return [key for key in self._slot_index if key not in self._ready]

    def producers(self) -> list[torch.Event]:
        """Returns the events that a launch must wait for."""
        # On CPU there are none: a task is submitted only after the writes of all threads.
        return [ready.event for ready in self._ready.values() if ready.event is not None]

    def anybody_contributed(self, key: str) -> bool:
        """Whether any rank contributed. Blocks the host only if this rank did not contribute."""
        if self._ready[key].contributed:
            return True
        return bool(self._flags[self._slot_index[key]].item())

    def shard(self, key: str, begin: int, end: int) -> torch.Tensor:
        """Returns the elements ``begin:end`` of a slot, flat, in the order of memory.

        They must be in this rank's shard, and the step may not have ended.
        """
        assert self._part is not None
        start = self.bucket.slots[self._slot_index[key]].offset - self._part_start
        return self._part[start + begin : start + end]

    def result(self, key: str) -> torch.Tensor:
        """Returns the slot of a gradient that this rank has whole, after all reductions.

        The step may not have ended.
        """
        if self._part is None:
            return self.views[key]
        slot = self.bucket.slots[self._slot_index[key]]
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
        return torch.empty(0, dtype=self.bucket.wire_dtype, device=self._device)

    def _locate(self, flat: torch.Tensor) -> None:
        """Uses the payload and the flags in `flat` from now on; there are none if it is empty."""
        end = max(len(flat) - len(self.bucket.slots), 0)
        self.payload, self._flags = flat[:end], flat[end:]

    def _made(self) -> FlatBuffer:
        """Returns the memory, which is made if there is none.

        Sync: zeroes the gaps between slots on the current stream, if it is made.
        """
        with self._making:
            if self._memory is None:
                if self.goes and self.on_making is not None:
                    self.on_making()
                bucket = self.bucket
                flat = torch.empty(bucket.numel, dtype=bucket.wire_dtype, device=self._device)
                # Nobody writes into the gaps, but handlers and hooks read all of the payload.
                ends = [(s.offset, s.offset + s.numel) for s in bucket.slots]
                for (_, end), (begin, _) in pairwise([*ends, (bucket.payload_numel, 0)]):
                    if end < begin:
                        flat[end:begin].zero_()
                self._locate(flat)
                self._flags.fill_(1)
                # Views share the version counter of their base, but `.data` has its own counter.
                # So it can be seen which slot was written.
                self.views = {
                    slot.key: flat.as_strided(slot.shape, slot.stride, slot.offset).data
                    for slot in bucket.slots
                }
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
