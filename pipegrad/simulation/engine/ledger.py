"""Ledger: what each rank of a simulation did, and the bytes that it held."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pipegrad.schedules.program.program import Program
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.timeline import MemoryPoint, Span, SpanKind


class Recording:
    """Collects spans; does nothing if no timeline is wanted.

    Attributes:
        spans: What was recorded; None if nothing is.
    """

    def __init__(self, program: Program, names: Sequence[str], *, records: bool) -> None:
        self._program = program
        self._names = names
        self.spans: list[Span] | None = [] if records else None

    def add(self, rank: int, kind: SpanKind, begin: float, end: float, step: int) -> None:
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
            label = self._names[number]
            self.spans.append(Span(rank, kind, begin, end, step, which=number, label=label))


_FORWARD, _BACKWARD, _INPUTS, _WEIGHTS = range(4)  # kinds, as COMPUTE encodes them


class Memory:
    """Counts parameters, gradients, optimizer state, activations, and receive and send buffers.

    A receive buffer is held from the post on: a value until the last backward of the rank that
    reads it, a gradient until the B or W that it belongs to. A gradient that is sent is held
    until it is released; an output belongs to its activations.

    Attributes:
        peak: For each rank its most bytes so far.
        points: For each rank what it held, and from when on; empty without recording.
    """

    def __init__(self, program: Program, costs: Costs, *, records: bool) -> None:
        self._program = program
        self._stages = costs.stages
        # Of a value of each channel. Also if its message is shorter, the value is held.
        links = [program.links[channel.link] for channel in program.channels]
        self._num_bytes = [costs.stages[x.producer].outputs.get(x.name, 0) for x in links]
        ranks = range(program.schedule.num_ranks)
        self._held = [0] * len(ranks)
        for stage, rank in enumerate(program.schedule.stage_to_rank):
            self._held[rank] += costs.stages[stage].held_bytes
        self.peak = list(self._held)
        self.points: list[list[MemoryPoint]] = [
            [MemoryPoint(0.0, held)] if records else [] for held in self._held
        ]
        self._records = records
        self._links = program.rank_links
        # By rank, step, link and microbatch: how many actions still read the value.
        self._readers = defaultdict[tuple[int, int, int, int], int](int)

    def _add(self, now: float, rank: int, num_bytes: int) -> None:
        if num_bytes == 0:
            return
        self._held[rank] += num_bytes
        self.peak[rank] = max(self.peak[rank], self._held[rank])
        if self._records:
            self.points[rank].append(MemoryPoint(now, self._held[rank]))

    def post(self, now: float, rank: int, channel: int) -> None:
        """A receive buffer is taken."""
        self._add(now, rank, self._num_bytes[channel])

    def send(self, now: float, rank: int, channel: int, *, sign: int = 1) -> None:
        """A message is sent, or released by `sign` -1; an activation is held anyway."""
        if self._program.channels[channel].kind == "B":
            self._add(now, rank, sign * self._num_bytes[channel])

    def begin(self, now: float, rank: int, stage: int, kind: int) -> None:
        """An action begins; a forward fills its activations."""
        if kind == _FORWARD:
            self._add(now, rank, self._stages[stage].activation_bytes)

    def end(
        self, now: float, rank: int, stage: int, kind: int, *, step: int, microbatch: int
    ) -> None:
        """An action ends, and frees what no later action needs."""
        costs, forward_only = self._stages[stage], self._program.forward_only
        freed = 0
        if kind == _BACKWARD or (kind == _FORWARD and forward_only):
            freed = costs.activation_bytes
        elif kind == _INPUTS:
            freed = costs.activation_bytes - costs.factor_bytes
        elif kind == _WEIGHTS:
            freed = costs.factor_bytes
        if kind in (_BACKWARD, _WEIGHTS):
            links = self._links[rank]
            channels = (c for link in links.made[stage] for c in links.gradients[link].values())
            freed += sum(self._num_bytes[channel] for channel in channels)
        if kind in (_BACKWARD, _WEIGHTS) or forward_only:
            freed += self._read(rank, stage, step, microbatch)
        self._add(now, rank, -freed)

    def _read(self, rank: int, stage: int, step: int, microbatch: int) -> int:
        """Returns the bytes of received values that the stage was the last to read."""
        freed, links = 0, self._links[rank]
        for link in links.taken[stage]:
            if link in links.values:
                key = rank, step, link, microbatch
                self._readers[key] += 1
                if self._readers[key] == len(links.consumers[link]):
                    del self._readers[key]
                    freed += self._num_bytes[links.values[link]]
        return freed
