"""StepRecorder: a ring of steps, on a host and on a device; stamps are read after the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from pipegrad.comm import sync_points
from pipegrad.errors import ScheduleError
from pipegrad.observe.step_recorder import DeviceStamps, Recorded, Stamps, StepRecorder
from pipegrad.schedules import Link, Program, build, lower
from pipegrad.schedules.program.program import Op
from pipegrad.simulation.timeline import COMPUTE, Collective, Span


@dataclass
class Device:
    """Each event is half a second behind the one before it."""

    clock: float = 1000.0  # seconds
    waits: int = 0
    made: int = 0
    queue: list[Event] = field(default_factory=list)

    def make(self) -> Event:
        self.made += 1
        return Event()

    def record(self, event: Event) -> None:
        event.seconds = None
        self.queue.append(event)

    def synchronize(self) -> None:
        self.waits += 1
        for event in self.queue:
            self.clock += 0.5
            event.seconds = self.clock
        self.queue.clear()


@dataclass(eq=False)
class Event:
    seconds: float | None = None

    def elapsed_time(self, other: Any) -> float:
        if self.seconds is None or other.seconds is None:
            raise RuntimeError("an event that was not reached")
        return float(other.seconds - self.seconds) * 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """What stamps of a device ask of torch."""
    fake = Device()
    monkeypatch.setattr(sync_points, "timing_event", lambda _: fake.make())
    monkeypatch.setattr(sync_points, "record_time", lambda event, _: fake.record(event))
    monkeypatch.setattr(sync_points, "finish_device", lambda _: fake.synchronize())
    return fake


CARD = torch.device("cuda", 0)


def test_stamps_are_read_by_the_hosts_clock_after_the_device_was_waited_for(device: Device) -> None:
    taker = DeviceStamps(CARD)
    first, second, third = (taker.now() for _ in range(3))
    assert device.waits == 0
    with mock.patch("pipegrad.observe.step_recorder.time.perf_counter", return_value=50.0):
        taker.settle()
    assert device.waits == 2
    # The last event of all is at 50 s; each one before it 0.5 s earlier.
    assert taker.seconds([first, second, third]) == [48.5, 49.0, 49.5]
    assert taker.seconds([]) == []


@pytest.mark.usefixtures("device")
def test_a_stamp_that_was_not_reached_is_not_read() -> None:
    taker = DeviceStamps(CARD)
    taker.settle()
    with pytest.raises(RuntimeError, match="not reached"):
        taker.seconds([taker.now()])


NAME = "bucket 0: replicate-sum(pp) over ranks [0, 1]"
COLLECTIVE = Collective(NAME, (0, 1), (0, 1), 0, (0,))


def program() -> Program:
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    return lower(schedule, links=[Link("x", 0, (1,))], synced=(0,))


class Ticks(Stamps):
    """A host's clock that goes on by one second whenever it is read."""

    def __init__(self) -> None:
        self.seconds_now = 0.0

    def now(self) -> float:
        self.seconds_now += 1.0
        return self.seconds_now


RECORDERS: list[StepRecorder] = []


def made(stamps: Stamps, steps: int = 2) -> StepRecorder:
    names = {(0, 0): NAME}
    RECORDERS.append(StepRecorder(0, stamps, steps=steps, names=names, collectives=[COLLECTIVE]))
    return RECORDERS[-1]


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    while RECORDERS:
        RECORDERS.pop().stop()


def run(recorder: StepRecorder, number: int, stop_at: int | None = None) -> list[Any]:
    """Runs the items of rank 0, or the first of them; returns what was called."""
    made_program, called = program(), list[Any]()

    def call(which: int, microbatch: int) -> None:
        called.append((which, microbatch))

    items = list(made_program.decoded(0))
    recorder.begin_step(number, made_program)
    keep = recorder.item_times()
    keep(recorder.now())
    for item in items[:stop_at]:
        call(item.which, item.microbatch)
        keep(recorder.now())
    began = recorder.now()
    recorder.note("reduction", (0, 0), began)
    return called


def computes(own: Recorded) -> list[Span]:
    return [span for span in own.spans if span.kind in COMPUTE]


def test_every_item_is_called_once_in_order_and_every_action_is_recorded() -> None:
    recorder = made(Ticks())
    called = run(recorder, 7)
    items = list(program().decoded(0))
    assert called == [(item.which, item.microbatch) for item in items]
    own = recorder.read()
    actions = [str(program().action(item)) for item in items if item.op is Op.COMPUTE]
    assert [span.action for span in computes(own)] == actions
    assert {span.step for span in own.spans} == {7}
    # The clock goes on by one second for each stamp, and nothing is stamped inside of an action.
    assert all(span.seconds == 1.0 for span in computes(own))
    assert [(m.which, m.microbatch, m.label) for m in own.spans if m.kind == "transfer"] == [
        (0, 0, "x of 0F0"),
        (0, 1, "x of 0F1"),
    ]
    assert [(m.microbatch, m.label) for m in own.spans if m.kind == "wait for receive"] == [
        (0, "gradient of x of 0F0"),
        (1, "gradient of x of 0F1"),
    ]


def test_a_reduction_has_its_collective_and_a_wait_the_reduction_that_ended_last_in_it() -> None:
    recorder = made(Ticks())
    run(recorder, 0)
    began = recorder.now()
    reduction = recorder.now()
    recorder.note("reduction", (0, 0), reduction)
    recorder.note("wait for reduction", "", began)
    recorder.note("wait for reduction", "", recorder.now())
    kinds = [s for s in recorder.read().spans if "reduction" in s.kind]
    assert [(s.kind, s.which, s.label) for s in kinds] == [
        ("reduction", 0, NAME),
        ("reduction", 0, NAME),
        ("wait for reduction", 0, NAME),
        ("wait for reduction", -1, ""),
    ]


def test_a_ring_keeps_the_last_steps() -> None:
    recorder = made(Ticks(), steps=2)
    for number in range(5):
        run(recorder, number)
    own = recorder.read()
    assert [number for number, _ in own.steps] == [3, 4]
    assert {span.step for span in own.spans} == {3, 4}
    # What began before the first kept step is cut there.
    recorder = made(Ticks(), steps=1)
    recorder.note("wait for ranks", "before any step", recorder.now())
    with pytest.raises(ScheduleError, match="no training step was recorded"):
        recorder.read()
    run(recorder, 0)
    began = recorder.now()
    run(recorder, 1)
    recorder.note("parameter sync", (0, 0), began)
    own = recorder.read()
    (sync,) = [s for s in own.spans if s.kind == "parameter sync"]
    assert (sync.begin, sync.step) == (own.steps[0][1], 1)


def test_a_step_that_failed_has_what_it_reached() -> None:
    recorder = made(Ticks())
    run(recorder, 0, stop_at=4)
    run(recorder, 1)
    own = recorder.read()
    assert 0 < len([s for s in computes(own) if s.step == 0]) < len(computes(own)) / 2


def test_only_the_outermost_optimizer_counts_and_none_after_the_end() -> None:
    recorder = made(Ticks())
    run(recorder, 0)
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    inner, outer = (torch.optim.SGD([weight]) for _ in range(2))
    handle = outer.register_step_pre_hook(lambda *_: inner.step())
    outer.step()
    handle.remove()
    recorder.stop()
    inner.step()
    assert [s.kind for s in recorder.read().spans].count("optimizer") == 1


def test_a_device_is_never_waited_for_in_a_step_and_its_events_are_used_again(
    device: Device,
) -> None:
    recorder = made(DeviceStamps(CARD))
    counts = []
    for number in range(6):
        run(recorder, number)
        counts.append(device.made)
    assert device.waits == 0
    assert counts[2] - counts[1] < (counts[1] - counts[0])  # the ring is full
    assert counts[-1] - counts[-2] <= 1  # the begin of a step alone is new
    own = recorder.read()
    assert device.waits == 2
    assert len(computes(own)) == 2 * 4
    assert all(span.seconds == pytest.approx(0.5) for span in computes(own))
    begins = [span.begin for span in computes(own)]
    assert begins == sorted(begins)
    recorder.stop()
