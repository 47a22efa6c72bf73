"""Launch and finish: one record for each gradient, one way for each bucket onto its lane."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pipegrad.agreement import FailureNotice
from pipegrad.errors import PlanError, ReduceError
from pipegrad.gradients.bucket import Bucket, Plan, Slot
from pipegrad.gradients.groups import Groups
from pipegrad.gradients.lane import Lane, record_event, wait_event
from pipegrad.gradients.route import RouteHop
from pipegrad.handler import GradientHandler, Placement

_POLL_SECONDS = 0.2


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


class BucketBuffer:
    """The flat buffer of one bucket, views of its slots, and what has been written into it.

    Allocated once and kept: ``(numel,)`` of the wire dtype, slots first, then one flag a slot.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        self.buffer = torch.zeros(bucket.numel, dtype=bucket.wire_dtype, device=device)
        self._device = device
        # .data gives each view a version counter of its own, which tells who was written to.
        self.views = {slot.key: self._view(slot).data for slot in bucket.slots}
        self._flag_index = {s.key: bucket.payload_numel + i for i, s in enumerate(bucket.slots)}
        self._released: torch.Event | None = None
        self._ready: dict[str, GradientReady] = {}

    def reset(self, keys: Sequence[str]) -> None:
        """Zeroes the slots of `keys` and forgets who has contributed.

        Sync: writes on the current stream, behind the last reader of the buffer; what is recorded
        then orders every later writer behind it.
        """
        wait_event(self._released, self._device)
        if len(keys) == len(self.views):
            self.buffer.zero_()
        else:
            for key in keys:
                self.views[key].zero_()
        self.buffer[self.bucket.payload_numel :].fill_(1)
        self._ready.clear()
        self._released = record_event(self._device)

    def fill(self, key: str, gradient: torch.Tensor | None, *, contributed: bool) -> bool:
        """Brings one gradient into its slot; returns True when the bucket is complete.

        Sync: writes on the current stream, which is taken for the producer's. No write, and no
        copy, if `gradient` already is the slot's view.
        """
        view = self.views[key]
        if gradient is not view:
            wait_event(self._released, self._device)
            if gradient is None:
                view.zero_()
            else:
                view.copy_((gradient.to_dense() if gradient.is_sparse else gradient).detach())
        if not contributed:
            self.buffer[self._flag_index[key]].zero_()
        self._ready[key] = GradientReady(key, contributed, record_event(self._device))
        return len(self._ready) == len(self.views)

    def producers(self) -> list[torch.Event]:
        """Returns the events that a launch must wait for."""
        return [ready.event for ready in self._ready.values() if ready.event is not None]

    def anybody_contributed(self, key: str) -> bool:
        """Whether any rank did. Blocks the host only where this rank itself did not."""
        if self._ready[key].contributed:
            return True
        return bool(self.buffer[self._flag_index[key]].item())

    def release(self) -> None:
        """Marks the end of the last read on the current stream: the next writer waits for it."""
        self._released = record_event(self._device)

    def _view(self, slot: Slot) -> torch.Tensor:
        return self.buffer.as_strided(slot.shape, slot.stride, slot.offset)


class Reducer:
    """Takes gradients as they become final and launches collectives in the planned order.

    Args:
        plan: This rank's buckets and collectives.
        lanes: How many lanes.
        groups: The communicators.
        handlers: Handler by name.
        notice: Where a failure is told to the other ranks, and theirs are read.
        device: Where gradients live.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        lanes: int,
        groups: Groups,
        handlers: Mapping[str, GradientHandler],
        notice: FailureNotice,
        device: torch.device,
    ) -> None:
        self.buffers = {bucket.index: BucketBuffer(bucket, device) for bucket in plan.buckets}
        self.buffer_of = {s.key: self.buffers[b.index] for b in plan.buckets for s in b.slots}
        self._queues = [[x for x in plan.launches if x.lane == lane] for lane in range(lanes)]
        threaded = groups.block_host(device)
        self._lanes = [
            Lane(f"pipegrad lane {lane}", device, threaded=threaded) for lane in range(lanes)
        ]
        self._groups = groups
        self._handlers = handlers
        self._notice = notice
        self._lock = threading.Lock()
        self._complete: set[int] = set()
        self._next = [0] * lanes
        self.num_launched = 0

    def begin(self) -> None:
        """Starts a step: nothing is complete, nothing launched."""
        self._complete.clear()
        self._next = [0] * len(self._lanes)
        self.num_launched = 0

    def announce(self, key: str, gradient: torch.Tensor | None, *, contributed: bool) -> None:
        """Takes a final gradient, and launches whatever is due because of it.

        Sync: the slot is written and its event recorded on the current stream; collectives run on
        the lanes. May be called from autograd's threads.
        """
        with self._lock:
            buffer = self.buffer_of[key]
            if buffer.fill(key, gradient, contributed=contributed):
                self._complete.add(buffer.bucket.index)
                for lane in range(len(self._lanes)):
                    self._launch_due(lane)

    def _launch_due(self, lane: int) -> None:
        """Submits a lane's next collectives, in order, as far as their buckets are complete."""
        queue = self._queues[lane]
        while self._next[lane] < len(queue) and queue[self._next[lane]].bucket in self._complete:
            launch = queue[self._next[lane]]
            buffer = self.buffers[launch.bucket]
            task = partial(self._reduce, buffer, buffer.bucket.route[launch.hop], lane)
            self._next[lane] += 1
            self.num_launched += 1
            self._lanes[lane].submit(task, buffer.producers())

    def _reduce(self, buffer: BucketBuffer, hop: RouteHop, lane: int) -> None:
        """Runs one collective. On a lane."""
        try:
            group = self._groups.of(hop.ranks, lane)
            self._handlers[hop.handler].launch(buffer, hop, group).wait()
            if hop.op == "mean":
                buffer.buffer.div_(len(hop.ranks))
        except Exception as error:
            first = buffer.bucket.slots[0].key
            message = (
                f"bucket {buffer.bucket.index} ({first} and {len(buffer.bucket.slots) - 1} more): "
                f"{hop} over ranks {list(hop.ranks)} by handler {hop.handler!r} failed: {error}"
            )
            raise ReduceError(self._notice.post(message)) from error

    def close(self) -> None:
        """Ends the lanes' threads."""
        for lane in self._lanes:
            lane.close()

    def wait(self) -> float:
        """Waits for all that was launched; returns the seconds the host was blocked.

        Sync: afterwards the current stream may read every buffer.

        Raises:
            ReduceError: If a collective failed here, or a peer said that it failed.
        """
        start = time.perf_counter()
        for lane in self._lanes:
            while not lane.wait(_POLL_SECONDS):
                self._raise_peer_failure()
        return time.perf_counter() - start

    def _raise_peer_failure(self) -> None:
        message = self._notice.read()
        if message is not None:
            raise ReduceError(
                f"a step failed on another rank, so its collectives never end: {message}"
            )


def check_executable(plan: Plan) -> None:
    """Refuses a plan with placements that a `Reducer` cannot run."""
    for key, route in plan.routes:
        for hop in route:
            if hop.placement is not Placement.REPLICATE:
                raise PlanError(
                    f"handler {hop.handler!r} places {key!r} by {hop.placement.name}: this can be "
                    f"planned, but only REPLICATE can be run yet"
                )
