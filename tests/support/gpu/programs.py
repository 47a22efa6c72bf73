"""Small programs on several streams, slow where it hurts: without any one site they go wrong.

Each makes its tensors first and synchronises nothing, so that only the sites order it; each returns
what it found in the end, plain values. They know streams by name: those of a card, where a stream
really sleeps (`test_streams.py`), or the checker's virtual ones (`test_programs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from pipegrad.comm import sync_points
from pipegrad.comm.comm_stream import CommStream
from pipegrad.gradients.bucket_memory import RELEASED, WRITTEN, BucketMemory, FlatBuffer
from pipegrad.gradients.param_sync import UPDATED
from pipegrad.plan.buckets import Bucket, Slot
from pipegrad.testing import OrderChecker

NUMEL = 4096
LARGE = 2**20  # a block of the allocator of its own
F32 = torch.float32
BUCKET = Bucket(
    index=0,
    ready=0,
    holders=(0,),
    dtype=F32,
    wire_dtype=F32,
    sum_dtype=F32,
    parameter_dtype=F32,
    route=(),
    slots=tuple(Slot(key, at * NUMEL, (NUMEL,), (1,)) for at, key in enumerate("abc")),
    payload_numel=3 * NUMEL,
)
UNREDUCED = replace(BUCKET, slots=(Slot("a", 0, (LARGE,), (1,)),), payload_numel=LARGE)


class Where(Protocol):
    """Streams by name; outside of them the compute stream is current."""

    device: torch.device

    def on(self, name: str) -> AbstractContextManager[object]:
        """Makes a stream current."""

    def sleep(self, units: int) -> None:
        """Keeps the current stream busy."""

    def synchronize(self) -> None:
        """Waits until the device is at rest."""


class Virtual:
    """The checker's streams, which need no sleep: they count as slow as any."""

    device = torch.device("cpu")

    def __init__(self, checker: OrderChecker) -> None:
        self.on = checker.on

    def sleep(self, units: int) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""


Slow = Mapping[str, int]  # where -> for how many units
Program = Callable[[Where, Slow], Any]


Result = dict[str, list[float]]


def events(memory: BucketMemory) -> list[torch.Event]:
    """Returns what a launch of the bucket waits for."""
    return [] if memory.event is None else [memory.event]


def two_steps(where: Where, slow: Slow, *, threaded: bool = False) -> list[Result]:
    """Two steps of one bucket: zeroed, added to by producers, reduced in a comm stream, read."""
    gradients = [[_full(where, 10 * step + key) for key in (0, 1)] for step in range(2)]
    results = [_full(where, 0, 3 * NUMEL + 3) for _ in range(2)]
    comm_stream = CommStream("comm_stream", where.device, threaded=threaded)
    made = _recorded(where)
    _pause(where, slow, "allocation")
    memory = BucketMemory(BUCKET, where.device)  # is made here
    flat = memory.part(0)
    assert flat.numel() == len(results[0])

    def reduce() -> None:
        _pause(where, slow, "comm_stream")
        flat.mul_(2)

    tickets = []
    for given, result in zip(gradients, results, strict=True):
        with where.on("zeroing"):
            _pause(where, slow, "zeroing")
            memory.reset()
            zeroed = _recorded(where)
        with where.on("producer of a"):  # adds to its slot, behind the zeroing
            sync_points.in_use.wait(made, where.device)
            sync_points.in_use.wait(zeroed, where.device)
            _pause(where, slow, "producer of a")
            memory.slots[0].add_(given[0] + 1)
            memory.add_stream()
        with where.on("producer of b"):  # makes a gradient elsewhere: 1 more when it has run
            sync_points.in_use.wait(made, where.device)
            _pause(where, slow, "producer of b")
            given[1].add_(1)
            memory.add_stream()
        with where.on("filler"):
            sync_points.in_use.wait(made, where.device)
            _pause(where, slow, "filler")
            with memory.gathering():
                memory.copy(given[1:], (1,))
                memory.lack((2,))
            memory.complete(1.0)
        tickets.append(comm_stream.submit(reduce, events(memory)))
        tickets[-1].wait(10)
        _pause(where, slow, "reader")
        result.copy_(flat)
        memory.release(RELEASED)
    for ticket in tickets:
        ticket.done.result(10)  # a comm stream's thread, also where nobody waited for it
    comm_stream.close()
    where.synchronize()
    parts = [dict(zip(("a", "b", "c", "flags"), r.split(NUMEL), strict=True)) for r in results]
    return [{name: _values(part) for name, part in step.items()} for step in parts]


def in_a_thread(where: Where, slow: Slow) -> list[Result]:
    """The same with a comm stream that is a thread, as with gloo."""
    return two_steps(where, slow, threaded=True)


def freed(where: Where, slow: Slow) -> list[list[float]]:
    """A gradient is copied on another stream than the one that made it, and freed at once."""
    result, memory = _full(where, 0, LARGE), BucketMemory(UNREDUCED, where.device)
    memory.reset()
    made = _recorded(where)
    with where.on("producer"):
        sync_points.in_use.wait(made, where.device)
        gradients = [_full(where, 3, LARGE)]
        memory.add_stream()
    filler = CommStream("filler", where.device, threaded=False)

    def fill() -> None:
        _pause(where, slow, "filler")
        with memory.gathering():
            memory.copy(gradients, (0,))
        memory.complete(1.0)

    filler.submit(fill, [made])
    gradients.clear()
    with where.on("producer"):
        others = [_full(where, -1, LARGE) for _ in range(4)]
        last = _recorded(where)
    for event in (*events(memory), last):
        sync_points.in_use.wait(event, where.device)
    result.copy_(memory.slots[0])
    filler.close()
    where.synchronize()
    return [_values(result), *map(_values, others)]


def held(where: Where, slow: Slow, *, drop: bool = False) -> list[list[float]]:
    """A comm stream reads memory that its caller holds until it has waited."""
    comm_stream = CommStream("held", where.device, threaded=False)
    result, scratch = _full(where, 0), [_full(where, 1, LARGE)]

    def task() -> None:
        _pause(where, slow, "comm_stream")
        result.copy_(scratch[0][:NUMEL])
        if drop:
            scratch.clear()  # on the host, which runs ahead

    ticket = comm_stream.submit(task, [_recorded(where)])
    others = [_full(where, -1, LARGE) for _ in range(4)]  # memory that is free is taken again
    ticket.wait(10)
    comm_stream.close()
    where.synchronize()
    return [_values(result), *map(_values, others)]


def dropped(where: Where, slow: Slow) -> list[list[float]]:
    """DeepSpeed#7965: it drops it right after the launch. Wrong, whatever the sites do."""
    return held(where, slow, drop=True)


def given_up(where: Where, slow: Slow) -> list[list[float]]:
    """A step fails, nobody waits for what was launched, and the buffers are freed."""
    comm_stream = CommStream("given up", where.device, threaded=False)
    result = _full(where, 0)
    flat = FlatBuffer(_full(where, 0, LARGE))

    def task(buffer: torch.Tensor = flat.buffer) -> None:
        _pause(where, slow, "comm_stream")
        result.copy_(buffer[:NUMEL])
        buffer.add_(1)

    event = WRITTEN(flat.device)
    assert event is not None
    comm_stream.submit(task, [event])
    comm_stream.close()
    del task, flat, comm_stream
    others = [_full(where, -1, LARGE) for _ in range(4)]
    where.synchronize()
    return [_values(result), *map(_values, others)]


def published(where: Where, slow: Slow) -> list[list[float]]:
    """Twice: the optimizer steps, a comm stream doubles the result, the next forward reads it."""
    comm_stream = CommStream("published", where.device, threaded=False)
    parameter, *results = (_full(where, 0) for _ in range(3))

    def move() -> None:
        _pause(where, slow, "comm_stream")
        parameter.mul_(2)

    for result in results:
        _pause(where, slow, "optimizer")
        parameter.add_(1)
        event = UPDATED(where.device)
        ticket = comm_stream.submit(move, [] if event is None else [event])
        ticket.wait(10)
        result.copy_(parameter)
    comm_stream.close()
    where.synchronize()
    return [_values(result) for result in results]


_RESULTS: list[Result] = [
    {"a": [a], "b": [a + 2], "c": [0.0], "flags": [0.0, 2.0]} for a in (2.0, 22.0)
]
EXPECTED: dict[Program, Any] = {
    two_steps: _RESULTS,
    in_a_thread: _RESULTS,
    freed: [[3.0], *[[-1.0]] * 4],
    held: [[1.0], *[[-1.0]] * 4],
    given_up: [[0.0], *[[-1.0]] * 4],
    published: [[2.0], [6.0]],
}


@dataclass(frozen=True)
class Twin:
    """A program, and where it is so slow that without the site its numbers are wrong."""

    program: Program
    slow: Slow = field(default_factory=dict)


TWINS: dict[str, Twin] = {
    "buffer.allocated": Twin(two_steps, {"allocation": 1}),
    "buffer.reset-free": Twin(two_steps, {"reader": 1}),
    "buffer.written": Twin(two_steps, {"filler": 1}),
    "buffer.wrote": Twin(two_steps, {"producer of a": 1}),
    "buffer.gather": Twin(two_steps, {"producer of a": 1}),
    "buffer.copied": Twin(freed, {"filler": 1}),
    "buffer.freed": Twin(freed, {"filler": 1}),
    "buffer.released": Twin(two_steps, {"reader": 1}),
    "comm-stream.producers": Twin(two_steps, {"filler": 1}),
    "comm-stream.task-done": Twin(two_steps, {"comm_stream": 1}),
    "comm-stream.host": Twin(in_a_thread, {"comm_stream": 1}),
    "comm-stream.result": Twin(two_steps, {"comm_stream": 1}),
    "comm-stream.last": Twin(given_up, {"comm_stream": 1}),
    "comm-stream.closed": Twin(given_up, {"comm_stream": 1}),
    "parameter-sync.updated": Twin(published, {"optimizer": 1}),
}
_RANKS = "needs ranks: tests/support/ordering/programs.py; on a card test_ranks_on_one_card.py"
ELSEWHERE = {  # the file of sites -> why they have no twin here
    **dict.fromkeys(("collective", "header", "reduce", "transfer"), _RANKS),
    **dict.fromkeys(("clocks", "links"), "measures: tests/support/ordering/programs.py"),
}


def _full(where: Where, value: float, numel: int = NUMEL) -> torch.Tensor:
    return torch.full((numel,), float(value), device=where.device)


def _pause(where: Where, slow: Slow, place: str) -> None:
    if place in slow:
        where.sleep(slow[place])


def _recorded(where: Where) -> torch.Event:
    event = sync_points.in_use.record(where.device)
    assert event is not None
    return event


def _values(tensor: torch.Tensor) -> list[float]:
    """Returns the least and the largest value; one if they are the same."""
    return sorted({tensor.min().item(), tensor.max().item()})
