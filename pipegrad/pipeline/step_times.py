"""StepTimes: how long the computes of a rank take, and the transfers between neighbours.

[Note: times of a step] Clocks of two ranks differ, and no clock is read on both ends of a message.
Still a hop can be measured without a message of its own. Rank s sends a value at t1, and rank s+1
has it at t2. Rank s+1 sends the gradient back at t3, and rank s has it at t4. What both transfers
took is::

    (t4 - t1) - (t3 - t2)

Each bracket has times of one clock. So rank s adds its own to a number that all ranks sum anyway,
beside the loss, and rank s+1 subtracts its own. A message that waits, for the one before it or for
a rank that still computes, makes the difference larger, but nothing makes it smaller. So a hop
takes what the smallest difference of the first microbatches says: rank s+1 is idle before the
first of them, and rank s before its gradient.

Where the device has streams, times are those of events on the current stream, and the host waits
for the device at the end of a step.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch

from pipegrad.comm import sync_points
from pipegrad.pipeline.compute import Method
from pipegrad.schedules.measured import Times
from pipegrad.schedules.program.program import Channel, Item, Op, Program
from pipegrad.schedules.schedule import Kind
from pipegrad.topology import Topology

_SAMPLES = 3  # microbatches that measure hops
_Stamp = float | torch.Event
_FORWARD, _BACKWARD, _WEIGHTS = _ROWS = 0, 1, 2  # of a rank's computes; W is a part of a backward


class StepTimes:
    """Watches the items of one rank.

    Args:
        program: What all ranks do.
        topology: As this rank sees it.
        device: Where the rank computes.

    Attributes:
        layout: Where its numbers stand among those of all ranks.
    """

    def __init__(self, program: Program, topology: Topology, device: torch.device) -> None:
        self._channels = program.channels
        self._program = program
        self._rank = topology.coordinate(topology.pipeline)
        self.layout = Layout(topology, program.schedule.num_microbatches)
        self._device = device
        self.begin()

    def begin(self) -> None:
        """Forgets what was seen; called when a step begins."""
        self._computes = defaultdict[tuple[int, Kind], list[tuple[_Stamp, _Stamp]]](list)
        # By the direction in which a transfer goes, whether this rank sends it, and microbatch.
        self._transfers: dict[tuple[str, bool, int], _Stamp] = {}

    def watched(self, item: Item, method: Method) -> Method:
        """Returns the method of an item, watched if it says something of time."""
        if item.op is Op.COMPUTE:
            stage, kind, _ = self._program.action(item)
            return partial(self._compute, method, (stage, kind))
        if item.microbatch < self.layout.num_samples:
            if item.op is Op.SEND and self._is_neighbour(self._channels[item.which]):
                return partial(self._send, method)
            if item.op is Op.WAIT_RECEIVE and self._is_neighbour(self._channels[item.which]):
                return partial(self._receive, method)
        return method

    def _is_neighbour(self, channel: Channel) -> bool:
        return channel.target - channel.source == (1 if channel.kind == "F" else -1)

    def _compute(
        self, method: Method, action: tuple[int, Kind], which: int, microbatch: int
    ) -> None:
        begin = self._now()
        method(which, microbatch)
        self._computes[action].append((begin, self._now()))

    def _send(self, method: Method, which: int, microbatch: int) -> None:
        # Several values may go to the neighbour. They take from the first send to the last arrival.
        self._transfers.setdefault((self._channels[which].kind, True, microbatch), self._now())
        method(which, microbatch)

    def _receive(self, method: Method, which: int, microbatch: int) -> None:
        method(which, microbatch)
        self._transfers[self._channels[which].kind, False, microbatch] = self._now()

    def _now(self) -> _Stamp:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = sync_points.timing_event(self._device)
        sync_points.record_time(event, self._device)
        return event

    def numbers(self) -> list[float]:
        """Returns what this rank adds to the numbers of all ranks; see `Layout`.

        Sync: the host waits for the device.
        """
        sync_points.finish_device(self._device)
        layout, numbers = self.layout, [0.0] * self.layout.size
        for (_, kind), stamps in self._computes.items():
            row = _FORWARD if kind == "F" else _BACKWARD
            median = statistics.median(_seconds(begin, end) for begin, end in stamps)
            numbers[layout.compute(row, self._rank)] += median
            if kind == "W":
                numbers[layout.compute(_WEIGHTS, self._rank)] += median
        marks = self._transfers
        for microbatch in range(layout.num_samples):
            out, back = ("F", True, microbatch), ("B", False, microbatch)
            if out in marks and back in marks:  # t1 and t4
                seconds = _seconds(marks[out], marks[back])
                numbers[layout.hop(microbatch, self._rank)] = seconds
            out, back = ("F", False, microbatch), ("B", True, microbatch)
            if out in marks and back in marks:  # t2 and t3
                seconds = _seconds(marks[out], marks[back])
                numbers[layout.hop(microbatch, self._rank - 1)] = -seconds
        return numbers


class Layout:
    """Where the times of each rank stand among the numbers that all ranks sum.

    Args:
        topology: As this rank sees it.
        num_microbatches: Of a step.

    Attributes:
        num_samples: Microbatches that measure hops.
        size: How many numbers there are.
    """

    def __init__(self, topology: Topology, num_microbatches: int) -> None:
        pipelines = topology.pipelines
        self._num_pipelines = len(pipelines)
        self._num_ranks = topology.size(topology.pipeline)
        self.num_samples = min(_SAMPLES, num_microbatches)
        self._of_pipeline = len(_ROWS) * self._num_ranks + self.num_samples * (self._num_ranks - 1)
        self.size = self._num_pipelines * self._of_pipeline
        own = topology.ranks_along(topology.pipeline)
        self._begin = pipelines.index(own) * self._of_pipeline

    def compute(self, row: int, rank: int) -> int:
        """Returns where a rank of this pipeline has its forwards, backwards or W."""
        return self._begin + row * self._num_ranks + rank

    def hop(self, microbatch: int, hop: int) -> int:
        """Returns where a hop of this pipeline has a microbatch."""
        hops = self._begin + len(_ROWS) * self._num_ranks
        return hops + microbatch * (self._num_ranks - 1) + hop

    def times(self, numbers: Sequence[float]) -> Times:
        """Returns what the sums of all ranks say, the same on every rank."""
        size, hops = self._num_ranks, self._num_ranks - 1
        pipelines = list[list[Sequence[float]]]()
        for begin in range(0, self.size, self._of_pipeline):
            own = numbers[begin : begin + self._of_pipeline]
            computes = [own[row * size : (row + 1) * size] for row in _ROWS]
            both_ways = own[len(_ROWS) * size :]
            # A clock that is read twice at once may go backwards by a rounding error.
            hop_seconds = [max(0.0, min(both_ways[hop::hops]) / 2) for hop in range(hops)]
            pipelines.append([*computes, hop_seconds])
        forwards, backwards, weights, slowest_hops = (
            tuple(map(max, zip(*column, strict=True))) for column in zip(*pipelines, strict=True)
        )
        return Times(forwards, backwards, slowest_hops, weights)


def _seconds(begin: _Stamp, end: _Stamp) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin
    return float(begin.elapsed_time(end)) / 1e3
