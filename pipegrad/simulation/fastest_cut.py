"""Fastest cut: where stages begin, so that a simulated step is short. Pure.

[Note: floor] No simulated step is below its floor: that of a network on which messages wait for
those before them on their link alone, and of no reductions. It takes a fraction of a simulation's
time. Cuts are simulated in the order of their floors; one whose floor is above the best step cannot
be better. If all cuts are few, all are candidates, so the result is the best. Otherwise cuts of low
floors are changed, again and again: some stages in a row begin a layer earlier, or later.
Both end after a number of simulations, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, combinations
from math import comb

import numpy as np

from pipegrad.schedules.program.program import (
    KINDS,
    MICROBATCH_BITS,
    OP_BITS,
    OP_MASK,
    Op,
    Program,
)
from pipegrad.simulation.choice import EQUAL
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.simulator import simulate

Begins = tuple[int, ...]  # the first layer of every stage but the first
Weight = tuple[float, float]  # bytes beyond the limit, and seconds of the steps

_ALL_TRIED = 2_000  # cuts; of more, neighbours are tried
_MOST_ITEMS = 400_000  # of all simulations together, which then take some seconds
_MOST_FLOORS = 1_000_000  # likewise: cuts times stages, and items
_BEAM = 8  # cuts that are changed at once
_ROUNDING = 1e-9
_COMPUTE, _SEND, _RECEIVE = int(Op.COMPUTE), int(Op.SEND), int(Op.WAIT_RECEIVE)


def fastest_cut(
    program: Program,
    costs_at: Callable[[Begins], Costs],
    num_layers: int,
    begins: Sequence[Begins],
    *,
    num_steps: int = 1,
    memory_limit_bytes: float | None = None,
) -> Begins:
    """Returns the cut with the shortest simulated steps; see [Note: floor].

    If no cut is within the limit, it is the one that holds least. Of cuts that were simulated, and
    differ by less than 0.5 %, the one that moves the fewest layers is taken. If a program is too
    large for some simulations, it is the last of `begins`.

    Args:
        program: What every rank does, however the model is cut.
        costs_at: Returns the costs of a cut.
        num_layers: Each stage has one or more.
        begins: Cuts to begin with; layers move from the first of them.
        num_steps: How many steps are simulated.
        memory_limit_bytes: The most that a rank may hold.
    """
    if program.num_items * num_steps * (len(begins) + 1) > _MOST_ITEMS:
        return begins[-1]
    search = _Search(program, costs_at, num_steps, memory_limit_bytes)
    num_begins = len(begins[0])
    search.simulate(begins)
    if comb(num_layers - 1, num_begins) <= _ALL_TRIED:
        search.improve(combinations(range(1, num_layers), num_begins))
    else:
        # Floors lead near, and simulations find the rest.
        search.simulate(search.lowest(begins, num_layers))
        while search.improve(_neighbours(search.best, num_layers), is_first=True):
            pass
    return search.chosen(begins[0])


def _neighbours(begins: Begins, num_layers: int) -> Iterator[Begins]:
    """Yields the cuts in which some neighbouring stages begin a layer earlier, or later."""
    edges = (0, *begins, num_layers)
    for low in range(1, len(edges) - 1):
        for high in range(low + 1, len(edges)):
            if edges[high - 1] + 1 < edges[high]:
                yield (
                    *begins[: low - 1],
                    *(b + 1 for b in begins[low - 1 : high - 1]),
                    *begins[high - 1 :],
                )
            if edges[low] - 1 > edges[low - 1]:
                yield (
                    *begins[: low - 1],
                    *(b - 1 for b in begins[low - 1 : high - 1]),
                    *begins[high - 1 :],
                )


class _Search:
    """What is known of cuts so far.

    Attributes:
        best: The cut of least weight.
    """

    def __init__(
        self,
        program: Program,
        costs_at: Callable[[Begins], Costs],
        num_steps: int,
        limit: float | None,
    ) -> None:
        self._program, self._costs_at, self._num_steps = program, costs_at, num_steps
        self._limit = limit
        self._floor = _Floor(program, num_steps)
        self._floors_left = _MOST_FLOORS
        self._left = _MOST_ITEMS // (program.num_items * num_steps)
        self._weights = dict[Begins, Weight]()
        self.best: Begins = ()

    def simulate(self, cuts: Iterable[Begins]) -> None:
        """Simulates cuts, and takes the first of those that are best."""
        for cut in cuts:
            if cut in self._weights:
                continue
            self._left -= 1
            steps = simulate(
                self._program, self._costs_at(cut), num_steps=self._num_steps, records=False
            )
            beyond = self._beyond(max(steps.peak_bytes))
            self._weights[cut] = weight = beyond, sum(steps.step_seconds)
            if not self.best or _is_less(weight, self._weights[self.best]):
                self.best = cut

    def _beyond(self, num_bytes: float) -> float:
        return 0.0 if self._limit is None else max(0.0, num_bytes - self._limit)

    def _floors(self, cuts: Sequence[Begins]) -> list[Weight]:
        self._floors_left -= sum(len(cut) + 1 for cut in cuts) + self._program.num_items
        chunks = self._program.schedule.chunks
        costs = [self._costs_at(cut).of_chunks(chunks) for cut in cuts]
        seconds = self._floor.seconds(costs)
        held = map(self._floor.held_bytes, costs) if self._limit is not None else [0] * len(cuts)
        return list(zip(map(self._beyond, held), seconds, strict=True))

    def improve(self, cuts: Iterable[Begins], *, is_first: bool = False) -> bool:
        """Simulates the cuts whose floors are below the best step; returns whether one is better.

        Args:
            cuts: Which ones.
            is_first: Whether to end with the first that is better.
        """
        before, new = self.best, [cut for cut in cuts if cut not in self._weights]
        for floor, cut in sorted(zip(self._floors(new), new, strict=True)) if new else []:
            if self._left <= 0 or not _is_less(floor, self._weights[self.best]):
                break
            self.simulate([cut])
            if is_first and self.best != before:
                break
        return self.best != before

    def lowest(self, cuts: Sequence[Begins], num_layers: int) -> list[Begins]:
        """Returns cuts of low floors, the lowest first: some, and those that changes lead to."""
        floors, beam, near = dict[Begins, Weight](), list(cuts), set(cuts)
        while near and self._floors_left > 0:
            new = sorted(near)
            floors |= zip(new, self._floors(new), strict=True)
            beam = sorted(floors, key=lambda cut: (floors[cut], cut))[:_BEAM]
            near = {other for cut in beam for other in _neighbours(cut, num_layers)} - floors.keys()
        return beam

    def chosen(self, start: Begins) -> Begins:
        """Returns, of the cuts that are equally good, the one that moves the fewest layers."""
        least, seconds = self._weights[self.best]
        equal = [
            (sum(abs(a - b) for a, b in zip(cut, start, strict=True)), own, cut)
            for cut, (beyond, own) in self._weights.items()
            if beyond <= least and own <= seconds * (1 + EQUAL)
        ]
        return min(equal)[2]


def _is_less(one: Weight, other: Weight) -> bool:
    """Returns whether a weight is less, by more than rounding."""
    return one[0] < other[0] or (one[0] == other[0] and one[1] < other[1] * (1 - _ROUNDING))


class _Floor:
    """What steps take at least; see [Note: floor]."""

    def __init__(self, program: Program, num_steps: int) -> None:
        self._program, self._num_steps = program, num_steps
        self._items = list(_in_order(program))
        queues = [(c.source, c.target, c in program.skips) for c in program.channels]
        self._queues = [queues.index(queue) for queue in queues]
        self._meets = not program.forward_only

    def seconds(self, costs: Sequence[Costs]) -> list[float]:
        """Returns the least seconds of all steps together, for each of some costs."""
        program, first = self._program, costs[0]
        host, ranks = first.host, program.schedule.stage_to_rank
        links = [program.links[channel.link] for channel in program.channels]
        computes = (
            host.action_seconds
            + np.array(
                [[stage.seconds(kind) for stage in own.stages for kind in KINDS] for own in costs]
            ).T
        )
        crossings = [
            [own.crossing(link, c) for own in costs]
            for link, c in zip(links, program.channels, strict=True)
        ]
        sends, receives, ways = (list[np.ndarray]() for _ in range(3))
        latencies = list[float]()
        for channel, own in zip(program.channels, crossings, strict=True):
            link = first.network.link(channel.source, channel.target)
            whole = [
                first.network.seconds(channel.source, channel.target, c.num_bytes) for c in own
            ]
            ways.append(np.array(whole) - link.latency_seconds)
            latencies.append(link.latency_seconds)
            sends.append(np.array([host.message_seconds + c.encode_seconds for c in own]))
            receives.append(np.array([host.message_seconds + c.decode_seconds for c in own]))
        optimizers = np.zeros((len(program.items), len(costs)))
        if self._meets:
            for stage, rank in enumerate(ranks):
                optimizers[rank] += [own.stages[stage].optimizer_seconds for own in costs]
        clocks = np.zeros((len(program.items), len(costs)))
        free = np.zeros((len(program.channels), len(costs)))
        there = dict[tuple[int, int], np.ndarray]()
        for _ in range(self._num_steps):
            clocks += host.step_seconds
            for op, rank, which, microbatch in self._items:
                clock = clocks[rank]
                if op == _COMPUTE:
                    clock += computes[which]
                    continue
                if op == _SEND:
                    clock += sends[which]
                    queue = free[self._queues[which]]
                    np.maximum(queue, clock, out=queue)
                    queue += ways[which]
                    there[which, microbatch] = queue + latencies[which]
                    continue
                np.maximum(clock, there.pop((which, microbatch)), out=clock)
                clock += receives[which]
            if self._meets and first.ranks_meet:
                clocks[:] = clocks.max(axis=0) + first.meeting_seconds
            clocks += optimizers
        return [float(seconds) for seconds in clocks.max(axis=0)]

    def held_bytes(self, costs: Costs) -> int:
        """Returns what the fullest rank holds at least: all but what it sends and receives."""
        most = 0
        for rank, actions in enumerate(self._program.schedule.actions):
            stages = self._program.schedule.stage_to_rank
            held = sum(
                own.held_bytes for own, r in zip(costs.stages, stages, strict=True) if r == rank
            )
            changes = list[int]()
            for action in actions:
                own = costs.stages[action.stage]
                full, factors = own.activation_bytes, own.factor_bytes
                changes.append(
                    {"F": full, "B": -full, "I": factors - full, "W": -factors}[action.kind]
                )
            most = max(most, held + max(accumulate(changes), default=0))
        return most


def _in_order(program: Program) -> Iterator[tuple[int, int, int, int]]:
    """Yields the items that take time, each behind those that it waits for.

    Each is an op, a rank, a number of a compute or channel, and a microbatch.
    """
    positions, sent = [0] * len(program.items), set[int]()
    is_over = False
    while not is_over:
        is_over = True
        for rank, items in enumerate(program.items):
            while positions[rank] < len(items):
                op, rest = items[positions[rank]] & OP_MASK, items[positions[rank]] >> OP_BITS
                if op == _RECEIVE and rest not in sent:
                    break
                if op == _SEND:
                    sent.add(rest)
                positions[rank] += 1
                is_over = False
                if op in (_COMPUTE, _SEND, _RECEIVE):
                    which, microbatch = rest >> MICROBATCH_BITS, rest & (2**MICROBATCH_BITS - 1)
                    yield op, rank, which, microbatch
