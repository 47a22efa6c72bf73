"""Recording: the spans of a simulation, if they are wanted."""

from __future__ import annotations

from pipegrad.schedules.program.program import Program
from pipegrad.simulation.timeline import Span, SpanKind


class Recording:
    """Collects spans; does nothing if no timeline is wanted.

    Attributes:
        spans: What was recorded; None if nothing is.
    """

    def __init__(self, program: Program, *, records: bool) -> None:
        self._program = program
        self.spans: list[Span] | None = [] if records else None

    def note(self, rank: int, kind: SpanKind, begin: float, end: float, step: int) -> None:
        """Records what a rank did, without any further fact."""
        if self.spans is not None and end > begin:
            self.spans.append(Span(rank, kind, begin, end, step))

    def compute(self, span: Span) -> None:
        """Records an action, also if it takes no time."""
        if self.spans is not None:
            self.spans.append(span)

    def transfer(
        self,
        rank: int,
        kind: SpanKind,
        begin: float,
        end: float,
        step: int,
        *,
        channel: int,
        microbatch: int,
    ) -> None:
        """Records a transfer, or a wait of one of its two ranks."""
        if self.spans is None or (end <= begin and kind != "transfer"):
            return
        link, _, source, target = self._program.channels[channel]
        peer = source if rank == target else target
        label = self._program.transfer(channel, microbatch)
        stage = self._program.links[link].producer
        span = Span(rank, kind, begin, end, step, stage, microbatch, peer, channel, label)
        self.spans.append(span)

    def collective(
        self, rank: int, kind: SpanKind, begin: float, end: float, *, step: int, number: int
    ) -> None:
        """Records a reduction, a parameter sync, or the wait for one."""
        if self.spans is not None and end > begin:
            label = self._program.collectives[number].name
            self.spans.append(Span(rank, kind, begin, end, step, which=number, label=label))
