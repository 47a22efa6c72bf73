"""The memory of buckets: several streams write it, a comm stream reduces it.

Steps 1 to 4 of the journey of a gradient (docs/internals.md) write this memory, step 6 reduces it,
and step 7 reads the results. bucket.py handles the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pipegrad.comm import sync_points
from pipegrad.plan.buckets import Bucket
from pipegrad.plan.routes import steps_taken

ALLOCATED = sync_points.Record("buffer.allocated", "fresh memory may be zeroed or in use still")
RESET_FREE = sync_points.Wait(
    "buffer.reset-free", "the last step may still be read on another stream"
)
WRITTEN = sync_points.Record(
    "buffer.written", "a collective must not read before the producer wrote"
)
WROTE = sync_points.Record("buffer.wrote", "what another stream has written must be read")
GATHER = sync_points.Wait("buffer.gather", "gradients of other streams are sent from this one")
COPIED = sync_points.Record("buffer.copied", "a gradient that was copied is freed at once")
FREED = sync_points.Wait(
    "buffer.freed", "the stream that has made a gradient takes its memory again at once"
)
RELEASED = sync_points.Record(
    "buffer.released", "a later step must not overwrite what is being read"
)


class FlatBuffer:
    """A new flat tensor that any stream may write to, and the event for which writers must wait.

    A writer calls `acquire`, writes, and records an event. The reader waits for the events of all
    writers, reads, and calls `release`. All of these are on the current stream of their caller.
    """

    # One event is enough to protect the buffer, because the last `release` comes after all earlier
    # uses. A writer on any stream waits for this event, and no stream needs a list of the others.

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.device = buffer.device
        self._free = ALLOCATED(buffer.device)

    def acquire(self, site: sync_points.Wait) -> None:
        """Makes the current stream wait until the buffer may be written to."""
        site(self._free, self.device)

    def release(self, site: sync_points.Record) -> None:
        """Makes the next writers wait for everything on the current stream until now."""
        self._free = site(self.device)


class BucketMemory(FlatBuffer):
    """The memory of one bucket: a slot for each gradient, and a flag for each slot.

    The reduced memory is flat, ``(numel,)`` of the wire dtype: first the slots, then the flags. If
    gradients have another dtype, their slots are separate memory, which is copied there and back.
    The memory stays.

    Args:
        bucket: The bucket.
        device: Device of the memory.
        rank: This rank, which has one part after a reduction with SHARD or WHOLE.
        mean: Gradients are divided by this for the means of their reductions.

    Attributes:
        bucket: The bucket.
        rank: This rank.
        slots: Views, in the order of the bucket. Each has a separate version, which grows with each
            write into it, but not with a write by an address or by this class.
        reduced: The part of the slots that this rank has after all reductions; see [Note: shards].
        is_apart: Whether gradients have separate memory.
        event: A launch must wait for it, if there is one, because all slots are written then.
    """

    def __init__(
        self, bucket: Bucket, device: torch.device, *, rank: int = 0, mean: int = 1
    ) -> None:
        self.bucket = bucket
        self.is_apart = bucket.dtype != bucket.wire_dtype
        self.rank = rank
        self._mean = mean
        self._divisor = 1.0
        # None on CPU, because a task is submitted only after the writes of all threads.
        self.event: torch.Event | None = None
        # Streams that wrote into slots: the keys, in their order.
        self._streams: dict[torch.Stream, None] = {}
        flat = torch.zeros(bucket.numel, dtype=bucket.wire_dtype, device=device)
        self._payload, self._flags = flat[: bucket.payload_numel], flat[bucket.payload_numel :]
        self._gradients = self._payload
        if self.is_apart:
            self._gradients = torch.zeros(bucket.payload_numel, dtype=bucket.dtype, device=device)
        super().__init__(flat)  # after both, because its event stands for all memory
        # `.data`, because it has a separate version counter: each slot counts its own writes, and
        # no writes of comm streams.
        self.slots = [
            self._gradients.as_strided(slot.shape, slot.stride, slot.offset).data
            for slot in bucket.slots
        ]
        num_taken = steps_taken(bucket.route, rank)
        self._region = bucket.region(rank, num_taken)
        reduced = self.part(num_taken)
        self.reduced, self._contributed = reduced[: len(self._region)], reduced[len(self._region) :]

    def reset(self, *, continuing: bool = False) -> None:
        """Begins a step: zeroes all slots, unless it continues accumulated steps.

        Sync: writes on the current stream, after the last reader of the memory. Writers must wait
        for it.
        """
        # Step 1 of the journey of a gradient. Wait, because the collective of the last step may
        # still read on its comm stream.
        self._streams.clear()
        self.acquire(RESET_FREE)
        if not continuing:
            self._gradients.zero_()
        self._flags.fill_(1)

    def scale(self, factor: float) -> None:
        """Multiplies the accumulated gradients. Sync: as `reset`."""
        self._gradients.mul_(factor)

    def add_stream(self) -> None:
        """Adds the current stream to the streams that wrote slots."""
        # The event comes when the bucket is complete: one for all gradients of the stream.
        if (stream := sync_points.in_use.current(self.device)) is not None:
            self._streams[stream] = None

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Orders the writes inside after all streams that wrote.

        Sync: the current stream waits for them, and they wait for it, because copied gradients may
        be freed.
        """
        current = sync_points.in_use.current(self.device) if self._streams else None
        others = [stream for stream in self._streams if stream != current]
        # One wait for each stream, not for each gradient, because an event covers all earlier work
        # of a stream.
        for stream in others:
            GATHER(WROTE(self.device, stream), self.device)
        yield
        if others:
            copied = COPIED(self.device)
            for stream in others:
                FREED(copied, self.device, stream)

    def copy(self, gradients: Sequence[torch.Tensor], slots: Sequence[int]) -> None:
        """Copies gradients that are elsewhere into their slots, inside of `gathering`.

        Sync: writes on the current stream.
        """
        into = [self.slots[number] for number in slots]
        with torch.no_grad():
            torch._foreach_copy_(into, [gradient.to_dense() for gradient in gradients])

    def lack(self, slots: Sequence[int]) -> None:
        """Sets the flags of slots that seem not to be written: 0 if all values of a slot are 0.

        It looks at values, because a kernel may write to an address, which no counter shows.

        Sync: as `copy`, after it. The host does not wait.
        """
        for number in slots:
            self._flags[number].copy_(self.slots[number].any())

    def zero(self) -> None:
        """Zeroes all slots and flags, because no gradient of a failed step may be sent."""
        self._gradients.zero_()
        self.buffer.zero_()

    def complete(self, divisor: float) -> None:
        """Ends the writes of a step: the bucket may leave.

        Sync: the current stream must be after all writes.
        """
        # One event for the whole bucket, because the caller has made the current stream wait for
        # all other streams that wrote.
        self._divisor = divisor * self._mean
        if self.is_apart:
            _copy_divided(self._payload, self._gradients, self._divisor)
            self._divisor = 1.0
        if not self.bucket.route:
            self.divide()
        self.event = WRITTEN(self.device)

    def divide(self) -> None:
        """Divides the gradients; call it once, before any reduction.

        Sync: on the current stream, after all producers.
        """
        if self._divisor != 1:
            self._payload.div_(self._divisor)

    def end_step(self) -> None:
        """Ends the reductions of a step: this rank's results are in the slots.

        Sync: on the current stream, after all reductions.
        """
        if self.is_apart:
            self._gradients[self._region.start : self._region.stop].copy_(self.reduced)

    def contributed(self) -> list[bool]:
        """Returns a bool for each slot: True if any rank has a gradient. Blocks the host."""
        return [flag != 0 for flag in self._contributed.tolist()]

    def shard(self, number: int, begin: int, end: int) -> torch.Tensor:
        """Returns the elements ``begin:end`` of a slot, flat, in the order of memory, as reduced.

        They must be in this rank's shard.
        """
        offset = self.bucket.slots[number].offset
        return self._payload[offset + begin : offset + end].data

    def result(self, number: int) -> torch.Tensor:
        """Returns a gradient that this rank has whole, in the wire dtype if ranks share it out."""
        if not any(step.placement.scatters for step in self.bucket.route):
            return self.slots[number]
        slot = self.bucket.slots[number]
        return self._payload.as_strided(slot.shape, slot.stride, slot.offset).data

    def part(self, num_steps: int) -> torch.Tensor:
        """Returns this rank's part after `num_steps` reductions: payload and flags, flat."""
        region = self.bucket.region(self.rank, num_steps)
        return self.buffer[region.start : region.stop + len(self.bucket.slots)]


def _copy_divided(payload: torch.Tensor, gradients: torch.Tensor, divisor: float) -> None:
    """Copies gradients to the wire. They are divided in the wider of the two dtypes."""
    # One pass if the gradients are wider. A division in the narrower dtype would round once more.
    if divisor != 1 and torch.promote_types(gradients.dtype, payload.dtype) == gradients.dtype:
        torch.div(gradients, divisor, out=payload)
        return
    payload.copy_(gradients)
    if divisor != 1:
        payload.div_(divisor)
