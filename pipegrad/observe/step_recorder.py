"""Step recorder: records the last training steps of one rank, in a ring of fixed size.

Points in time are stamps, taken inside a step and read after it. On a CPU a stamp is the host's
clock. On a device a stamp is an event on the current stream, because the host runs ahead. Nothing
in a step waits for an event: their times are read when the device is idle.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pipegrad.comm import sync_points
from pipegrad.comm.activity import Key, Noted
from pipegrad.errors import ScheduleError
from pipegrad.schedules.program.program import Item, Op, Program
from pipegrad.simulation.timeline import Collective, Span, SpanKind


class Stamps:
    """Takes points in time, and reads them later. On a CPU they are numbers."""

    def now(self) -> Any:  # noqa: ANN401 - a number, or an event
        """Returns a point in time, on the current stream if there are streams."""
        return time.perf_counter()

    def settle(self) -> None:
        """Waits until all points in time have passed; call it outside of steps."""

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """Returns the host's `time.perf_counter` at these points; call `settle` before."""
        return list(stamps)

    def recycle(self, stamps: Iterable[Any]) -> None:
        """Takes back stamps that will not be read."""


class DeviceStamps(Stamps):
    """Stamps of a device: events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Any] = []
        self._last: tuple[Any, float] | None = None  # an event, and the host's clock at it

    def now(self) -> Any:  # noqa: ANN401 - an event
        try:
            event = self._free.pop()
        except IndexError:  # comm streams take from it, too
            event = sync_points.timing_event(self._device)
        sync_points.record_time(event, self._device)
        return event

    def settle(self) -> None:
        # Wait for the device twice. After the first wait it is idle, and reaches the event at once.
        # After the second one, the host's clock is right to some microseconds.
        sync_points.finish_device(self._device)
        event = self.now()
        sync_points.finish_device(self._device)
        self._last = event, time.perf_counter()

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        assert self._last is not None
        last, at = self._last
        # A stamp is read relative to another one of its step, and only that one relative to the
        # end, because an elapsed time is a float32 of milliseconds.
        first = stamps[0] if stamps else last
        base = at - first.elapsed_time(last) / 1e3
        return [base + first.elapsed_time(stamp) / 1e3 for stamp in stamps]

    def recycle(self, stamps: Iterable[Any]) -> None:
        self._free += stamps


def stamps_of(device: torch.device) -> Stamps:
    """Returns the stamps for a rank's device."""
    return Stamps() if device.type == "cpu" else DeviceStamps(device)


_MOST_NOTES = 10_000  # of a step; a loop may step another optimizer without end
_KINDS: dict[Op, SpanKind] = {
    Op.SEND: "transfer",
    Op.WAIT_RECEIVE: "wait for receive",
    Op.RELEASE: "wait for send",
    Op.FIRST_USE: "wait for parameters",
}


@dataclass
class _Step:
    """The recording of one step.

    Attributes:
        number: Count of the Scheduler's steps of all kinds, equal on all ranks.
        program: Its Program.
        began: Stamp of its start.
        stamps: Stamps of its items' start, and of the end of each; fewer if it failed.
        notes: Kind, key, start and end of each note.
    """

    number: int
    program: Program
    began: Any
    stamps: list[Any] = field(default_factory=list)
    notes: deque[tuple[SpanKind, Key, Any, Any]] = field(
        default_factory=lambda: deque(maxlen=_MOST_NOTES)
    )


class Recorded(NamedTuple):
    """The recording of one rank, in seconds of its own clock.

    Attributes:
        rank: The pipeline rank.
        steps: Number and start of each step.
        end: End of the last step.
        spans: Its work, and background work. Their `step` is a number of `steps`. A transfer begins
            when it was sent, and its end is not known here. A wait for a receive ends when the
            message was there, and may take no time.
    """

    rank: int
    steps: tuple[tuple[int, float], ...]
    end: float
    spans: tuple[Span, ...]


class StepRecorder:
    """Records the training steps of one rank; the `Recorder` of a `Tape`.

    A step costs a stamp at the end of each item, and a few more. Nothing waits for a device.

    Args:
        rank: The pipeline rank.
        stamps: Takes points in time.
        steps: Number of the last steps that are kept.
        names: Name of a reduction, by bucket and step of its route.
        collectives: The reductions of the pipeline.
    """

    def __init__(
        self,
        rank: int,
        stamps: Stamps,
        *,
        steps: int,
        names: dict[tuple[int, int], str],
        collectives: Sequence[Collective] = (),
    ) -> None:
        self._rank = rank
        self._stamps = stamps
        self._names = names
        self._collectives = collectives
        self._steps: deque[_Step] = deque(maxlen=steps)
        self._ended: Any = None
        self._stepping = list[Any]()  # starts of optimizer steps that have not ended
        self._hooks = [
            register_optimizer_step_pre_hook(self._begin_optimizer),
            register_optimizer_step_post_hook(self._end_optimizer),
        ]

    # Called by a Tape.

    def now(self) -> object:
        return self._stamps.now()

    def note(self, kind: Noted | SpanKind, key: Key, began: object) -> None:
        if self._steps:
            self._steps[-1].notes.append((kind, key, began, self._stamps.now()))

    def begin_step(self, number: int, program: object) -> None:
        assert isinstance(program, Program)
        # Events of a device are costly to make. A step that leaves the ring gives its own back.
        if len(self._steps) == self._steps.maxlen:
            oldest = self._steps[0]
            self._stamps.recycle(oldest.stamps)
            self._stamps.recycle(stamp for _, _, *both in list(oldest.notes) for stamp in both)
        self._stepping.clear()
        self._steps.append(_Step(number, program, self._stamps.now()))

    def item_times(self) -> Callable[[object], object]:
        return self._steps[-1].stamps.append

    # Optimizers.

    def _begin_optimizer(self, *_: object) -> None:
        self._stepping.append(self._stamps.now())

    def _end_optimizer(self, *_: object) -> None:
        if self._stepping:  # it may have begun before the recording
            began = self._stepping.pop()
            if not self._stepping:  # one optimizer may step others
                self.note("optimizer", "", began)

    # Afterwards.

    @property
    def program(self) -> Program | None:
        """The Program of the last step that was recorded."""
        return self._steps[-1].program if self._steps else None

    def stop(self) -> None:
        """Ends the last step, and takes no further notes of optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._ended is None:
            self._ended = self._stamps.now()

    def read(self) -> Recorded:
        """Returns the recording up to now; call it between steps.

        Sync: waits for the device.

        Raises:
            ScheduleError: If no training step was recorded.
        """
        ended = self._stamps.now() if self._ended is None else self._ended
        self._stamps.settle()
        if not self._steps:
            raise ScheduleError(
                "no training step was recorded: call scheduler.step() inside of record()"
            )
        begins = [self._seconds(step.began) for step in self._steps]
        # From here on nothing is recorded: the device is idle, so its events can be read.
        spans = list[Span]()
        for step in self._steps:
            spans += self._read_items(step)
            spans += self._read_notes(step, begins)
        numbers = [step.number for step in self._steps]
        return Recorded(
            self._rank,
            tuple(zip(numbers, begins, strict=True)),
            self._seconds(ended),
            tuple(spans),
        )

    def _seconds(self, stamp: object) -> float:
        return self._stamps.seconds([stamp])[0]

    def _read_items(self, step: _Step) -> Iterator[Span]:
        """Yields the items that a step has reached."""
        ends = pairwise(self._stamps.seconds(step.stamps))
        for item, (begin, end) in zip(step.program.decoded(self._rank), ends, strict=False):
            if item.op is Op.COMPUTE or item.op in _KINDS:
                yield self._span(step, item, begin, end)

    def _span(self, step: _Step, item: Item, begin: float, end: float) -> Span:
        program, rank, number = step.program, self._rank, step.number
        if item.op is Op.COMPUTE:
            stage, kind, microbatch = program.action(item)
            return Span(rank, kind, begin, end, number, stage, microbatch)
        if item.op is Op.FIRST_USE:
            reads = [i for i, c in enumerate(self._collectives) if item.which in c.readers]
            which = reads[0] if len(reads) == 1 else -1
            label = f"parameters of stage {item.which}"
            waits = _KINDS[item.op]
            return Span(rank, waits, begin, end, number, item.which, which=which, label=label)
        link, _, source, target = program.channels[item.which]
        return Span(
            rank,
            _KINDS[item.op],
            begin,
            end,
            number,
            program.links[link].producer,
            item.microbatch,
            source if rank == target else target,
            item.which,
            program.transfer(item.which, item.microbatch),
        )

    def _read_notes(self, step: _Step, begins: Sequence[float]) -> list[Span]:
        """Returns the notes of a step as spans; a note may have begun in an earlier step."""
        spans = list[Span]()
        number_of = {c.name: i for i, c in enumerate(self._collectives)}
        # Copy it in one call, because a comm stream may add a note meanwhile.
        for kind, key, *both in list(step.notes):
            begin, end = self._stamps.seconds(both)
            label = key if isinstance(key, str) else self._names[key]
            # A parameter sync may begin in one step and end in the next one.
            at = max(bisect_right(begins, begin) - 1, 0)
            spans.append(
                Span(
                    self._rank,
                    kind,
                    max(begin, begins[0]),
                    end,
                    self._steps[at].number,
                    which=number_of.get(label, -1),
                    label=label,
                )
            )
        return [_with_reason(span, spans) for span in spans]


def _with_reason(span: Span, noted: Sequence[Span]) -> Span:
    """Returns a wait for reductions with the one that ended last in it; other spans unchanged."""
    ended = [s for s in noted if s.kind == "reduction" and span.begin < s.end <= span.end]
    if span.kind != "wait for reduction" or not ended:
        return span
    last = max(ended, key=attrgetter("end"))
    return span._replace(which=last.which, label=last.label)
