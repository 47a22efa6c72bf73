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
    MICROBATCH_MASK,
    Op,
    Program,
)
from pipegrad.schedules.program.run import RankRun, Run
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.simulator import simulate

_UNIT_SECONDS = 1e-9
Cost = Callable[[int, int, int], float]  # of a stage that holds the layers from a start to an end


def balanced_seconds(seconds: Iterable[float], num_stages: int) -> tuple[int, ...]:
    """Returns starts that make the longest stage short, of layers that take so many seconds."""
    # Whole numbers, so that no rounding decides between equal cuts.
    sums = [0, *accumulate(round(own / _UNIT_SECONDS) for own in seconds)]
    starts = balanced(len(sums) - 1, num_stages, lambda _, start, end: sums[end] - sums[start])
    return tuple(starts)


def balanced(num_layers: int, num_stages: int, cost: Cost) -> list[int]:
    """Returns starts that make the heaviest stage light, and then the others even."""
    # best[end]: cost of cutting the first `end` layers into the stages so far, and their starts.
    # Costs are compared by the heaviest stage, then by the sum of squares: an even cut.
    last = num_layers - num_stages + 1  # each later stage needs a layer
    best: dict[int, tuple[tuple[float, float], list[int]]] = {
        end: ((cost(0, 0, end), cost(0, 0, end) ** 2), []) for end in range(1, last + 1)
    }
    for stage in range(1, num_stages):
        best = {
            end: _best_start(best, stage, end, cost) for end in range(stage + 1, last + stage + 1)
        }
    return best[num_layers][1]


def _best_start(
    best: dict[int, tuple[tuple[float, float], list[int]]], stage: int, end: int, cost: Cost
) -> tuple[tuple[float, float], list[int]]:
    """Returns the best cost of the first `end` layers with one more stage, and its starts."""
    lightest = None
    for start in range(min(end - 1, max(best)), stage - 1, -1):
        weight = cost(stage, start, end)
        if lightest is not None and weight > lightest[0][0]:
            break  # a stage of more layers is no lighter
        (heaviest, squares), starts = best[start]
        candidate = (max(heaviest, weight), squares + weight**2), [*starts, start]
        lightest = candidate if lightest is None else min(lightest, candidate)
    assert lightest is not None
    return lightest


Begins = tuple[int, ...]  # the first layer of every stage but the first
Weight = tuple[float, float]  # bytes beyond the limit, and seconds of the steps

_ALL_TRIED = 2_000  # cuts; of more, neighbours are tried
_MOST_ITEMS = 400_000  # of all simulations together, which then take some seconds
_MOST_FLOORS = 1_000_000  # likewise: cuts times stages, and items
EQUAL = 0.005  # steps that differ by less take equally long: more activations must buy something
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
            before, moved, after = begins[: low - 1], begins[low - 1 : high - 1], begins[high - 1 :]
            if edges[high - 1] + 1 < edges[high]:
                yield *before, *(begin + 1 for begin in moved), *after
            if edges[low] - 1 > edges[low - 1]:
                yield *before, *(begin - 1 for begin in moved), *after


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
        """Simulates cuts whose floors are below the best step; returns whether one is better."""
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
    """Returns True if a weight is less, by more than rounding."""
    return one[0] < other[0] or (one[0] == other[0] and one[1] < other[1] * (1 - _ROUNDING))


class _Floor:
    """What steps take at least; see [Note: floor]."""

    def __init__(self, program: Program, num_steps: int) -> None:
        self._program, self._num_steps = program, num_steps
        self._items = _Order(program).items
        queues = [(c.source, c.target, c in program.skips) for c in program.channels]
        self._queues = [queues.index(queue) for queue in queues]
        self._meets = not program.forward_only

    def seconds(self, costs: Sequence[Costs]) -> list[float]:
        """Returns the least seconds of all steps together, for each of some costs."""
        program, network, host = self._program, costs[0].network, costs[0].host
        kinds = [[stage.seconds(kind) for stage in own.stages for kind in KINDS] for own in costs]
        computes = host.action_seconds + np.array(kinds).T
        messages = list[tuple[np.ndarray, np.ndarray, float, np.ndarray]]()
        for channel in program.channels:
            link, ends = program.links[channel.link], (channel.source, channel.target)
            values = [own.crossing(link, channel) for own in costs]
            latency = network.link(*ends).latency_seconds
            whole = [network.seconds(*ends, value.num_bytes) for value in values]
            encode = [host.message_seconds + value.encode_seconds for value in values]
            decode = [host.message_seconds + value.decode_seconds for value in values]
            messages.append(
                (np.array(encode), np.array(whole) - latency, latency, np.array(decode))
            )
        optimizers = np.zeros((len(program.items), len(costs)))
        if self._meets:
            for stage, rank in enumerate(program.schedule.stage_to_rank):
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
                elif op == _SEND:
                    encoding, way, latency, _ = messages[which]
                    clock += encoding
                    queue = free[self._queues[which]]
                    np.maximum(queue, clock, out=queue)
                    queue += way
                    there[which, microbatch] = queue + latency
                else:
                    np.maximum(clock, there.pop((which, microbatch)), out=clock)
                    clock += messages[which][-1]
            if self._meets and costs[0].ranks_meet:
                clocks[:] = clocks.max(axis=0) + costs[0].meeting_seconds
            clocks += optimizers
        return [float(seconds) for seconds in clocks.max(axis=0)]

    def held_bytes(self, costs: Costs) -> int:
        """Returns what the fullest rank holds at least: all but what it sends and receives."""
        schedule, most = self._program.schedule, 0
        for rank, actions in enumerate(schedule.actions):
            held = zip(costs.stages, schedule.stage_to_rank, strict=True)
            always = sum(own.held_bytes for own, holder in held if holder == rank)
            changes = (costs.stages[a.stage].changed_bytes(a.kind) for a in actions)
            most = max(most, always + max(accumulate(changes), default=0))
        return most


class _Order(Run):
    """The items that take time, each after those that it waits for.

    Attributes:
        items: Each is an op, a rank, a number of a compute or channel, and a microbatch.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.items = list[tuple[int, int, int, int]]()
        self.go()

    def _do(self, rank: RankRun, op: int, rest: int) -> None:
        super()._do(rank, op, rest)
        if op in (_COMPUTE, _SEND, _RECEIVE):
            which, microbatch = rest >> MICROBATCH_BITS, rest & MICROBATCH_MASK
            self.items.append((op, rank.rank, which, microbatch))
