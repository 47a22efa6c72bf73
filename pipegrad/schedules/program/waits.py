"""waits: where every rank of a Program waits in the end, and for whom.

A transfer has two ends, a send and a receive. The ends of a communicator begin one after the other
on each rank, in the order in which the rank starts them. The first send to a rank meets the first
receive from it, because a message carries no name.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipegrad.schedules.program.program import (
    MICROBATCH_BITS,
    OP_BITS,
    OP_MASK,
    Op,
    Program,
)

_STARTS = {int(Op.POST_RECEIVE): 0, int(Op.SEND): 1}
_COMPUTE = int(Op.COMPUTE)
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


class Waits:
    """One run of a Program under a `Transport`.

    Nothing that a rank does depends on time. So if one run ends, all runs end.

    Attributes:
        stuck: Rank -> the position of the item that it waits at for good. Empty if all ranks end.
        ticks: For each rank and item the time at which it is done, if a compute takes one unit and
            a transfer none; up to where the rank is stuck.
    """

    def __init__(self, program: Program, transport: Transport) -> None:
        self._items = program.items
        self._is_eager = transport.sends == "eager"
        # An end is a number. A part is what begins and ends together: an end, or those of a batch
        # on one communicator. A queue is a communicator of one rank: its parts, in order.
        self._rank_of, self._position, self._part_of = array("q"), array("q"), array("q")
        self._is_send, self._other = bytearray(), array("q")
        self._parts: list[list[int]] = []
        self._queue_of, self._queues = array("q"), list[list[int]]()
        self._ends: list[dict[int, int]] = []  # for each rank: transfer and direction -> end
        self._next_end: list[int] = []  # for each rank: the end that it starts next
        self._number_ends(program, transport)
        self._left = [len(ends) for ends in self._parts]
        self._head = [0] * len(self._queues)
        num_ends, num_ranks = len(self._other), len(self._items)
        self._posted, self._started = bytearray(num_ends), bytearray(num_ends)
        self._ended = bytearray(num_ends)
        self._begin, self._end_time = array("q", [0]) * num_ends, array("q", [0]) * len(self._parts)
        self._sleepers: dict[int, list[int]] = {}
        self._at, self._clock = [0] * num_ranks, [0] * num_ranks
        self.ticks = [array("q") for _ in self._items]
        self._run()
        self.stuck = {r: at for r, at in enumerate(self._at) if at < len(self._items[r])}

    def _number_ends(self, program: Program, transport: Transport) -> None:
        edges = [(channel.source, channel.target) for channel in program.channels]
        # For each channel its communicator.
        communicators: list[tuple[int, ...]] = [
            {"one": (), "pair": (min(edge), max(edge)), "edge": edge}[transport.communicators]
            for edge in edges
        ]
        # Receives, then sends, of each edge.
        ends_of: dict[tuple[int, int], tuple[list[int], list[int]]] = {e: ([], []) for e in edges}
        for rank, items in enumerate(self._items):
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
            self._ends.append(ends)
        self._other = array("q", [-1]) * len(self._rank_of)
        for receives, sends in ends_of.values():
            for receive, send in zip(receives, sends, strict=False):
                self._other[receive], self._other[send] = send, receive

    def _run(self) -> None:
        # A rank runs as far as it can, and is run again only when what it waits for has ended. So
        # the work grows with the number of items, not with the number of ranks times items.
        ready = list(range(len(self._items)))
        while ready:
            rank = ready.pop()
            part = self._advance(rank, ready)
            if part >= 0:
                self._sleepers.setdefault(part, []).append(rank)

    def _advance(self, rank: int, ready: list[int]) -> int:
        """Runs a rank as far as possible; returns the part that it waits for, -1 at its end."""
        items, ends, ticks = self._items[rank], self._ends[rank], self.ticks[rank]
        clock = self._clock[rank]
        for position in range(self._at[rank], len(items)):
            code = items[position]
            op = code & OP_MASK
            if op == _COMPUTE:
                clock += 1
            elif op in _STARTS:
                self._clock[rank] = clock
                self._post(self._next_end[rank], ready)
                self._next_end[rank] += 1
            elif op in _WAITS:
                end = ends.get(code >> OP_BITS << 1 | _WAITS[op], -1)
                # A wait for what this rank has not started is wrong by itself: it is passed over.
                if end >= 0 and self._posted[end]:
                    part = self._part_of[end]
                    if self._left[part]:
                        self._at[rank], self._clock[rank] = position, clock
                        return part
                    clock = max(clock, self._end_time[part])
            ticks.append(clock)
        self._at[rank], self._clock[rank] = len(items), clock
        return -1

    def _post(self, end: int, ready: list[int]) -> None:
        """A rank starts an end; it begins if it is the turn of its part."""
        self._posted[end] = 1
        self._begin[end] = self._clock[self._rank_of[end]]
        part = self._part_of[end]
        queue = self._queue_of[part]
        if self._queues[queue][self._head[queue]] != part:
            return
        begins = [end]
        while begins:
            end = begins.pop()
            other = self._other[end]
            self._started[end] = 1
            if other >= 0 and self._started[other]:
                self._begin[end] = self._begin[other] = max(self._begin[end], self._begin[other])
                begins += self._end(end, ready)
                begins += self._end(other, ready)
            elif self._is_eager and self._is_send[end]:
                begins += self._end(end, ready)

    def _end(self, end: int, ready: list[int]) -> Iterator[int]:
        """An end is over; yields those that begin when its part is over, too."""
        if self._ended[end]:
            return
        self._ended[end] = 1
        part = self._part_of[end]
        self._end_time[part] = max(self._end_time[part], self._begin[end])
        self._left[part] -= 1
        if self._left[part]:
            return
        ready += self._sleepers.pop(part, ())
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
        rank = min(self.stuck, default=-1)
        if rank < 0:
            return ()
        end = self._of_stuck(rank)
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
                behind = self.stuck[other_rank]
            place = self._position[end]
            way.append(Wait(rank, place, other_rank, self._position[other], behind))
            end = blocking
        return tuple(way[seen[end] :])

    def _of_stuck(self, rank: int) -> int:
        """Returns the end that a stuck rank waits for, or the one that blocks that."""
        code = self._items[rank][self.stuck[rank]]
        waited = self._ends[rank][code >> OP_BITS << 1 | _WAITS[code & OP_MASK]]
        return self._blocking(self._part_of[waited])

    def _blocking(self, part: int) -> int:
        """Returns the end at the head of a part's queue that is not over."""
        queue = self._queue_of[part]
        head = self._parts[self._queues[queue][self._head[queue]]]
        return next(end for end in head if not self._ended[end])
