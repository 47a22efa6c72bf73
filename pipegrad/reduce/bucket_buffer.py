"""Buffers that several streams write and a comm stream reads, and the record of each gradient."""

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
    """A flat tensor, just made, that any stream may write to: it knows what for they must wait.

    Writers call `acquire`, write, and call `written`; its reader waits for the events of all of
    them and calls `release`. All three are about the stream that is current, whichever it is.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self._device = buffer.device
        self._home = sync_points.in_use.current(buffer.device)
        self._free = ALLOCATED(buffer.device)

    def acquire(self, site: sync_points.Wait) -> None:
        """Makes the current stream wait until the buffer may be written to."""
        site(self._free, self._device)

    def written(self, site: sync_points.Record) -> torch.Event | None:
        """Returns what a reader must wait for: a producer has written on the current stream."""
        return site(self._device)

    def release(self, site: sync_points.Record) -> None:
        """Says that the next writers must wait for what the current stream has done until now."""
        self._free = site(self._device)

    def return_home(self, site: sync_points.Wait) -> None:
        """Makes the stream that it was made on wait likewise: when freed, the memory is its own."""
        site(self._free, self._device, self._home)


@dataclass(frozen=True)
class GradientReady:
    """One gradient is in its slot: whatever its fate, this is how the launch learns of it.

    Attributes:
        key: The parameter.
        contributed: Whether this rank computed a gradient, or only zeros travel.
        event: Recorded on the producer's stream right after the last write; None on CPU.
    """

    key: str
    contributed: bool
    event: torch.Event | None


class BucketBuffer(FlatBuffer):
    """The flat buffer of one bucket, views of its slots, and what has been written into it.

    Allocated once and kept: ``(numel,)`` of the wire dtype, slots first, then one flag a slot.
    As a route cuts it, the flags move: see [Note: shards].
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        super().__init__(torch.empty(bucket.numel, dtype=bucket.wire_dtype, device=device))
        self.bucket = bucket
        # .data gives each view a version counter of its own, which tells who was written to.
        self.views = {slot.key: self._view(slot).data for slot in bucket.slots}
        self._flag_index = {slot.key: index for index, slot in enumerate(bucket.slots)}
        self._flags = self.buffer[bucket.payload_numel :]  # where they are now
        self._ready: dict[str, GradientReady] = {}
        self._was_zero: bool | None = None
        self._is_fresh = True  # it takes no memory on a CPU before it is written to

    def reset(self, keys: Sequence[str]) -> None:
        """Zeroes the slots of `keys` and forgets who has contributed.

        Sync: writes on the current stream, behind the last reader of the buffer; what is recorded
        then orders every later writer behind it.
        """
        self.acquire(RESET_FREE)
        if self._is_fresh or len(keys) == len(self.views):
            self.buffer.zero_()
            self._is_fresh = False
        else:
            for key in keys:
                self.views[key].zero_()
        self._flags = self.buffer[self.bucket.payload_numel :]
        self._flags.fill_(1)
        self._ready.clear()
        self.release(RESET)

    def fill(self, key: str, gradient: torch.Tensor | None, *, contributed: bool) -> bool:
        """Brings one gradient into its slot; returns True when the bucket is complete.

        Where nobody is known to have contributed, the slot itself is looked at, on the device: what
        a kernel wrote by its address moves no version counter.

        Sync: writes on the current stream, which is taken for the producer's. No write, and no
        copy, if `gradient` already is the slot's view.
        """
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
        self._ready[key] = GradientReady(key, contributed, self.written(WRITTEN))
        return len(self._ready) == len(self.views)

    def look_again(self) -> None:
        """Forgets what `is_zero` has found: somebody may have written since."""
        self._was_zero = None

    def is_zero(self) -> bool:
        """Whether all slots are known to be zero: one read for all, until `look_again`.

        False may be wrong, where a zero has a sign, or somebody else's slot has old values.

        Sync: blocks the host.
        """
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
        """The slots that nothing was brought into since `reset`."""
        return [key for key in self.views if key not in self._ready]

    def producers(self) -> list[torch.Event]:
        """Returns the events that a launch must wait for."""
        return [ready.event for ready in self._ready.values() if ready.event is not None]

    def anybody_contributed(self, key: str) -> bool:
        """Whether any rank did. Blocks the host only where this rank itself did not."""
        if self._ready[key].contributed:
            return True
        return bool(self._flags[self._flag_index[key]].item())

    def shard(self, key: str, begin: int, end: int) -> torch.Tensor:
        """Returns elements of a slot, flat, as they lie in memory."""
        offset = self.views[key].storage_offset()
        return self.buffer[offset + begin : offset + end]

    def part(self, rank: int, num_steps: int) -> torch.Tensor:
        """Returns what `rank` has left after so many reductions: payload and flags, flat."""
        region = self.bucket.region(rank, num_steps)
        return self.buffer[region.start : region.stop + len(self.views)]

    def cut(self, rank: int, num_steps: int) -> torch.Tensor:
        """Goes on with that part alone, and with the flags in it; returns it."""
        part = self.part(rank, num_steps)
        self._flags = part[len(part) - len(self.views) :]
        return part

    def _view(self, slot: Slot) -> torch.Tensor:
        return self.buffer.as_strided(slot.shape, slot.stride, slot.offset)
