"""Ledger: what each rank of a simulation did, and the bytes that it held."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pipegrad.schedules.program.program import (
    MICROBATCH_BITS,
    MICROBATCH_MASK,
    Program,
)
from pipegrad.schedules.schedule import Kind
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.timeline import COMPUTE, MemoryPoint, Span, SpanKind

_ALWAYS = (*COMPUTE, "transfer")  # are recorded also if they take no time


class Recording:
    """Collects spans; does nothing if no timeline is wanted.

    Attributes:
        spans: What was recorded; None if nothing is.
    """

    def __init__(self, program: Program, names: Sequence[str], *, records: bool) -> None:
        self._program = program
        self._names = names
        self.spans: list[Span] | None = [] if records else None

    def add(
        self, rank: int, kind: SpanKind, begin: float, end: float, step: int, *more: int | str
    ) -> None:
        """Records a span; `more` are the other fields of one."""
        if self.spans is not None and (end > begin or kind in _ALWAYS):
            self.spans.append(Span(rank, kind, begin, end, step, *more))  # type: ignore[arg-type]

    def transfer(
        self, rank: int, kind: SpanKind, begin: float, end: float, key: tuple[int, int]
    ) -> None:
        """Records a transfer, or a wait of one of its two ranks, of a step and transfer."""
        if self.spans is None:
            return
        step, which = key
        channel, microbatch = which >> MICROBATCH_BITS, which & MICROBATCH_MASK
        link, _, source, target = self._program.channels[channel]
        stage, peer = self._program.links[link].producer, source if rank == target else target
        label = self._program.transfer(channel, microbatch)
        self.add(rank, kind, begin, end, step, stage, microbatch, peer, channel, label)

    def collective(
        self, kind: SpanKind, begin: float, end: float, *, rank: int, step: int, number: int
    ) -> None:
        """Records a reduction, a parameter sync, or the wait for one."""
        self.add(rank, kind, begin, end, step, -1, -1, -1, number, self._names[number])


class Memory:
    """Counts parameters, gradients, optimizer state, activations, and receive and send buffers.

    A receive buffer is held from the post on: a value until the last backward of the rank that
    reads it, a gradient until the B or W that it belongs to. A gradient that is sent is held
    until it is released; an output belongs to its activations.

    Attributes:
        received_bytes: For each channel what its receiver holds of a message. Also if the message
            is shorter, the value is held.
        sent_bytes: For each channel what its sender holds; an activation is held anyway.
        peak: For each rank its most bytes so far.
        points: For each rank what it held, and from when on; empty without recording.
    """

    def __init__(self, program: Program, costs: Costs, *, records: bool) -> None:
        self._stages = costs.stages
        self._forward_only = program.forward_only
        links = [program.links[channel.link] for channel in program.channels]
        self.received_bytes = [costs.stages[x.producer].outputs.get(x.name, 0) for x in links]
        self.sent_bytes = [
            num_bytes * (channel.kind == "B")
            for num_bytes, channel in zip(self.received_bytes, program.channels, strict=True)
        ]
        self._held = [0] * program.schedule.num_ranks
        for stage, rank in enumerate(program.schedule.stage_to_rank):
            self._held[rank] += costs.stages[stage].held_bytes
        self.peak = list(self._held)
        self.points: list[list[MemoryPoint]] = [
            [MemoryPoint(0.0, held)] if records else [] for held in self._held
        ]
        self._records = records
        self._links = program.rank_links
        # By rank, link, step and microbatch: how many actions still read the value.
        self._readers = defaultdict[tuple[int, int, int, int], int](int)

    def add(self, now: float, rank: int, num_bytes: int) -> None:
        """A rank holds more bytes from now on, or fewer."""
        if num_bytes == 0:
            return
        self._held[rank] += num_bytes
        self.peak[rank] = max(self.peak[rank], self._held[rank])
        if self._records:
            self.points[rank].append(MemoryPoint(now, self._held[rank]))

    def begin(self, now: float, rank: int, stage: int, kind: Kind) -> None:
        """An action begins; a forward fills its activations."""
        if kind == "F":
            self.add(now, rank, self._stages[stage].activation_bytes)

    def end(self, now: float, rank: int, stage: int, kind: Kind, *, which: tuple[int, int]) -> None:
        """An action of a step and microbatch ends, and frees what no later action needs."""
        full, factors = self._stages[stage].activation_bytes, self._stages[stage].factor_bytes
        forward = full if self._forward_only else 0
        freed = {"F": forward, "B": full, "I": full - factors, "W": factors}[kind]
        links, is_last = self._links[rank], kind in ("B", "W")
        if is_last:
            channels = (c for link in links.made[stage] for c in links.gradients[link].values())
            freed += sum(self.received_bytes[channel] for channel in channels)
        for link in links.taken[stage] if is_last or self._forward_only else ():
            if link in links.values:
                key = rank, link, *which
                self._readers[key] += 1
                if self._readers[key] == len(links.consumers[link]):
                    del self._readers[key]
                    freed += self.received_bytes[links.values[link]]
        self.add(now, rank, -freed)
