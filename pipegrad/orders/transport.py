"""Transport: runs orders under the promises of a transport, and finds waits without an end.

A transfer has two ends, a send and a receive. On each rank, the ends of a communicator begin one
after the other, in the order in which the rank starts them. The first send to a rank meets the
first receive from it, because a message carries no name.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple

from pipegrad.schedules.program.program import MICROBATCH_BITS, OP_BITS, OP_MASK, Op, Program
from pipegrad.schedules.program.run import ItemError, RankRun, Run

_COMPUTE = int(Op.COMPUTE)
# Items that start an end of a transfer, and items that wait for one; 1 if this end sends.
_STARTS = {int(Op.POST_RECEIVE): 0, int(Op.SEND): 1}
_WAITS = {int(Op.WAIT_RECEIVE): 0, int(Op.RELEASE): 1}


@dataclass(frozen=True)
class Transport:
    """The promises of a transport.

    Attributes:
        sends: With "rendezvous" a send ends when its receive has begun. With "eager" it ends at
            once.
        communicators: With "one" all transfers of a rank begin one after the other. With "pair"
            this holds for transfers between two ranks, with "edge" for transfers in one direction
            between two ranks.
        batched: True if transfers between which a rank neither computes nor waits begin together,
            as in one group of NCCL. They also end together.
    """

    sends: Literal["rendezvous", "eager"] = "rendezvous"
    communicators: Literal["one", "pair", "edge"] = "edge"
    batched: bool = False


class Wait(NamedTuple):
    """The reason why a rank does not continue.

    Attributes:
        rank: The rank that waits.
        position: The item of the rank that cannot end, a send or a receive.
        other_rank: The rank whose end is missing; -1 if no rank has such a send or receive.
        other_position: The item there that would end it.
        behind: The position of the item that `other_rank` waits at first: a transfer on the same
            communicator that has not ended, or a wait of the rank itself. -1 if there is none.
    """

    rank: int
    position: int
    other_rank: int
    other_position: int
    behind: int


class _State(IntEnum):
    """The progress of an end. A posted one begins when its part is the first of its queue."""

    AHEAD, POSTED, BEGUN, OVER = range(4)


@dataclass(eq=False, slots=True)
class _Part:
    """Ends that begin and end together: one, or a batch on one communicator.

    Attributes:
        queue: The parts of this rank and communicator that are not over, in order.
        left: Number of its ends that are not over.
    """

    queue: deque[_Part]
    ends: list[_End] = field(default_factory=list)
    left: int = 0


@dataclass(eq=False, slots=True)
class _End:
    """A send or a receive; `other` is the end that it meets on the other rank, if there is one."""

    rank: int
    position: int
    transfer: int
    is_send: int
    part: _Part
    other: _End | None = None
    state: _State = _State.AHEAD


class TransportRun(Run):
    """A run of a Program under a `Transport`. A rank continues after a wrong item.

    Attributes:
        wrong: Rank -> its first wrong item.
        edges: Source and target -> the receives, and the sends, in the order in which they start.
    """

    def __init__(self, program: Program, transport: Transport) -> None:
        super().__init__(program)
        self.wrong: dict[int, ItemError] = {}
        self._is_eager = transport.sends == "eager"
        ends = [list(self._queued(rank, transport)) for rank in range(len(program.items))]
        self._to_start = [iter(of_rank) for of_rank in ends]
        self._waited = [{(e.transfer, e.is_send): e for e in of_rank} for of_rank in ends]
        self.edges = defaultdict[tuple[int, int], tuple[list[_End], list[_End]]](lambda: ([], []))
        for end in chain.from_iterable(ends):
            channel = program.channels[end.transfer >> MICROBATCH_BITS]
            if end.rank == (channel.source if end.is_send else channel.target):
                self.edges[channel.source, channel.target][end.is_send].append(end)
        for receives, sends in self.edges.values():
            for receive, send in zip(receives, sends, strict=False):
                receive.other, send.other = send, receive

    def go(self) -> None:
        """Runs the Program; its schedule is complete."""
        super().go()
        for own in self.ranks:
            if own.rank not in self.stuck:
                self._check(own, own.check_end)

    def _queued(self, rank: int, transport: Transport) -> Iterator[_End]:
        """Yields the ends of a rank, in the queues of its communicators."""
        queues = defaultdict[tuple[int, ...], deque[_Part]](deque)
        open_batches: dict[tuple[int, ...], _Part] = {}  # by communicator
        for position, code in enumerate(self.program.items[rank]):
            op = code & OP_MASK
            if op == _COMPUTE or op in _WAITS:
                open_batches.clear()
            if op not in _STARTS:
                continue
            transfer = code >> OP_BITS
            _, _, *edge = self.program.channels[transfer >> MICROBATCH_BITS]
            communicator = {"one": (), "pair": tuple(sorted(edge)), "edge": tuple(edge)}[
                transport.communicators
            ]
            part = open_batches.get(communicator)
            if part is None:
                part = _Part(queues[communicator])
                part.queue.append(part)
                if transport.batched:
                    open_batches[communicator] = part
            part.ends.append(_End(rank, position, transfer, _STARTS[op], part))
            part.left += 1
            yield part.ends[-1]

    def _missing(self, rank: RankRun, op: int, transfer: int) -> int | None:
        end = self._waited[rank.rank].get((transfer, _WAITS[op]))
        # A wait for a transfer that this rank has not started is a defect of its own: skip it.
        if end is None or end.state is _State.AHEAD or not end.part.left:
            return None
        return id(end.part)

    def _do(self, rank: RankRun, op: int, rest: int) -> None:
        self._check(rank, partial(rank.do, op, rest))

    def _check(self, rank: RankRun, check: Callable[[], None]) -> None:
        if rank.rank not in self.wrong:
            try:
                check()
            except ItemError as error:
                self.wrong[rank.rank] = error

    def _start(self, rank: RankRun, op: int, transfer: int) -> None:
        """Starts an end of a rank; it begins if its part is the first of its queue."""
        started = next(self._to_start[rank.rank])
        started.state = _State.POSTED
        begins = [started] if started.part is started.part.queue[0] else []
        while begins:
            end = begins.pop()
            end.state = _State.BEGUN
            if end.other and end.other.state >= _State.BEGUN:
                begins += [*self._finish(end), *self._finish(end.other)]
            elif self._is_eager and end.is_send:
                begins += self._finish(end)

    def _finish(self, end: _End) -> Iterable[_End]:
        """Ends an end; returns the ends that begin because its part is over, too."""
        if end.state is _State.OVER:
            return ()
        end.state = _State.OVER
        part = end.part
        part.left -= 1
        if part.left:
            return ()
        self._ready += self._sleepers.pop(id(part), ())
        part.queue.popleft()
        followers = part.queue[0].ends if part.queue else []
        return [follower for follower in followers if follower.state is _State.POSTED]

    def circle(self) -> tuple[Wait, ...]:
        """Returns the waits of stuck ranks that lead to each other in a circle, or to an end.

        The last wait leads to the first one. But if no rank has the send or receive that a wait
        needs, this wait is the last one.
        """
        stuck = self.stuck
        if not stuck:
            return ()
        way: dict[_End, Wait] = {}
        end = self._of_stuck(min(stuck))
        while end not in way:
            other = end.other
            if other is None:
                return (*way.values(), Wait(end.rank, end.position, -1, -1, -1))
            if other.state is _State.AHEAD:
                blocking, behind = self._of_stuck(other.rank), stuck[other.rank]
            else:  # another end of its communicator must end first
                blocking = _blocking(other.part)
                behind = blocking.position
            way[end] = Wait(end.rank, end.position, other.rank, other.position, behind)
            end = blocking
        return tuple(way.values())[list(way).index(end) :]

    def _of_stuck(self, rank: int) -> _End:
        """Returns the end that a stuck rank waits for, or the end that blocks it."""
        code = self.program.items[rank][self.ranks[rank].position]
        return _blocking(self._waited[rank][code >> OP_BITS, _WAITS[code & OP_MASK]].part)


def _blocking(part: _Part) -> _End:
    """Returns the end at the head of a part's queue that is not over."""
    return next(end for end in part.queue[0].ends if end.state is not _State.OVER)
