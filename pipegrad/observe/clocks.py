"""Clocks: how far the clocks of ranks are apart, by messages there and back.

Ranks of one machine share `time.perf_counter`. Others do not, and their clocks drift. The first
rank of a pipeline answers each other rank with its time. The answer was made between the question
and its arrival, so the fastest of some round trips bounds the error by half of its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipegrad.comm import sync_points
from pipegrad.pipeline.edges import Edges

_PINGS = 32
ANSWERED = sync_points.WaitWork("clocks.answered", "a time is read that is still arriving")

Ping = Callable[[], float]  # asks the first rank; returns its time


class Reading(NamedTuple):
    """What a rank found at one time.

    Attributes:
        seconds: By its own clock.
        offset: What to add to its clock to have that of the first rank.
        error: The offset is wrong by at most so much.
        machine: Ranks with the same one share a clock; "" if that is not known.
    """

    seconds: float
    offset: float = 0.0
    error: float = 0.0
    machine: str = ""


class Clock(NamedTuple):
    """The clock of one rank, from a reading before a run to one after it."""

    before: Reading
    after: Reading

    def aligned(self, seconds: float) -> float:
        """Returns a time of this clock by the clock of the first rank; the drift is even."""
        (begin, first, *_), (end, last, *_) = self
        share = (seconds - begin) / (end - begin) if end > begin else 1.0
        return seconds + first + (last - first) * share


def clocks_of(before: Sequence[Reading], after: Sequence[Reading]) -> tuple[Clock, ...]:
    """Returns the clock of each rank, of the readings of all ranks."""
    return tuple(
        Clock(
            *(
                _shared(reading, of_all[0])
                for reading, of_all in zip(pair, (before, after), strict=True)
            )
        )
        for pair in zip(before, after, strict=True)
    )


def _shared(reading: Reading, first: Reading) -> Reading:
    """Returns a reading without an offset, if the rank shares the clock of the first rank."""
    # A container may have a clock of its own. Then the offset is larger than its error.
    is_shared = reading.machine == first.machine != "" and abs(reading.offset) <= reading.error
    return reading._replace(offset=0.0, error=0.0) if is_shared else reading


def read_clock(edges: Edges, rank: int, num_ranks: int) -> Reading:
    """Returns how far this rank's clock is from that of the first rank of its pipeline.

    All ranks of the pipeline call it, between steps.

    Args:
        edges: The communicators of the pipeline.
        rank: The pipeline rank.
        num_ranks: Of the pipeline.
    """
    machine = machine_name()
    if rank == 0:
        for peer in range(1, num_ranks):
            group, peer_there = edges.host(peer)
            for _ in range(_PINGS):
                _receive(group, peer_there)
                _send(group, peer_there, time.perf_counter())
        return Reading(time.perf_counter(), machine=machine)
    group, first = edges.host(0)

    def ping() -> float:
        _send(group, first, 0.0)
        return _receive(group, first)

    return fastest(ping, machine)


def fastest(ping: Ping, machine: str) -> Reading:
    """Returns the reading of the fastest of some round trips."""
    best = Reading(0.0, 0.0, float("inf"))
    for _ in range(_PINGS):
        asked = time.perf_counter()
        answer = ping()
        answered = time.perf_counter()
        error = (answered - asked) / 2
        if error < best.error:
            best = Reading(answered, answer - (asked + answered) / 2, error, machine)
    return best


def machine_name() -> str:
    """Returns what names this run of this machine's kernel; "" where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _send(group: dist.ProcessGroup, peer: int, number: float) -> None:
    message = torch.tensor([number], dtype=torch.float64)
    ANSWERED(sync_points.in_use.send(group, message, peer, 0))


def _receive(group: dist.ProcessGroup, peer: int) -> float:
    message = torch.empty(1, dtype=torch.float64)
    ANSWERED(sync_points.in_use.receive(group, message, peer, 0))
    return message.item()
