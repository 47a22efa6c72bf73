"""lower: turns a schedule into the Program of every rank.

The order of transfers is decided here, once, for all ranks, because a Program leaves no decision to
the executor.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from pipegrad.errors import ScheduleError
from pipegrad.schedules.program.program import (
    MICROBATCH_BITS,
    OP_BITS,
    Channel,
    Link,
    Op,
    Program,
    action_index,
    encode,
)
from pipegrad.schedules.schedule import Action, Kind, Schedule

# Number of receives of an edge that are posted ahead. Receives must be posted early, because on
# gloo a sender waits for a notice that its receive is posted, which takes a round trip. Each of
# them holds a buffer, and more than two gained nothing (benchmarks/network).
DEPTH = 2
Transfer = int  # as items encode it: a channel and a microbatch
_Sent = tuple["array[int]", "array[int]"]  # transfers of an edge, and their positions
_ByPosition = defaultdict[int, list[Transfer]]


def chain(num_stages: int) -> tuple[Link, ...]:
    """Returns the links of a pipeline in which each stage hands one value to the next stage."""
    return tuple(Link("x", stage, (stage + 1,)) for stage in range(num_stages - 1))


def lower(
    schedule: Schedule,
    *,
    links: Sequence[Link] | None = None,
    depth: int = DEPTH,
    synced: Collection[int] = (),
    forward_only: bool = False,
) -> Program:
    """Returns everything that every rank does to run `schedule`.

    The function is pure, and `verify` proves its result. An edge is an ordered pair of ranks. The
    transfers of an edge are received in the order in which they are sent. A receive is posted when
    the transfer that is `depth` earlier on its edge is waited for. The first action that reads a
    value waits for it, and no earlier action does. A sent tensor is released when a message that
    comes back proves that it arrived.

    Args:
        schedule: The computes of every rank.
        links: The values that stages output. By default each stage sends ``x`` to the next.
        depth: Number of receives of an edge that are posted ahead of the one that is waited for.
        synced: Stages with parameters that other ranks update. Their first forward waits for these.
        forward_only: True leaves out all backwards. The waits for parameters stay.

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
    channels = tuple(_channels(links, schedule.stage_to_rank, forward_only=forward_only))
    empty = Program(schedule, tuple(links), channels, (), forward_only, frozenset(synced))
    return replace(empty, items=tuple(_Lowering(empty).items(depth)))


def _check_links(links: Sequence[Link], num_stages: int) -> None:
    for link in links:
        stages = (link.producer, *link.consumers)
        inside = stages[0] >= 0 and stages[-1] < num_stages
        if not (link.consumers and inside and list(stages) == sorted(set(stages))):
            raise ScheduleError(
                f"link {link.name!r} goes from stage {link.producer} to stages "
                f"{list(link.consumers)}: expected later ones, ascending, below {num_stages}"
            )


def _channels(
    links: Sequence[Link], rank_of: Sequence[int], *, forward_only: bool
) -> Iterator[Channel]:
    """Yields for each link the channels of its value, and of the gradients that come back."""
    for number, link in enumerate(links):
        source = rank_of[link.producer]
        for target in sorted({rank_of[consumer] for consumer in link.consumers} - {source}):
            yield Channel(number, "F", source, target)
            if link.differentiable and not forward_only:
                yield Channel(number, "B", target, source)


class _Lowering:
    """The transfers that the actions of all ranks need and start.

    A position is the index of an action among the actions of its rank.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        # rank -> for each position the transfers that the action needs; and those that it starts.
        self._needs: list[list[tuple[Transfer, ...]]] = []
        self._starts: list[list[tuple[Transfer, ...]]] = []
        for rank in range(program.schedule.num_ranks):
            of_actions = list(self._transfers(rank))
            self._needs.append([needs for needs, _ in of_actions])
            self._starts.append([starts for _, starts in of_actions])
        # Transfer -> the position of its wait, on its target.
        self._waited = {
            transfer: position
            for of_rank in self._needs
            for position, transfers in enumerate(of_rank)
            for transfer in transfers
        }

    def items(self, depth: int) -> Iterator[array[int]]:
        """Yields the items of each rank."""
        posts, releases = self._around(depth)
        for rank, actions in enumerate(self._program.schedule.actions):
            posted, released = posts[rank], releases[rank]
            last = _last(actions, ("B", "W"))
            last_inputs = _last(actions, ("B", "I"))
            unused = set(self._program.synced)
            items = array("q", _items(Op.POST_RECEIVE, posted[-1]))
            for position, action in enumerate(actions):
                stage, kind, microbatch = action
                # Post all receives before the first wait, because the wait for one edge could
                # delay the post on another edge, and the rank that is waited for may need that
                # post. Release after the waits, because only they prove that a tensor of this rank
                # has arrived.
                items.extend(_items(Op.POST_RECEIVE, posted.pop(position, ())))
                items.extend(_items(Op.WAIT_RECEIVE, self._needs[rank][position]))
                items.extend(_items(Op.RELEASE, released.pop(position, ())))
                if kind == "F" and stage in unused:
                    unused.remove(stage)
                    items.append(encode(Op.FIRST_USE, stage))
                if kind == "B" and last[stage] == position:
                    items.append(encode(Op.LAST_BACKWARD, stage))
                items.append(encode(Op.COMPUTE, action_index(action), microbatch))
                items.extend(_items(Op.SEND, self._starts[rank][position]))
                # If W of the stage is still to come, only weight gradients are left. Then those for
                # which other ranks wait can be computed before the others.
                if last_inputs.get(stage) == position < last.get(stage, -1):
                    items.append(encode(Op.INPUTS_FINAL, stage))
                    if self._program.schedule.head_w_first:
                        items.append(encode(Op.SHARED_WEIGHTS, stage))
                if last.get(stage) == position:
                    # Right after the last backward or W, because gradients are then reduced while
                    # this rank goes on with other stages. After the sends, because other ranks
                    # compute with these values.
                    items.append(encode(Op.FINAL, stage))
            # Release these sends at the end of the step, where the rank waits for them, because no
            # message proves that they have arrived.
            items.extend(_items(Op.RELEASE, released[len(actions)]))
            yield items

    def _transfers(self, rank: int) -> Iterator[tuple[tuple[Transfer, ...], tuple[Transfer, ...]]]:
        """Yields for each action of a rank the transfers that it needs, and those it starts."""
        links = self._program.rank_links[rank]
        # A value is received once, for the first stage of this rank that reads it. Later stages of
        # the rank read the same buffer.
        received = set[Transfer]()
        num_backwards = Counter[tuple[int, int]]()  # of a link and microbatch
        for stage, kind, microbatch in self._program.schedule.actions[rank]:
            needs, starts = list[int](), list[int]()  # channels
            if kind == "F":
                needs = [links.values[k] for k in links.taken[stage] if k in links.values]
                starts = [c for k in links.made[stage] for c in links.sent[k]]
            elif kind in ("B", "I"):
                needs = [c for k in links.made[stage] for c in links.gradients[k].values()]
                # Several stages of this rank may read one value. Their gradients are summed here
                # first, and the sum is sent once, after the last of their backwards.
                for link in links.taken[stage]:
                    num_backwards[link, microbatch] += 1
                    is_last = num_backwards[link, microbatch] == len(links.consumers[link])
                    if is_last and link in links.returned:
                        starts.append(links.returned[link])
            needed = (channel << MICROBATCH_BITS | microbatch for channel in needs)
            new = tuple(transfer for transfer in needed if transfer not in received)
            received.update(new)
            yield new, tuple(channel << MICROBATCH_BITS | microbatch for channel in starts)

    def _by_edge(self) -> dict[tuple[int, int], _Sent]:
        """Returns for each edge its transfers in the order of sending, with their positions."""
        edges = defaultdict[tuple[int, int], _Sent](lambda: (array("q"), array("q")))
        for of_rank in self._starts:
            for position, transfers in enumerate(of_rank):
                for transfer in transfers:
                    channel = self._program.channels[transfer >> MICROBATCH_BITS]
                    own, positions = edges[channel.source, channel.target]
                    own.append(transfer)
                    positions.append(position)
        return edges

    def _around(self, depth: int) -> tuple[list[_ByPosition], list[_ByPosition]]:
        """Returns for each rank, by position, the receives that it posts, and its sends to release.

        Receives are posted in the order of their edge: when the transfer that is `depth` earlier,
        or a later one, is waited for; -1 is the start of the step. A send is released when it has
        arrived. A peer waits for a transfer and then sends a message back. If this rank has
        received that message, the transfer has arrived. The first such message is used, or the end
        of the step.
        """
        posts = [_ByPosition(list) for _ in self._needs]
        releases = [_ByPosition(list) for _ in self._needs]
        sent = self._by_edge()
        for (source, target), (transfers, _) in sorted(sent.items()):
            end, end_there = len(self._needs[source]), len(self._needs[target])
            waits = [self._waited.get(transfer, end_there) for transfer in transfers]
            firsts = [*accumulate(reversed(waits), min)][::-1]
            for transfer, position in zip(transfers, [-1] * depth + firsts, strict=False):
                posts[target][position].append(transfer)
            back, positions = sent.get((target, source), (array("q"), array("q")))
            for transfer, wait in zip(transfers, waits, strict=True):
                answer = bisect_left(positions, wait)
                proven = self._waited.get(back[answer], end) if answer < len(back) else end
                releases[source][proven].append(transfer)
        return posts, releases


def _items(op: Op, transfers: Iterable[Transfer]) -> Iterator[int]:
    return (transfer << OP_BITS | op for transfer in transfers)


def _last(actions: Sequence[Action], kinds: Sequence[Kind]) -> dict[int, int]:
    """Returns for each stage the position of its last action of some kinds."""
    return {a.stage: position for position, a in enumerate(actions) if a.kind in kinds}
