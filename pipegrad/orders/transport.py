"""Transport: a run of orders under what a transport promises; who waits for whom in the end.

A transfer has two ends, a send and a receive. The ends of a communicator begin one after the other
on each rank, in the order in which the rank starts them. The first send to a rank meets the first
receive from it, because a message carries no name.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipegrad.schedules.program.program import MICROBATCH_BITS, OP_BITS, OP_MASK, Op, Program
from pipegrad.schedules.program.run import ItemError, RankRun, Run

_COMPUTE = int(Op.COMPUTE)
# Whether an item starts, or waits for, the end of a transfer that sends.
_STARTS = {int(Op.POST_RECEIVE): 0, int(Op.SEND): 1}
_WAITS = {int(Op.WAIT_RECEIVE): 0, int(Op.RELEASE): 1}


@dataclass(frozen=True)
class Transport:
    """How transfers travel.

    Attributes:
        sends: With "rendezvous" a send ends when its receive has begun. With "eager" it ends at
            once.
        communicators: With "one" all transfers of a rank begin one after the other. With "pair"
            those with each other rank do, and with "edge" those to it, and those from it.
        batched: Whether transfers between which a rank neither computes nor waits begin together,
            as in one group of NCCL. They also end together.
    """

    sends: Literal["rendezvous", "eager"] = "rendezvous"
    communicators: Literal["one", "pair", "edge"] = "edge"
    batched: bool = False


class Wait(NamedTuple):
    """Why a rank does not go on.

    Attributes:
        rank: The rank that waits.
        position: The item of the rank that cannot end, a send or a receive.
        other_rank: The rank whose end is missing. -1 if there is none: nobody sends, or receives.
        other_position: The item there that would end it.
        behind: The position of the item that `other_rank` waits at first: a transfer on the same
            communicator that has not ended, or a wait of the rank itself. -1 if there is none.
    """

    rank: int
    position: int
    other_rank: int
    other_position: int
    behind: int


class TransportRun(Run):
    """A run of a Program under a `Transport`. A rank goes on after a wrong item.

    Attributes:
        wrong: Rank -> its first wrong item.
        ticks: For each rank and item the time at which it is done, if a compute takes one unit and
            a transfer none; up to where the rank is stuck.
    """

    def __init__(self, program: Program, transport: Transport) -> None:
        super().__init__(program)
        self.wrong: dict[int, ItemError] = {}
        self._is_eager = transport.sends == "eager"
        # An end is a number. A part is what begins and ends together: an end, or those of a batch
        # on one communicator. A queue is a communicator of one rank: its parts, in order.
        self._rank_of, self._position, self._part_of = array("q"), array("q"), array("q")
        self._is_send, self._other = bytearray(), array("q")
        self._parts: list[list[int]] = []
        self._queue_of, self._queues = array("q"), list[list[int]]()
        self._end_of: list[dict[int, int]] = []  # for each rank: transfer and direction -> end
        self._next_end: list[int] = []  # for each rank: the end that it starts next
        self._number_ends(transport)
        self._left = [len(ends) for ends in self._parts]
        self._head = [0] * len(self._queues)
        num_ends, num_ranks = len(self._other), len(program.items)
        self._posted, self._begun = bytearray(num_ends), bytearray(num_ends)
        self._ended = bytearray(num_ends)
        self._begin, self._end_time = array("q", [0]) * num_ends, array("q", [0]) * len(self._parts)
        self._clock = [0] * num_ranks
        self.ticks = [array("q") for _ in program.items]
        self.go()
        for rank in self.ranks:
            if rank.rank not in self.stuck and rank.rank not in self.wrong:
                try:
                    rank.check_end()
                except ItemError as error:
                    self.wrong[rank.rank] = error

    def _number_ends(self, transport: Transport) -> None:
        edges = [(channel.source, channel.target) for channel in self.program.channels]
        # For each channel its communicator.
        communicators: list[tuple[int, ...]] = [
            {"one": (), "pair": (min(edge), max(edge)), "edge": edge}[transport.communicators]
            for edge in edges
        ]
        # Receives, then sends, of each edge.
        ends_of: dict[tuple[int, int], tuple[list[int], list[int]]] = {e: ([], []) for e in edges}
        for rank, items in enumerate(self.program.items):
            ends: dict[int, int] = {}
            self._next_end.append(len(self._rank_of))
            queues: dict[tuple[int, ...], int] = {}  # of this rank, by communicator
            batch: dict[int, int] = {}  # queue -> its part that is open
            for position, code in enumerate(items):
                op = code & OP_MASK
                is_send = _STARTS.get(op)
                if is_send is None:
                    if batch and (op == _COMPUTE or op in _WAITS):
                        batch.clear()
                    continue
                end = len(self._rank_of)
                channel = code >> OP_BITS + MICROBATCH_BITS
                queue = queues.get(communicators[channel], -1)
                if queue < 0:
                    queue = queues[communicators[channel]] = len(self._queues)
                    self._queues.append([])
                part = batch.get(queue, -1)
                if part < 0:
                    part = len(self._parts)
                    self._parts.append([])
                    self._queue_of.append(queue)
                    self._queues[queue].append(part)
                    if transport.batched:
                        batch[queue] = part
                self._parts[part].append(end)
                self._rank_of.append(rank)
                self._position.append(position)
                self._part_of.append(part)
                self._is_send.append(is_send)
                ends[code >> OP_BITS << 1 | is_send] = end
                ends_of[edges[channel]][is_send].append(end)
            self._end_of.append(ends)
        self._other = array("q", [-1]) * len(self._rank_of)
        for receives, sends in ends_of.values():
            for receive, send in zip(receives, sends, strict=False):
                self._other[receive], self._other[send] = send, receive

    def _missing(self, rank: RankRun, op: int, transfer: int) -> int | None:
        end = self._end_of[rank.rank].get(transfer << 1 | _WAITS[op], -1)
        # A wait for what this rank has not started is wrong by itself: it is passed over.
        if end < 0 or not self._posted[end]:
            return None
        part = self._part_of[end]
        if self._left[part]:
            return part
        self._clock[rank.rank] = max(self._clock[rank.rank], self._end_time[part])
        return None

    def _do(self, rank: RankRun, op: int, rest: int) -> None:
        self._clock[rank.rank] += op == _COMPUTE
        self.ticks[rank.rank].append(self._clock[rank.rank])
        if rank.rank not in self.wrong:
            try:
                rank.do[op](rest)
            except ItemError as error:
                self.wrong[rank.rank] = error

    def _start(self, rank: RankRun, op: int, transfer: int) -> None:
        """A rank starts an end; it begins if it is the turn of its part."""
        end = self._next_end[rank.rank]
        self._next_end[rank.rank] += 1
        self._posted[end] = 1
        self._begin[end] = self._clock[rank.rank]
        part = self._part_of[end]
        queue = self._queue_of[part]
        if self._queues[queue][self._head[queue]] != part:
            return
        begins = [end]
        while begins:
            end = begins.pop()
            other = self._other[end]
            self._begun[end] = 1
            if other >= 0 and self._begun[other]:
                self._begin[end] = self._begin[other] = max(self._begin[end], self._begin[other])
                begins += self._end(end)
                begins += self._end(other)
            elif self._is_eager and self._is_send[end]:
                begins += self._end(end)

    def _end(self, end: int) -> Iterator[int]:
        """An end is over; yields those that begin when its part is over, too."""
        if self._ended[end]:
            return
        self._ended[end] = 1
        part = self._part_of[end]
        self._end_time[part] = max(self._end_time[part], self._begin[end])
        self._left[part] -= 1
        if self._left[part]:
            return
        self._ready += self._sleepers.pop(part, ())
        queue = self._queue_of[part]
        self._head[queue] += 1
        if self._head[queue] < len(self._queues[queue]):
            for follower in self._parts[self._queues[queue][self._head[queue]]]:
                if self._posted[follower]:
                    self._begin[follower] = max(self._begin[follower], self._end_time[part])
                    yield follower

    def circle(self) -> tuple[Wait, ...]:
        """Returns the waits of stuck ranks that lead to each other in a circle, or to an end.

        The last wait leads to the first one. If a wait is for what nobody sends or receives, the
        last one is that.
        """
        way = list[Wait]()
        seen: dict[int, int] = {}
        stuck = self.stuck
        if not stuck:
            return ()
        end = self._of_stuck(min(stuck))
        while end not in seen:
            seen[end] = len(way)
            rank, other = self._rank_of[end], self._other[end]
            if other < 0:
                return (*way, Wait(rank, self._position[end], -1, -1, -1))
            other_rank = self._rank_of[other]
            if self._posted[other]:  # it stands behind another one of its communicator
                blocking = self._blocking(self._part_of[other])
                behind = self._position[blocking]
            else:
                blocking = self._of_stuck(other_rank)
                behind = stuck[other_rank]
            place = self._position[end]
            way.append(Wait(rank, place, other_rank, self._position[other], behind))
            end = blocking
        return tuple(way[seen[end] :])

    def _of_stuck(self, rank: int) -> int:
        """Returns the end that a stuck rank waits for, or the one that blocks that."""
        code = self.program.items[rank][self.ranks[rank].position]
        waited = self._end_of[rank][code >> OP_BITS << 1 | _WAITS[code & OP_MASK]]
        return self._blocking(self._part_of[waited])

    def _blocking(self, part: int) -> int:
        """Returns the end at the head of a part's queue that is not over."""
        queue = self._queue_of[part]
        head = self._parts[self._queues[queue][self._head[queue]]]
        return next(end for end in head if not self._ended[end])


class WrongTransfer(NamedTuple):
    """A send or a receive that has no end on the other rank, or another one.

    Attributes:
        rank: Its rank.
        position: Its position among the items of the rank.
        why: What is wrong.
        other: Rank and position of another item that `why` speaks of.
    """

    rank: int
    position: int
    why: str
    other: tuple[int, int] | None = None


def wrong_transfers(program: Program) -> Iterator[WrongTransfer]:
    """Yields what breaks the order of an edge, first in, first out.

    A message carries no name, so the receiver takes the next message of the edge. Both ends must
    therefore list the same transfers in the same order.
    """
    sent = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    posted = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    tables = {int(Op.SEND): sent, int(Op.POST_RECEIVE): posted}
    for rank, items in enumerate(program.items):
        for position, code in enumerate(items):
            table = tables.get(code & OP_MASK)
            if table is not None:
                channel = program.channels[code >> OP_BITS + MICROBATCH_BITS]
                if rank != (channel.source if table is sent else channel.target):
                    yield WrongTransfer(rank, position, f"a transfer of another rank: {channel}")
                else:
                    table[channel.source, channel.target].append((code >> OP_BITS, position))
    for source, target in sorted({*sent, *posted}):
        yield from _unmatched(source, target, sent[source, target], posted[source, target])


def _unmatched(
    source: int, target: int, sent: list[tuple[int, int]], posted: list[tuple[int, int]]
) -> Iterator[WrongTransfer]:
    """Yields what the two ends of an edge do not have in common; they list (transfer, position)."""
    ends = [(source, sent, "sent twice"), (target, posted, "received twice")]
    for rank, listed, twice in ends:
        seen = set[int]()
        for transfer, position in listed:
            if transfer in seen:
                yield WrongTransfer(rank, position, twice)
            seen.add(transfer)
    sends, receives = ({transfer for transfer, _ in listed} for listed in (sent, posted))
    for transfer, position in sent:
        if transfer not in receives:
            yield WrongTransfer(source, position, f"rank {target} never receives this")
    for transfer, position in posted:
        if transfer not in sends:
            yield WrongTransfer(target, position, f"rank {source} never sends this")
    both = sends & receives
    in_order = (
        [end for end in dict(listed).items() if end[0] in both] for listed in (sent, posted)
    )
    for (sending, sent_at), (posting, posted_at) in zip(*in_order, strict=True):
        if sending != posting:
            why = f"rank {target} expects another transfer of the edge here"
            yield WrongTransfer(source, sent_at, why, (target, posted_at))
            return
