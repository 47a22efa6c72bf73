"""Timeline: the spans of every rank. A simulation makes one, and so does a recorded run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from pipegrad import run_files
from pipegrad.errors import ScheduleError, reason
from pipegrad.limits import LARGEST, MOST_NUMBER, check_size
from pipegrad.printable import printable, shortened
from pipegrad.schedules.program.program import Link

SpanKind = Literal[
    "F",
    "B",
    "I",
    "W",
    "wait for receive",
    "wait for send",
    "wait for reduction",
    "wait for parameters",
    "wait for ranks",
    "optimizer",
    "host",
    "transfer",
    "reduction",
    "parameter sync",
]
COMPUTE: tuple[SpanKind, ...] = ("F", "B", "I", "W")
WAITS: tuple[SpanKind, ...] = (
    "wait for receive",
    "wait for send",
    "wait for reduction",
    "wait for parameters",
    "wait for ranks",
)
# Work of the rank itself: these spans do not overlap on a rank.
ON_RANK: tuple[SpanKind, ...] = (*COMPUTE, *WAITS, "optimizer", "host")
# Work in parallel with it: these spans may overlap each other and the rank's spans above.
BESIDE: tuple[SpanKind, ...] = ("transfer", "reduction", "parameter sync")
KINDS: tuple[SpanKind, ...] = (*ON_RANK, *BESIDE)
TimeUnit = Literal["seconds", "units"]

BATCH = "the next batch"  # the label of "host" while a rank fetches one

_VERSION = 1
_HEAD = ("pipegrad_timeline", "fields")


class Span(NamedTuple):
    """Work of a rank, or work in parallel with it.

    Attributes:
        rank: The pipeline rank. For a transfer, the rank that sends.
        kind: Kind of the work. "host" is time of the rank that is nothing else.
        begin: Seconds from the start of the timeline.
        end: Likewise.
        step: Number of the training step, from 0.
        stage: Its stage, or -1.
        microbatch: Its microbatch, or -1.
        peer: The other rank: the receiver of a transfer, the rank that a wait is for; or -1.
        which: The channel of a transfer and of the waits for it, the collective of a reduction, of
            a parameter sync and of the waits for them; or -1.
        label: A text, such as "x of 0F3" or the name of a collective.
    """

    rank: int
    kind: SpanKind
    begin: float
    end: float
    step: int = 0
    stage: int = -1
    microbatch: int = -1
    peer: int = -1
    which: int = -1
    label: str = ""

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.begin

    @property
    def action(self) -> str:
        """The action of a compute, such as ``2F0``."""
        return f"{self.stage}{self.kind}{self.microbatch}"


class MemoryPoint(NamedTuple):
    """From `seconds` on a rank holds `num_bytes`."""

    seconds: float
    num_bytes: int


class Collective(NamedTuple):
    """A reduction as a pipeline sees it.

    Attributes:
        name: Its name in messages.
        ranks: Pipeline ranks that take part.
        stages: Its stages. A rank can launch it when its own stages among these are final.
        comm_stream: Number of its comm stream. Collectives of one comm stream run one by one.
        readers: Stages whose parameter sync belongs to it. The sync runs during the next forwards.
    """

    name: str
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    comm_stream: int
    readers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """The work of every rank of one pipeline.

    Attributes:
        name: A title, such as the name of the schedule.
        source: "predicted" by a simulation, or "measured" in a run.
        num_ranks: Ranks of the pipeline.
        stage_to_rank: For each stage its rank.
        num_microbatches: Microbatches of a step.
        spans: All spans, in any order.
        step_ends: For each step the time when its last rank has ended it, in seconds.
        memory: For each rank its points, in order of time; empty if memory is not known.
        notes: Further facts, such as a date or a device; values are strings or numbers.
        links: The values that stages pass on; empty if each passes one to the next.
        collectives: The reductions, in the order in which they are launched.
        time_unit: "units" if no time in seconds is known. Then all seconds here are units, and a
            time compares only with others of this timeline.
        layers: For each stage its layers by name, with the part of its time that each takes; empty
            if they are not known.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    source: Literal["predicted", "measured"]
    num_ranks: int
    stage_to_rank: tuple[int, ...]
    num_microbatches: int
    spans: tuple[Span, ...]
    step_ends: tuple[float, ...]
    memory: tuple[tuple[MemoryPoint, ...], ...] = ()
    notes: Mapping[str, str | float] = field(default_factory=dict)
    links: tuple[Link, ...] = ()
    collectives: tuple[Collective, ...] = ()
    time_unit: TimeUnit = "seconds"
    layers: tuple[Mapping[str, float], ...] = ()

    @property
    def seconds(self) -> float:
        """When the last step has ended on all ranks."""
        return self.step_ends[-1] if self.step_ends else 0.0

    def step(self, step: int) -> tuple[float, float]:
        """Returns when a step begins and ends; it begins where the one before it has ended."""
        return (0.0, *self.step_ends)[step], self.step_ends[step]

    def noted(self, name: str, default: float = 0.0) -> float:
        """Returns a note that is a number; the default if there is none."""
        value = self.notes.get(name)
        return value if isinstance(value, int | float) and abs(value) <= MOST_NUMBER else default

    def on_rank(self, rank: int) -> list[Span]:
        """Returns the spans of work of a rank itself, in order of time."""
        own = (s for s in self.spans if s.rank == rank and s.kind in ON_RANK)
        return sorted(own, key=attrgetter("begin", "end"))

    def beside(self, rank: int) -> list[Span]:
        """Returns the sends, reductions and parameter syncs of a rank, in order of time."""
        own = (s for s in self.spans if s.rank == rank and s.kind in BESIDE)
        return sorted(own, key=attrgetter("begin", "end"))

    def of_step(self, step: int) -> Timeline:
        """Returns one step alone; it begins at 0.

        A step begins where the one before it ended on all ranks. Its number is 0 here. Spans that a
        step's begin or end cuts, such as a parameter sync that runs into the next step, are cut.
        """
        begin, end = self.step(step)
        spans = tuple(
            span._replace(
                begin=max(span.begin, begin) - begin,
                end=min(span.end, end) - begin,
                step=span.step - step,  # below 0 for spans that the step before it began
            )
            for span in self.spans
            if (span.end > begin and span.begin < end)
            or (span.step == step and begin <= span.begin == span.end <= end)
        )
        memory = tuple(tuple(_cut(points, begin, end)) for points in self.memory)
        return replace(self, spans=spans, step_ends=(end - begin,), memory=memory)

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data; `from_json` reads it."""
        return {
            "pipegrad_timeline": _VERSION,
            "name": self.name,
            "source": self.source,
            "num_ranks": self.num_ranks,
            "stage_to_rank": list(self.stage_to_rank),
            "num_microbatches": self.num_microbatches,
            "fields": list(Span._fields),
            "spans": [list(span) for span in self.spans],
            "step_ends": list(self.step_ends),
            "memory": [[list(point) for point in points] for points in self.memory],
            "notes": dict(self.notes),
            "links": [list(link) for link in self.links],
            "collectives": [list(collective) for collective in self.collectives],
            "time_unit": self.time_unit,
            "layers": [dict(own) for own in self.layers],
        }

    @classmethod
    def from_json(cls, data: object) -> Timeline:
        """Returns the timeline that `to_json` wrote.

        Raises:
            ScheduleError: If `data` is something else, or of another version.
        """
        if not isinstance(data, Mapping):
            raise ScheduleError("expected an object, the data of a timeline")
        if data.get("pipegrad_timeline") != _VERSION or data.get("fields") != list(Span._fields):
            raise ScheduleError(
                f"expected a timeline of version {_VERSION}, found "
                f"{data.get('pipegrad_timeline', 'no version')!r:.80}: record the run again"
            )
        fields = {name: value for name, value in data.items() if name not in _HEAD}
        timeline = validated(_adapter(), fields, "a timeline")
        check_timeline(timeline)
        return timeline

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        run_files.replace(path, json.dumps(self.to_json(), separators=(",", ":")).encode())

    @classmethod
    def load(cls, path: Path) -> Timeline:
        """Reads a file that `save` wrote.

        Raises:
            ScheduleError: If the file is missing or holds no timeline.
        """
        return loaded(path, "timeline", cls.from_json)


@cache
def _adapter() -> TypeAdapter[Timeline]:
    return TypeAdapter(Timeline)


def check_timeline(timeline: Timeline) -> None:
    """Refuses numbers that no run has, because pictures and tables could not show them.

    Raises:
        ScheduleError: If there are some. The message names the field.
    """
    ranks = range(timeline.num_ranks)
    if not 0 < timeline.num_ranks <= len(timeline.stage_to_rank):
        raise ScheduleError(f"num_ranks: {timeline.num_ranks}, expected a stage on each rank")
    if any(rank not in ranks for rank in timeline.stage_to_rank):
        raise ScheduleError(f"stage_to_rank: expected ranks of {timeline.num_ranks}")
    if timeline.num_microbatches < 1:
        raise ScheduleError(f"num_microbatches: {timeline.num_microbatches}, expected at least 1")
    check_size(len(timeline.stage_to_rank), timeline.num_microbatches)
    begins = (0.0, *timeline.step_ends)
    if any(not begin <= end <= MOST_NUMBER for begin, end in pairwise(begins)):
        raise ScheduleError("step_ends: expected seconds that ascend")
    _check_layers(timeline)
    _check_memory(timeline)
    stages = range(len(timeline.stage_to_rank))
    for each in timeline.collectives:
        if not ({*each.ranks} <= {*ranks} and {*each.stages, *each.readers} <= {*stages}):
            raise ScheduleError(
                f"collective {each.name!r:.80}: expected ranks and stages of the timeline"
            )
    for number, span in enumerate(timeline.spans):
        if complaint := next(_complaints(span, timeline), ""):
            raise ScheduleError(f"spans.{number}: {complaint}")


def _check_layers(timeline: Timeline) -> None:
    if len(timeline.layers) not in (0, len(timeline.stage_to_rank)):
        raise ScheduleError("layers: expected those of each stage, or none")
    if any(not 0 < part <= MOST_NUMBER for own in timeline.layers for part in own.values()):
        raise ScheduleError("layers: expected parts of the time of a stage, each above 0")


def _check_memory(timeline: Timeline) -> None:
    if len(timeline.memory) not in (0, timeline.num_ranks):
        raise ScheduleError(f"memory: expected points of {timeline.num_ranks} ranks, or of none")
    points = (point for row in timeline.memory for point in row)
    if not all(0 <= p.seconds <= MOST_NUMBER and 0 <= p.num_bytes <= MOST_NUMBER for p in points):
        raise ScheduleError("memory: expected seconds and bytes, each at least 0")


def _complaints(span: Any, timeline: Timeline) -> Iterator[str]:  # noqa: ANN401 - or anything else
    if span.kind not in KINDS:
        yield f"expected one of {', '.join(KINDS)}, found {span.kind!r:.80}"
    numbers = (span.rank, *span[4:-1])
    if not all(isinstance(number, int) and abs(number) <= LARGEST for number in numbers):
        yield f"expected integers of 32 bits, found {numbers!r:.80}"
    if not isinstance(span.label, str):
        yield f"expected a text as its label, found {span.label!r:.80}"
    if not 0 <= span.rank < timeline.num_ranks or not -1 <= span.peer < timeline.num_ranks:
        yield f"expected ranks of {timeline.num_ranks}"
    if not -1 <= span.stage < len(timeline.stage_to_rank):
        yield f"stage {span.stage} is none of the timeline's"
    if not -MOST_NUMBER <= span.begin <= span.end <= MOST_NUMBER:
        yield "expected a begin and a later end, in seconds"
    if not -1 <= span.microbatch < timeline.num_microbatches:
        yield f"microbatch {span.microbatch} is none of a step's"


def _cut(points: Sequence[MemoryPoint], begin: float, end: float) -> Iterator[MemoryPoint]:
    before = [point for point in points if point.seconds <= begin]
    yield from (MemoryPoint(0.0, point.num_bytes) for point in before[-1:])
    inside = (point for point in points if begin < point.seconds < end)
    yield from (MemoryPoint(point.seconds - begin, point.num_bytes) for point in inside)


# As people read them.


def in_time(seconds: float, time_unit: TimeUnit = "seconds") -> str:
    """Returns a time with three digits: ``1.23 s``, ``12.3 ms`` or ``85.0 us``; or ``21 units``."""
    if time_unit == "units":
        return f"{seconds:.4g} unit{'s' * (seconds != 1)}"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= 0.9995 * size:  # rounding makes it one unit
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def in_percent(share: float) -> str:
    """Returns a share of 1 in percent, with one digit after the point below ten percent."""
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.1f} %"


def _three_digits(number: float) -> str:
    if abs(number) >= 1e6:
        return f"{number:.2e}"
    if abs(number) >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"


# Reading JSON that a person may have written.

T = TypeVar("T")
_MOST_MISTAKES = 8  # in one message


def validated(adapter: TypeAdapter[T], data: object, what: str) -> T:
    """Returns the object that plain data describes.

    Raises:
        ScheduleError: If a name is unknown, or a value has another type or range.
    """
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        mistakes = error.errors()
        words = [_in_words(each, what) for each in mistakes[:_MOST_MISTAKES]]
        more = len(mistakes) - len(words)
        words += [f"and {more} more"] if more else []
        raise ScheduleError("; ".join(words)) from error


def _in_words(mistake: ErrorDetails, what: str) -> str:
    where = printable(shortened(".".join(map(str, mistake["loc"])) or what))
    complaint = mistake["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{where}: {complaint}, found {_shown(mistake['input'])}"


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except (RecursionError, ValueError):  # too deep, or a number of too many digits
        return f"a {type(value).__name__}"


def loaded(path: Path, what: str, read: Callable[[Any], T]) -> T:
    """Returns the result of `read` on the data of a JSON file.

    Raises:
        ScheduleError: If the file is missing or no JSON, or `read` raises it. It names the file.
    """
    try:
        content = run_files.read(path)
    except FileNotFoundError as error:
        raise ScheduleError(f"there is no file {path}") from error
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{str(path)!r} cannot be read: {reason(error)}") from error
    try:
        return read(run_files.parsed_json(content))
    except json.JSONDecodeError as error:
        complaint = f"line {error.lineno}, column {error.colno} is no JSON"
    except ValueError as error:  # a ScheduleError, too
        complaint = str(error)
    raise ScheduleError(
        f"{path} holds no {what}: {complaint if content.strip() else 'it is empty'}"
    )
