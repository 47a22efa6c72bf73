"""Flat buffers that several streams write and a comm stream reads, and their views.

Steps 1 to 5 of the journey of a gradient (docs/internals.md) write here, steps 6 and 7 read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipegrad.comm import sync_points
from pipegrad.plan.buckets import Bucket, Slot

ALLOCATED = sync_points.Record("buffer.allocated", "fresh memory may be zeroed or in use still")
RESET_FREE = sync_points.Wait(
    "buffer.reset-free", "the last step may still be read on another stream"
)
RESET = sync_points.Record("buffer.reset", "what a producer writes must not be zeroed over")
FILL_FREE = sync_points.Wait("buffer.fill-free", "the zeroing may still run on another stream")
WRITTEN = sync_points.Record(
    "buffer.written", "a collective must not read before the producer wrote"
)
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


class BucketBuffer(FlatBuffer):
    """The flat buffer of one bucket, views of its slots, and a record of each gradient in it.

    It is allocated once: ``(numel,)`` of the wire dtype, first the slots, then a flag for each
    slot. A reduction with SHARD moves the flags; see [Note: shards].

    Attributes:
        payload: The part of the slots that this rank has after the reductions so far.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        super().__init__(torch.empty(bucket.numel, dtype=bucket.wire_dtype, device=device))
        self.bucket = bucket
        # Views share the version counter of their base, but `.data` has its own counter. So it can
        # be seen which slot was written.
        self.views = {slot.key: self._view(slot).data for slot in bucket.slots}
        self._flag_index = {slot.key: index for index, slot in enumerate(bucket.slots)}
        self.payload = self.buffer[: bucket.payload_numel]  # reductions with SHARD cut it
        self._flags = self.buffer[bucket.payload_numel :]  # and move the flags
        self._ready: dict[str, GradientReady] = {}
        self._was_zero: bool | None = None
        self._is_fresh = True  # never written: on a CPU it takes no memory yet

    def reset(self, keys: Sequence[str]) -> None:
        """Zeroes the slots of `keys`, and drops all records.

        Sync: writes on the current stream, after the last reader of the buffer. Later writers wait
        for this.
        """
        # Step 1 of the journey of a gradient. The collective of the last step may still read on its
        # comm stream. Autograd adds to the slots on streams that know nothing of this one, so an
        # event is recorded for them.
        self.acquire(RESET_FREE)
        if self._is_fresh or len(keys) == len(self.views):
            self.buffer.zero_()
            self._is_fresh = False
        else:
            for key in keys:
                self.views[key].zero_()
        self.payload = self.buffer[: self.bucket.payload_numel]
        self._flags = self.buffer[self.bucket.payload_numel :]
        self._flags.fill_(1)
        self._ready.clear()
        self.release(RESET)

    def fill(self, key: str, gradient: torch.Tensor | None, *, contributed: bool) -> bool:
        """Copies a gradient into its slot, unless it is there; returns whether the bucket is full.

        Args:
            key: The parameter.
            gradient: None if this rank has none; then the slot is zeroed.
            contributed: False if no write was seen. The flag is then computed from the slot.

        Sync: writes on the current stream, which must be the producer's. No write and no copy if
        `gradient` is already the slot's view.
        """
        # A kernel that writes to the address of a slot changes no version counter. So without a
        # known write, the device looks for values that are not zero, and the host need not wait.
        view = self.views[key]
        if gradient is not view or not contributed:
            self.acquire(FILL_FREE)
        if gradient is None:
            view.zero_()
        elif gradient is not view:
            view.copy_((gradient.to_dense() if gradient.is_sparse else gradient).detach())
        if not contributed:
            flag = self._flags[self._flag_index[key]]
            flag.zero_() if gradient is None else flag.copy_(view.any())
        # One event for each gradient: tied stages and autograd may write from different streams, so
        # no single event comes after all writes. A launch waits for all of them.
        self._ready[key] = GradientReady(key, contributed, self.written(WRITTEN))
        return len(self._ready) == len(self.views)

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
        return [key for key in self.views if key not in self._ready]

    def producers(self) -> list[torch.Event]:
        """Returns the events that a launch must wait for."""
        # On CPU there are none: a task is submitted only after the writes of all threads.
        return [ready.event for ready in self._ready.values() if ready.event is not None]

    def anybody_contributed(self, key: str) -> bool:
        """Whether any rank contributed. Blocks the host only if this rank did not contribute."""
        if self._ready[key].contributed:
            return True
        return bool(self._flags[self._flag_index[key]].item())

    def shard(self, key: str, begin: int, end: int) -> torch.Tensor:
        """Returns the elements ``begin:end`` of a slot, flat, in the order of memory."""
        offset = self.views[key].storage_offset()
        return self.buffer[offset + begin : offset + end]

    def part(self, rank: int, num_steps: int) -> torch.Tensor:
        """Returns the part of `rank` after `num_steps` reductions: payload and flags, flat."""
        region = self.bucket.region(rank, num_steps)
        return self.buffer[region.start : region.stop + len(self.views)]

    def cut(self, rank: int, num_steps: int) -> torch.Tensor:
        """Returns the same part, and uses the payload and the flags in it from now on."""
        part = self.part(rank, num_steps)
        self.payload = part[: len(part) - len(self.views)]
        self._flags = part[len(part) - len(self.views) :]
        return part

    def _view(self, slot: Slot) -> torch.Tensor:
        return self.buffer.as_strided(slot.shape, slot.stride, slot.offset)
