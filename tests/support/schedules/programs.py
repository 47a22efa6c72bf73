"""Random Programs, and a run of a Program in a random order of what can happen."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from hypothesis import strategies as st

from pipegrad.schedules import Action, Kind, Schedule
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.program import Item, Link, Op, Program

KINDS: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
Key = tuple[int, int]  # a channel, link or stage, and a microbatch


def rows(*texts: str, stages: tuple[int, ...] = (0, 1), num_microbatches: int = 1) -> Schedule:
    """Returns a schedule from its rows, ``"0F0 0B0"``."""
    actions = [
        tuple(Action(int(word[0]), KINDS[word[1]], int(word[2:])) for word in text.split())
        for text in texts
    ]
    return Schedule("mine", num_microbatches, stages, tuple(actions))


def places_of(program: Program, rank: int, *ops: Op) -> list[tuple[int, Item]]:
    """Returns the items of some kinds of a rank, and where they are."""
    return [(at, item) for at, item in enumerate(program.decoded(rank)) if item.op in ops]


# Random Programs.


def random_program(num_ranks: int, num_microbatches: int, depth: int, seed: int) -> Program:
    """Returns a Program that can be run: any placement, links, order and parameter syncs."""
    chance = random.Random(seed)
    places = [rank for rank in range(num_ranks) for _ in range(chance.randint(1, 3))]
    chance.shuffle(places)
    links = _random_links(chance, len(places))
    actions = tuple(random_order(chance, links, len(places), num_microbatches))
    by_rank = tuple(tuple(a for a in actions if places[a.stage] == r) for r in range(num_ranks))
    first = chance.random() < 0.5
    schedule = Schedule("random", num_microbatches, tuple(places), by_rank, head_w_first=first)
    synced = [stage for stage in range(len(places)) if chance.random() < 0.3]
    return lower(schedule, links=links, depth=depth, synced=synced)


def programs(min_ranks: int = 1) -> st.SearchStrategy[Program]:
    """Returns what draws random Programs; their sizes shrink."""
    return st.builds(
        random_program,
        num_ranks=st.integers(min_ranks, 5),
        num_microbatches=st.integers(1, 6),
        depth=st.integers(0, 5),
        seed=st.integers(0, 2**16),
    )


def _random_links(chance: random.Random, num_stages: int) -> list[Link]:
    links = [Link("x", stage, (stage + 1,)) for stage in range(num_stages - 1)]
    for number in range(chance.randint(0, 3) if num_stages > 2 else 0):
        producer = chance.randrange(num_stages - 2)
        later = range(producer + 1, num_stages)
        consumers = sorted(chance.sample(later, chance.randint(1, min(3, len(later)))))
        links.append(Link(f"skip{number}", producer, tuple(consumers), chance.random() < 0.7))
    chance.shuffle(links)
    return links


def random_order(
    chance: random.Random,
    links: Sequence[Link],
    num_stages: int,
    num_microbatches: int,
    *,
    in_order: bool = False,
) -> Iterator[Action]:
    """Yields all actions, each after what it needs; some backwards split.

    With `in_order` each stage takes its forwards in the order of microbatches.
    """
    ends: dict[Key, Kind] = {
        (stage, microbatch): chance.choice(("B", "B", "I"))
        for stage in range(num_stages)
        for microbatch in range(num_microbatches)
    }
    needs: dict[Action, set[Action]] = {}
    for (stage, microbatch), end in ends.items():
        forward, backward = Action(stage, "F", microbatch), Action(stage, end, microbatch)
        makers = [link.producer for link in links if stage in link.consumers]
        readers = [
            c for k in links if k.producer == stage and k.differentiable for c in k.consumers
        ]
        needs[forward] = {Action(s, "F", microbatch) for s in makers}
        if in_order and microbatch:
            needs[forward].add(Action(stage, "F", microbatch - 1))
        needs[backward] = {forward} | {Action(s, ends[s, microbatch], microbatch) for s in readers}
        if end == "I":
            needs[Action(stage, "W", microbatch)] = {backward}
    haste = chance.choice((1, 1, 20))  # how much rather a backward, as 1f1b does
    while needs:
        ready = [action for action, left in needs.items() if not left]
        (chosen,) = chance.choices(ready, [1 if a.kind == "F" else haste for a in ready])
        del needs[chosen]
        for left in needs.values():
            left.discard(chosen)
        yield chosen


def with_items(program: Program, rank: int, items: Sequence[int]) -> Program:
    """Returns the Program with other items of one rank."""
    row = program.items[rank][:0]
    row.extend(items)
    return replace(program, items=(*program.items[:rank], row, *program.items[rank + 1 :]))


# A run.


class DeadlockError(Exception):
    """Nothing can go on, and not all has ended."""


@dataclass
class _Edge:
    """Transfers from one rank to another, one at a time, in the order of sending."""

    sent: list[tuple[Key, int]] = field(default_factory=list)
    posted: list[Key] = field(default_factory=list)
    num_arrived: int = 0


class Run:
    """Plays a Program with numbers for values; what happens next is drawn of all that can.

    A transfer arrives some time after it is sent and its receive is posted, behind those before it
    of its edge. Some ranks and edges are a thousand times slower than others.

    Attributes:
        values: What each forward made, by stage and microbatch.
        gradients: What each backward made, by stage and microbatch.
        live: For each rank the most forwards that waited for their backward.
        graphs: For each rank the most forwards that waited for their inputs' gradients.
        buffers: For each rank the most buffers for what is received.
        in_flight: For each rank the most receives that were posted, and not waited for.
        held_up: The actions that came later because a release in front of them had to wait.
        arrived: What transfers carried, by channel and microbatch.
    """

    def __init__(self, program: Program, seed: int) -> None:
        self.values: dict[Key, int] = {}
        self.gradients: dict[Key, int] = {}
        self.held_up = list[Action]()
        self.arrived: dict[Key, int] = {}
        self._program = program
        self._edges = defaultdict[tuple[int, int], _Edge](_Edge)
        self._workers = [_Worker(self, program, rank) for rank in range(len(program.items))]
        chance = random.Random(seed)
        haste = defaultdict[object, float](lambda: chance.choice((1.0, 1.0, 1e-3)))
        while events := dict(self._possible()):
            (chosen,) = chance.choices(list(events), [haste[event] for event in events])
            events[chosen]()
        if any(w.place < len(w.items) for w in self._workers):
            raise DeadlockError(str([w.place for w in self._workers]))
        mosts = [worker.most for worker in self._workers]
        self.live = [most["live"] for most in mosts]
        self.graphs = [most["graphs"] for most in mosts]
        self.buffers = [most["buffers"] for most in mosts]
        self.in_flight = [most["in flight"] for most in mosts]

    def edge(self, channel: int) -> _Edge:
        """Returns the edge of a channel."""
        _, _, source, target = self._program.channels[channel]
        return self._edges[source, target]

    def _possible(self) -> Iterator[tuple[object, Callable[[], object]]]:
        """Yields names of what can happen now, and what does it."""
        for rank, worker in enumerate(self._workers):
            if worker.can_go():
                yield rank, worker.go
        for ends, edge in self._edges.items():
            if edge.num_arrived < min(len(edge.sent), len(edge.posted)):
                yield ends, partial(self._arrive, edge)

    def _arrive(self, edge: _Edge) -> None:
        key, payload = edge.sent[edge.num_arrived]
        assert key == edge.posted[edge.num_arrived], "a buffer got what was meant for another"
        edge.num_arrived += 1
        self.arrived[key] = payload


class _Worker:
    """A rank of a run."""

    def __init__(self, run: Run, program: Program, rank: int) -> None:
        self.items = list(program.decoded(rank))
        self.place = 0
        self.most = defaultdict[str, int](int)
        self._now = defaultdict[str, int](int)
        self._run, self._program, self._rank = run, program, rank
        self._here = {s for s, p in enumerate(program.schedule.stage_to_rank) if p == rank}
        self._inputs: dict[Key, int] = {}  # of a link and microbatch
        self._parts: dict[Key, list[int]] = defaultdict(list)  # gradients of consumers here
        self._returned: dict[Key, dict[int, int]] = defaultdict(dict)  # from consumers elsewhere
        self._readers: dict[Key, int] = {}  # how many backwards still read a received value
        self._went_back = defaultdict[int, int](int)
        self._ended = defaultdict[int, int](int)

    def can_go(self) -> bool:
        """Whether its next item waits for nothing."""
        if self.place == len(self.items):
            return False
        op, which, microbatch = self.items[self.place]
        if op not in (Op.WAIT_RECEIVE, Op.RELEASE) or (which, microbatch) in self._run.arrived:
            return True
        ahead = [item for item in self.items[self.place :] if item.op is Op.COMPUTE]
        if op is Op.RELEASE and ahead:
            self._run.held_up.append(self._program.action(ahead[0]))
        return False

    def go(self) -> None:
        """Does its next item."""
        op, which, microbatch = item = self.items[self.place]
        if op is Op.COMPUTE:
            self._compute(self._program.action(item))
        elif op is Op.WAIT_RECEIVE:
            self._receive(which, microbatch, self._run.arrived[which, microbatch])
        else:
            self._start(op, which, microbatch)
        self.place += 1

    def _start(self, op: Op, which: int, microbatch: int) -> None:
        if op is Op.POST_RECEIVE:
            self._count("buffers", 1)
            self._count("in flight", 1)
            self._run.edge(which).posted.append((which, microbatch))
        elif op is Op.SEND:
            payload = self._payload(which, microbatch)
            self._run.edge(which).sent.append(((which, microbatch), payload))
        elif op is Op.FINAL:
            assert self._ended[which] == self._program.schedule.num_microbatches
        elif op in (Op.INPUTS_FINAL, Op.SHARED_WEIGHTS):
            number = self._program.schedule.num_microbatches
            assert self._went_back[which] == number > self._ended[which]

    def _count(self, name: str, by: int) -> None:
        self._now[name] += by
        self.most[name] = max(self.most[name], self._now[name])

    def _receive(self, channel: int, microbatch: int, payload: int) -> None:
        link, kind, source, _ = self._program.channels[channel]
        self._count("in flight", -1)
        if kind == "F":
            self._inputs[link, microbatch] = payload
            consumers = self._here.intersection(self._program.links[link].consumers)
            self._readers[link, microbatch] = len(consumers)
        else:
            self._returned[link, microbatch][source] = payload

    def _payload(self, channel: int, microbatch: int) -> int:
        link, kind, _, _ = self._program.channels[channel]
        if kind == "F":
            return (link + 1) * self._run.values[self._program.links[link].producer, microbatch]
        parts = self._parts.pop((link, microbatch))
        assert len(parts) == len(self._here.intersection(self._program.links[link].consumers))
        return sum(parts)

    def _sum(self, link: int, microbatch: int) -> int:
        parts = self._parts.pop((link, microbatch), [])
        returned = self._returned.pop((link, microbatch), {})
        consumers = self._program.links[link].consumers
        elsewhere = {self._program.schedule.stage_to_rank[c] for c in consumers} - {self._rank}
        assert set(returned) == elsewhere
        assert len(parts) == len(self._here.intersection(consumers))
        return sum(parts) + sum(returned.values())

    def _compute(self, action: Action) -> None:
        stage, kind, microbatch = action
        links = list(enumerate(self._program.links))
        if kind == "F":
            taken = [self._inputs[n, microbatch] for n, k in links if stage in k.consumers]
            made = self._run.values[stage, microbatch] = value_of(action, taken)
            for number, link in links:
                if link.producer == stage:
                    self._inputs[number, microbatch] = (number + 1) * made
            self._count("live", 1)
            self._count("graphs", 1)
        elif kind != "W":
            self._backward(action)
            self._went_back[stage] += 1
            self._count("graphs", -1)
        if kind in ("B", "W"):
            self._ended[stage] += 1
            self._count("live", -1)
            self._free_gradients(stage)
        if kind in ("B", "W") or self._program.forward_only:
            for number, link in links:
                if stage in link.consumers and link.producer not in self._here:
                    self._readers[number, microbatch] -= 1
                    self._count("buffers", -(self._readers[number, microbatch] == 0))

    def _free_gradients(self, stage: int) -> None:
        """Frees the received gradients of a stage's outputs, which W reads too."""
        for link in self._program.links:
            if link.producer == stage and link.differentiable:
                ranks = {self._program.schedule.stage_to_rank[c] for c in link.consumers}
                self._count("buffers", -len(ranks - {self._rank}))

    def _backward(self, action: Action) -> None:
        stage, _, microbatch = action
        returned = list[int]()
        for number, link in enumerate(self._program.links):
            if link.producer == stage and link.differentiable:
                returned.append(self._sum(number, microbatch))
        made = self._run.gradients[stage, microbatch] = value_of(action, returned)
        for number, link in enumerate(self._program.links):
            if stage in link.consumers and link.differentiable:
                self._parts[number, microbatch].append((number + 1) * made)


def value_of(action: Action, taken: Sequence[int]) -> int:
    """Returns what a compute of numbers makes of what it takes."""
    return 1000 * action.stage + action.microbatch + 1 + sum(taken)


def expected(program: Program) -> tuple[dict[Key, int], dict[Key, int]]:
    """Returns values and gradients as one process computes them, stage by stage."""
    values, gradients = dict[Key, int](), dict[Key, int]()
    stages, links = range(len(program.schedule.stage_to_rank)), list(enumerate(program.links, 1))
    for m in range(program.schedule.num_microbatches):
        for stage in stages:
            taken = [n * values[k.producer, m] for n, k in links if stage in k.consumers]
            values[stage, m] = value_of(Action(stage, "F", m), taken)
        for stage in [] if program.forward_only else reversed(stages):
            made = [(n, k) for n, k in links if k.producer == stage and k.differentiable]
            back = [n * gradients[c, m] for n, k in made for c in k.consumers]
            gradients[stage, m] = value_of(Action(stage, "B", m), back)
    return values, gradients
