"""Launch and finish: one way for each bucket onto its lane, and one wait for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial

import torch
from torch.profiler import record_function

from pipegrad.agreement import FailureNotice
from pipegrad.errors import PlanError, ReduceError
from pipegrad.gradients import order
from pipegrad.gradients.bucket import Plan
from pipegrad.gradients.buffer import BucketBuffer
from pipegrad.gradients.groups import Groups
from pipegrad.gradients.lane import Lane
from pipegrad.gradients.route import RouteHop
from pipegrad.handler import GradientHandler, Placement

_POLL_SECONDS = 0.2

COLLECTIVE = order.WaitWork("reduce.collective", "the mean and the next hop read what it writes")


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
            with record_function(f"pipegrad bucket {buffer.bucket.index} {hop}"):
                COLLECTIVE(self._handlers[hop.handler].launch(buffer, hop, group))
            if hop.op == "mean":
                buffer.buffer.div_(len(hop.ranks))
        except Exception as error:
            message = (
                f"bucket {buffer.bucket.index} ({buffer.bucket.names}): {hop} over ranks "
                f"{list(hop.ranks)} by handler {hop.handler!r} failed: {error}"
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
