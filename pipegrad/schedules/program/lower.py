"""lower: turns a schedule into the Program of every rank.

A Program leaves no decision to the executor. So everything about the order of transfers is decided
here, once, for all ranks.
"""

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

# How many receives of an edge are posted ahead. On gloo a sender waits for a notice that its
# receive is posted, which takes a round trip. So receives must be posted early. Each of them holds
# a buffer, and more than two gained nothing (benchmarks/network).
DEPTH = 2
Transfer = tuple[int, int]  # channel and microbatch


def chain(num_stages: int) -> tuple[Link, ...]:
    """Returns the links of a pipeline in which each stage hands one value to the next stage."""
    return tuple(Link("x", stage, (stage + 1,)) for stage in range(num_stages - 1))


def lower(
    schedule: Schedule,
    *,
    links: Sequence[Link] | None = None,
    depth: int = DEPTH,
    collectives: Sequence[Collective] = (),
    forward_only: bool = False,
) -> Program:
    """Returns everything that every rank does to run `schedule`.

    The function is pure, and `verify` proves its result. An edge is an ordered pair of ranks. The
    transfers of an edge are received in the order in which they are sent. A receive is posted when
    the transfer that is `depth` earlier on its edge is waited for. The first action that reads a
    value waits for it, and no earlier action does. A sent tensor is released when a message that
    comes back proves that it arrived.

    Args:
        schedule: What every rank computes.
        links: The values that stages hand on. By default each stage hands ``x`` to the next.
        depth: How many receives of an edge are posted ahead of the receive that is waited for.
        collectives: Reductions, in the order in which they are launched.
        forward_only: True leaves out all backwards and reductions. The waits for parameters stay.

    Raises:
        ScheduleError: If a link names an unknown stage or goes back to an earlier one, or if depth
            is negative.
    """
    if depth < 0:
        raise ScheduleError(f"depth is {depth}, expected 0 or more receives posted ahead")
    if links is None:
        links = chain(len(schedule.stage_to_rank))
    _check_links(links, len(schedule.stage_to_rank))
    if forward_only:
        actions = tuple(tuple(a for a in of_rank if a.kind == "F") for of_rank in schedule.actions)
        schedule = replace(schedule, actions=actions)
        collectives = [c for c in collectives if c.readers]
    lowering = _Lowering(schedule, tuple(links), forward_only)
    items = lowering.items(depth, tuple(collectives))
    return Program(
        schedule,
        tuple(links),
        tuple(lowering.channels),
        tuple(collectives),
        tuple(items),
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
    """Which transfers the actions of all ranks need and start.

    A position is the index of an action among the actions of its rank.
    """

    def __init__(self, schedule: Schedule, links: tuple[Link, ...], forward_only: bool) -> None:
        self._schedule = schedule
        self._rank_of = schedule.stage_to_rank
        self._links = links
        self._forward_only = forward_only
        self.channels: list[Channel] = []
        self._number: dict[Channel, int] = {}
        self._links_taken = defaultdict[int, list[int]](list)  # stage -> links it takes
        self._links_produced = defaultdict[int, list[int]](list)  # stage -> links it makes
        for number, link in enumerate(links):
            self._links_produced[link.producer].append(number)
            for consumer in link.consumers:
                self._links_taken[consumer].append(number)
        # rank -> for each position the transfers that the action needs, and those that it starts.
        self._needs: list[list[list[Transfer]]] = []
        self._starts: list[list[list[Transfer]]] = []
        for rank, actions in enumerate(schedule.actions):
            self._needs.append([])
            self._starts.append([])
            self._follow(rank, actions)

    def items(self, depth: int, collectives: tuple[Collective, ...]) -> Iterable[array[int]]:
        """Yields the items of each rank."""
        sent = self._by_edge(self._starts)
        incoming = defaultdict[int, dict[int, list[Transfer]]](dict)
        targets = defaultdict[int, list[int]](list)
        for (source, target), messages in sorted(sent.items()):
            incoming[target][source] = [transfer for transfer, _ in messages]
            targets[source].append(target)
        waited = {
            (rank, transfer): position
            for rank, needs in enumerate(self._needs)
            for position, transfers in enumerate(needs)
            for transfer in transfers
        }
        for rank, actions in enumerate(self._schedule.actions):
            receives = _Receives(incoming[rank], depth)
            released = self._releases(rank, targets[rank], sent, waited)
            last = _last(actions, ("B", "W"))
            last_inputs = _last(actions, ("B", "I"))
            launches = _Launches(rank, {action.stage for action in actions}, collectives)
            items = array("q", receives.first())
            for position, action in enumerate(actions):
                needs = self._needs[rank][position]
                # Receives come first: other ranks may wait for them to be posted. Only after the
                # waits is it proven that a tensor of this rank has arrived and can be released.
                items.extend(receives.before(needs))
                items.extend(encode(Op.RELEASE, *t) for t in released.get(position, ()))
                items.extend(self._before(action, launches, last.get(action.stage) == position))
                items.append(encode(Op.COMPUTE, action_index(action), action.microbatch))
                items.extend(encode(Op.SEND, *t) for t in self._starts[rank][position])
                # If W of the stage is still to come, only weight gradients are left. Those that
                # other ranks wait for can then be computed before the others.
                if last_inputs.get(action.stage) == position < last.get(action.stage, -1):
                    items.extend(self._inputs_final(action.stage, launches))
                if last.get(action.stage) == position:
                    # Right behind the last backward or W, behind the sends that other ranks compute
                    # with: gradients leave while this rank goes on with other stages.
                    items.append(encode(Op.FINAL, action.stage))
                    items.extend(launches.after(action.stage))
            # No message proves that these sends have arrived. So they are released at the end of
            # the step, where the rank waits for them.
            items.extend(encode(Op.RELEASE, *t) for t in released.get(-1, ()))
            if not self._forward_only:
                items.extend(launches.published())
            yield items

    def _before(self, action: Action, launches: _Launches, is_last: bool) -> Iterable[int]:
        """Yields the other items that come before an action."""
        stage, kind, microbatch = action
        if kind == "F":
            yield from launches.first_use(stage)
        # Gradients of one value that come from several ranks are summed before the backward that
        # reads them. The order of the sum is that of the ranks, so it is the same in every step.
        if kind in ("B", "I"):
            for link in self._links_produced[stage]:
                ranks = {self._rank_of[c] for c in self._links[link].consumers}
                if self._links[link].differentiable and len(ranks) > 1:
                    yield encode(Op.JOIN, link, microbatch)
        if kind == "B" and is_last:
            yield encode(Op.LAST_BACKWARD, stage)

    def _inputs_final(self, stage: int, launches: _Launches) -> Iterable[int]:
        """Yields the items for a stage that has only weight gradients left."""
        yield encode(Op.INPUTS_FINAL, stage)
        if self._schedule.head_w_first and launches.is_shared(stage):
            yield encode(Op.SHARED_WEIGHTS, stage)

    # Transfers that an action needs, and transfers that it starts.

    def _follow(self, rank: int, actions: Sequence[Action]) -> None:
        # A value is received once, by the first stage of this rank that takes it. Later stages of
        # the rank read the same buffer.
        received = set[Transfer]()
        left = self._consumers_left(actions)
        for stage, kind, microbatch in actions:
            needs, starts = list[Transfer](), list[Transfer]()
            if kind == "F":
                needs = [t for t in self._received_by(stage, rank, microbatch) if t not in received]
                received.update(needs)
                starts = [
                    self._transfer(link, "F", rank, target, microbatch)
                    for link in self._links_produced[stage]
                    for target in self._ranks(link, rank)
                ]
            elif kind in ("B", "I"):
                needs = [
                    self._transfer(link, "B", source, rank, microbatch)
                    for link in self._links_produced[stage]
                    if self._links[link].differentiable
                    for source in self._ranks(link, rank)
                ]
                starts = self._returned(stage, rank, microbatch, left)
            self._needs[rank].append(needs)
            self._starts[rank].append(starts)

    def _received_by(self, stage: int, rank: int, microbatch: int) -> list[Transfer]:
        """Returns the transfers that a stage's forward takes from other ranks."""
        sources = [
            (link, self._rank_of[self._links[link].producer]) for link in self._links_taken[stage]
        ]
        return [self._transfer(i, "F", s, rank, microbatch) for i, s in sources if s != rank]

    def _returned(
        self, stage: int, rank: int, microbatch: int, left: dict[tuple[int, int], int]
    ) -> list[Transfer]:
        """Returns the gradients that leave with a stage's backward."""
        # Several stages of this rank may take one value. Their gradients are summed here first, and
        # the sum leaves once, with the last of their backwards.
        transfers = list[Transfer]()
        for link in self._links_taken[stage]:
            target = self._rank_of[self._links[link].producer]
            left[link, microbatch] -= 1
            last = left[link, microbatch] == 0
            if target != rank and self._links[link].differentiable and last:
                transfers.append(self._transfer(link, "B", rank, target, microbatch))
        return transfers

    def _consumers_left(self, actions: Sequence[Action]) -> dict[tuple[int, int], int]:
        """Returns for each link and microbatch how many backwards of a rank use it."""
        left = defaultdict[tuple[int, int], int](int)
        for stage, kind, microbatch in actions:
            if kind in ("B", "I"):
                for link in self._links_taken[stage]:
                    left[link, microbatch] += 1
        return left

    def _ranks(self, link: int, rank: int) -> list[int]:
        """Returns the other ranks that take a link, ascending."""
        return sorted({self._rank_of[c] for c in self._links[link].consumers} - {rank})

    def _transfer(
        self, link: int, kind: str, source: int, target: int, microbatch: int
    ) -> Transfer:
        channel = Channel(link, "F" if kind == "F" else "B", source, target)
        if channel not in self._number:
            self._number[channel] = len(self.channels)
            self.channels.append(channel)
        return self._number[channel], microbatch

    # When a receive is posted, and when a sent tensor is released.

    def _by_edge(
        self, table: Sequence[Sequence[Sequence[Transfer]]]
    ) -> dict[tuple[int, int], list[tuple[Transfer, int]]]:
        """Returns for each edge its transfers in the order of sending, with their positions."""
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
        targets: Sequence[int],
        sent: dict[tuple[int, int], list[tuple[Transfer, int]]],
        waited: dict[tuple[int, Transfer], int],
    ) -> dict[int, list[Transfer]]:
        """Returns position -> the sends of a rank that have arrived by then; -1 is the end.

        A peer waits for a transfer and then sends a message back. If this rank has received that
        message, the transfer has arrived. The first such message is used.
        """
        releases = defaultdict[int, list[Transfer]](list)
        for peer in targets:
            messages = sent[rank, peer]
            back = sent.get((peer, rank), [])
            for transfer, _ in messages:
                arrived = waited.get((peer, transfer), len(self._schedule.actions[peer]))
                answer = bisect_left(back, arrived, key=itemgetter(1))
                proven = waited.get((rank, back[answer][0])) if answer < len(back) else None
                releases[-1 if proven is None else proven].append(transfer)
        return releases


class _Launches:
    """Which collectives of a rank are launched when a stage is final.

    Each comm stream has a queue. Its collectives are launched in one order on all ranks, so a
    collective waits until all collectives before it in the queue have left.
    """

    def __init__(self, rank: int, local: set[int], collectives: Sequence[Collective]) -> None:
        self._queues = defaultdict[int, list[int]](list)
        self._missing: dict[int, set[int]] = {}
        self._synced: list[int] = []
        self._unused = set[int]()
        self._shared = set[int]()
        for number, collective in enumerate(collectives):
            if rank in collective.ranks:
                stages = local.intersection(collective.stages)
                self._queues[collective.comm_stream].append(number)
                self._missing[number] = stages
                # Only a collective of several ranks makes another rank of the pipeline wait.
                if len(collective.ranks) > 1:
                    self._shared |= stages
                if collective.readers:
                    self._synced.append(number)
                    self._unused |= local.intersection(collective.readers)

    def is_shared(self, stage: int) -> bool:
        """True if other ranks of the pipeline wait for gradients of a stage."""
        return stage in self._shared

    def first_use(self, stage: int) -> Iterable[int]:
        """Yields the item before the first forward of a stage, if a parameter sync writes to it."""
        if stage in self._unused:
            self._unused.remove(stage)
            yield encode(Op.FIRST_USE, stage)

    def after(self, stage: int) -> list[int]:
        """Returns the items of the collectives that leave when a stage becomes final."""
        for stages in self._missing.values():
            stages.discard(stage)
        # A collective that is ready waits behind one that is not. All ranks then issue the same
        # order on each comm stream, so no order of final stages can deadlock them.
        items = list[int]()
        for queue in self._queues.values():
            while queue and not self._missing[queue[0]]:
                items.append(encode(Op.LAUNCH, queue.pop(0)))
        return items

    def published(self) -> Iterable[int]:
        """Yields the items that send parameters after the step."""
        for number in self._synced:
            yield encode(Op.PUBLISH, number)


class _Receives:
    """The receives of a rank: posted in the order of each edge, waited for when needed."""

    def __init__(self, incoming: dict[int, list[Transfer]], depth: int) -> None:
        self._incoming = incoming
        self._depth = depth
        self._position = {
            t: (s, i) for s, transfers in incoming.items() for i, t in enumerate(transfers)
        }
        self._posted = dict.fromkeys(incoming, 0)

    def first(self) -> Iterable[int]:
        """Yields the items at the start of a step."""
        for source in sorted(self._incoming):
            yield from self._post(source, self._depth)

    def before(self, needs: Sequence[Transfer]) -> Iterable[int]:
        """Yields the items before an action."""
        # All receives are posted before the first wait. Otherwise the wait for one edge could delay
        # the post on another edge, and the rank that is waited for may need that post.
        for transfer in needs:
            if transfer in self._position:  # otherwise no rank sends it, and `verify` refuses it
                source, number = self._position[transfer]
                yield from self._post(source, number + 1 + self._depth)
        for transfer in needs:
            yield encode(Op.WAIT_RECEIVE, *transfer)

    def _post(self, source: int, number: int) -> Iterable[int]:
        posted = self._posted[source]
        for transfer in self._incoming[source][posted:number]:
            yield encode(Op.POST_RECEIVE, *transfer)
            self._posted[source] += 1


def _last(actions: Sequence[Action], kinds: Sequence[Kind]) -> dict[int, int]:
    """Returns for each stage the position of its last action of some kinds."""
    return {a.stage: position for position, a in enumerate(actions) if a.kind in kinds}
