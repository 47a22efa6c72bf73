"""lower: a schedule into the Program of every rank, which leaves nothing to decide."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import itemgetter

from pipegrad.errors import ScheduleError
from pipegrad.schedules.program.program import (
    Channel,
    Collective,
    Link,
    Op,
    Program,
    action_index,
    encode,
)
from pipegrad.schedules.schedule import Action, Kind, Schedule

DEPTH = 4  # receives posted ahead: on gloo a sender waits for the notice of a receive, a round trip
Transfer = tuple[int, int]  # channel and microbatch


def chain(num_stages: int) -> tuple[Link, ...]:
    """Returns the links of a pipeline whose stages each hand one value to the next."""
    return tuple(Link("x", stage, (stage + 1,)) for stage in range(num_stages - 1))


def lower(
    schedule: Schedule,
    *,
    links: Sequence[Link] | None = None,
    depth: int = DEPTH,
    collectives: Sequence[Collective] = (),
    forward_only: bool = False,
) -> Program:
    """Returns everything that every rank does to run `schedule`. Pure; `verify` proves it.

    Each transfer is received in the order in which its edge, the ordered pair of ranks, sends. It
    is posted when the one `depth` before it is waited for, and waited for by the first action
    that reads it, and by nothing earlier. What was sent is let go of where a message that comes
    back proves that it arrived.

    Args:
        schedule: What every rank computes.
        links: The values that stages hand on; by default each hands ``x`` to the next.
        depth: How many receives of an edge are posted ahead of the one that is waited for.
        collectives: Reductions, in the order in which to launch them.
        forward_only: Leave out all backwards and reductions, but not the waits for parameters.

    Raises:
        ScheduleError: If links name stages that there are not, or go back; or depth is negative.
    """
    if depth < 0:
        raise ScheduleError(f"depth is {depth}, expected 0 or more receives posted ahead")
    if links is None:
        links = chain(len(schedule.stage_to_rank))
    _check_links(links, len(schedule.stage_to_rank))
    if forward_only:
        rows = tuple(tuple(a for a in row if a.kind == "F") for row in schedule.actions)
        schedule = replace(schedule, actions=rows)
        collectives = [c for c in collectives if c.readers]
    lowering = _Lowering(schedule, tuple(links), forward_only)
    rows_of_items = lowering.rows(depth, tuple(collectives))
    return Program(
        schedule,
        tuple(links),
        tuple(lowering.channels),
        tuple(collectives),
        tuple(rows_of_items),
        forward_only,
    )


def _check_links(links: Sequence[Link], num_stages: int) -> None:
    for link in links:
        stages = (link.producer, *link.consumers)
        inside = stages[0] >= 0 and stages[-1] < num_stages
        if not (link.consumers and inside and list(stages) == sorted(set(stages))):
            raise ScheduleError(
                f"link {link.name!r} goes from stage {link.producer} to stages "
                f"{list(link.consumers)}: expected later ones, ascending, below {num_stages}"
            )


class _Lowering:
    """What crosses where, and when. Positions are those of actions in their rank's row."""

    def __init__(self, schedule: Schedule, links: tuple[Link, ...], forward_only: bool) -> None:
        self._schedule = schedule
        self._places = schedule.stage_to_rank
        self._links = links
        self._forward_only = forward_only
        self.channels: list[Channel] = []
        self._number: dict[Channel, int] = {}
        self._taken = defaultdict[int, list[int]](list)  # stage -> links it takes
        self._made = defaultdict[int, list[int]](list)  # stage -> links it makes
        for number, link in enumerate(links):
            self._made[link.producer].append(number)
            for consumer in link.consumers:
                self._taken[consumer].append(number)
        # rank -> for each position the transfers an action needs, and those it starts.
        self._needs: list[list[list[Transfer]]] = []
        self._starts: list[list[list[Transfer]]] = []
        for rank, row in enumerate(schedule.actions):
            self._needs.append([])
            self._starts.append([])
            self._follow(rank, row)

    def rows(self, depth: int, collectives: tuple[Collective, ...]) -> Iterable[array[int]]:
        """Yields the items of each rank."""
        sent = self._by_edge(self._starts)
        waited = {
            (rank, transfer): position
            for rank, needs in enumerate(self._needs)
            for position, transfers in enumerate(needs)
            for transfer in transfers
        }
        for rank, row in enumerate(self._schedule.actions):
            incoming = {s: [t for t, _ in m] for (s, target), m in sent.items() if target == rank}
            receives = _Receives(incoming, depth)
            released = self._releases(rank, sent, waited)
            last = _last(row, ("B", "W"))
            last_inputs = _last(row, ("B", "I"))
            launches = _Launches(rank, {action.stage for action in row}, collectives)
            items = array("q", receives.first())
            for position, action in enumerate(row):
                needs = self._needs[rank][position]
                items.extend(receives.before(needs))
                items.extend(encode(Op.RELEASE, *t) for t in released.get(position, ()))
                items.extend(self._before(action, launches, last.get(action.stage) == position))
                items.append(encode(Op.COMPUTE, action_index(action), action.microbatch))
                items.extend(encode(Op.SEND, *t) for t in self._starts[rank][position])
                if last_inputs.get(action.stage) == position < last.get(action.stage, -1):
                    items.extend(self._inputs_final(action.stage, launches))
                if last.get(action.stage) == position:
                    items.append(encode(Op.FINAL, action.stage))
                    items.extend(launches.after(action.stage))
            items.extend(encode(Op.RELEASE, *t) for t in released.get(-1, ()))
            if not self._forward_only:
                items.extend(launches.published())
            yield items

    def _before(self, action: Action, launches: _Launches, is_last: bool) -> Iterable[int]:
        """Yields what else comes before an action."""
        stage, kind, microbatch = action
        if kind == "F":
            yield from launches.first_use(stage)
        if kind in ("B", "I"):
            for link in self._made[stage]:
                ranks = {self._places[c] for c in self._links[link].consumers}
                if self._links[link].differentiable and len(ranks) > 1:
                    yield encode(Op.JOIN, link, microbatch)
        if kind == "B" and is_last:
            yield encode(Op.LAST_BACKWARD, stage)

    def _inputs_final(self, stage: int, launches: _Launches) -> Iterable[int]:
        """Yields the items where nothing but weights' gradients of a stage is left."""
        yield encode(Op.INPUTS_FINAL, stage)
        if self._schedule.head_w_first and launches.is_shared(stage):
            yield encode(Op.SHARED_WEIGHTS, stage)

    # What an action needs from other ranks, and what it starts.

    def _follow(self, rank: int, row: Sequence[Action]) -> None:
        received = set[Transfer]()
        left = self._consumers_left(row)
        for stage, kind, microbatch in row:
            needs, starts = list[Transfer](), list[Transfer]()
            if kind == "F":
                needs = [t for t in self._taken_from(stage, rank, microbatch) if t not in received]
                received.update(needs)
                starts = [
                    self._transfer(link, "F", rank, target, microbatch)
                    for link in self._made[stage]
                    for target in self._ranks(link, rank)
                ]
            elif kind in ("B", "I"):
                needs = [
                    self._transfer(link, "B", source, rank, microbatch)
                    for link in self._made[stage]
                    if self._links[link].differentiable
                    for source in self._ranks(link, rank)
                ]
                starts = self._returned(stage, rank, microbatch, left)
            self._needs[rank].append(needs)
            self._starts[rank].append(starts)

    def _taken_from(self, stage: int, rank: int, microbatch: int) -> list[Transfer]:
        """Returns what a stage's forward takes from other ranks."""
        sources = [(link, self._places[self._links[link].producer]) for link in self._taken[stage]]
        return [self._transfer(i, "F", s, rank, microbatch) for i, s in sources if s != rank]

    def _returned(
        self, stage: int, rank: int, microbatch: int, left: dict[tuple[int, int], int]
    ) -> list[Transfer]:
        """Returns the gradients that leave with a stage's backward, the last of its rank."""
        found = list[Transfer]()
        for link in self._taken[stage]:
            target = self._places[self._links[link].producer]
            left[link, microbatch] -= 1
            last = left[link, microbatch] == 0
            if target != rank and self._links[link].differentiable and last:
                found.append(self._transfer(link, "B", rank, target, microbatch))
        return found

    def _consumers_left(self, row: Sequence[Action]) -> dict[tuple[int, int], int]:
        """Returns for each link and microbatch how many stages of a rank take it, and go back."""
        left = defaultdict[tuple[int, int], int](int)
        for stage, kind, microbatch in row:
            if kind in ("B", "I"):
                for link in self._taken[stage]:
                    left[link, microbatch] += 1
        return left

    def _ranks(self, link: int, rank: int) -> list[int]:
        """Returns the other ranks that take a link, ascending."""
        return sorted({self._places[c] for c in self._links[link].consumers} - {rank})

    def _transfer(
        self, link: int, kind: str, source: int, target: int, microbatch: int
    ) -> Transfer:
        channel = Channel(link, "F" if kind == "F" else "B", source, target)
        if channel not in self._number:
            self._number[channel] = len(self.channels)
            self.channels.append(channel)
        return self._number[channel], microbatch

    # When a transfer is posted, and when what was sent is let go of.

    def _by_edge(
        self, table: Sequence[Sequence[Sequence[Transfer]]]
    ) -> dict[tuple[int, int], list[tuple[Transfer, int]]]:
        """Returns for each edge its transfers in the order of sending, and the positions."""
        edges = defaultdict[tuple[int, int], list[tuple[Transfer, int]]](list)
        for positions in table:
            for position, transfers in enumerate(positions):
                for transfer in transfers:
                    _, _, source, target = self.channels[transfer[0]]
                    edges[source, target].append((transfer, position))
        return edges

    def _releases(
        self,
        rank: int,
        sent: dict[tuple[int, int], list[tuple[Transfer, int]]],
        waited: dict[tuple[int, Transfer], int],
    ) -> dict[int, list[Transfer]]:
        """Returns at which position which sends of a rank are known to have arrived; -1: the end.

        The peer has waited for one, then sent something: who receives that knows.
        """
        found = defaultdict[int, list[Transfer]](list)
        for (source, peer), messages in sorted(sent.items()):
            if source != rank:
                continue
            back = sent.get((peer, rank), [])
            for transfer, _ in messages:
                arrived = waited.get((peer, transfer), len(self._schedule.actions[peer]))
                answer = bisect_left(back, arrived, key=itemgetter(1))
                proof = waited.get((rank, back[answer][0])) if answer < len(back) else None
                found[-1 if proof is None else proof].append(transfer)
        return found


class _Receives:
    """What a rank receives: posted in the order of each edge, waited for where it is needed."""

    def __init__(self, incoming: dict[int, list[Transfer]], depth: int) -> None:
        self._incoming = incoming
        self._depth = depth
        self._place = {t: (s, i) for s, found in incoming.items() for i, t in enumerate(found)}
        self._posted = dict.fromkeys(incoming, 0)

    def first(self) -> Iterable[int]:
        """Yields the items at the start of a step."""
        for source in sorted(self._incoming):
            yield from self._post(source, self._depth)

    def before(self, needs: Sequence[Transfer]) -> Iterable[int]:
        """Yields the items before an action."""
        for transfer in needs:
            if transfer in self._place:  # else nobody sends it, as `verify` will say
                source, number = self._place[transfer]
                yield from self._post(source, number + 1 + self._depth)
        for transfer in needs:
            yield encode(Op.WAIT_RECEIVE, *transfer)

    def _post(self, source: int, number: int) -> Iterable[int]:
        posted = self._posted[source]
        for transfer in self._incoming[source][posted:number]:
            yield encode(Op.POST_RECEIVE, *transfer)
            self._posted[source] += 1


def _last(row: Sequence[Action], kinds: Sequence[Kind]) -> dict[int, int]:
    """Returns for each stage the position of its last action of some kinds."""
    return {a.stage: position for position, a in enumerate(row) if a.kind in kinds}


class _Launches:
    """Which collectives of a rank leave when a stage is final, in order, by comm stream."""

    def __init__(self, rank: int, local: set[int], collectives: Sequence[Collective]) -> None:
        self._queues = defaultdict[int, list[int]](list)
        self._missing: dict[int, set[int]] = {}
        self._mirrored: list[int] = []
        self._unused = set[int]()
        self._shared = set[int]()
        for number, collective in enumerate(collectives):
            if rank in collective.ranks:
                stages = local.intersection(collective.stages)
                self._queues[collective.comm_stream].append(number)
                self._missing[number] = stages
                if len(collective.ranks) > 1:
                    self._shared |= stages
                if collective.readers:
                    self._mirrored.append(number)
                    self._unused |= local.intersection(collective.readers)

    def is_shared(self, stage: int) -> bool:
        """Whether other ranks of the pipeline wait for gradients of a stage."""
        return stage in self._shared

    def first_use(self, stage: int) -> Iterable[int]:
        """Yields the item before the first forward of a stage whose parameters may be coming."""
        if stage in self._unused:
            self._unused.remove(stage)
            yield encode(Op.FIRST_USE, stage)

    def after(self, stage: int) -> list[int]:
        """Returns the items of those that leave now."""
        for stages in self._missing.values():
            stages.discard(stage)
        found = list[int]()
        for queue in self._queues.values():
            while queue and not self._missing[queue[0]]:
                found.append(encode(Op.LAUNCH, queue.pop(0)))
        return found

    def published(self) -> Iterable[int]:
        """Yields the items at the end of a step."""
        for number in self._mirrored:
            yield encode(Op.PUBLISH, number)
