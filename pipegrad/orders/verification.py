"""verify: proves orders of any framework, or reports ranks that wait in vain and other defects."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, get_args

from pipegrad.errors import ScheduleError
from pipegrad.orders.building import END, Defect
from pipegrad.orders.reading import Orders, read_orders
from pipegrad.orders.transport import Transport, TransportRun, Wait
from pipegrad.schedules.program.program import (
    MICROBATCH_BITS,
    MICROBATCH_MASK,
    OP_BITS,
    OP_MASK,
    Op,
)
from pipegrad.schedules.program.verify import Proof

Sends = Literal["rendezvous", "eager"]
Communicators = Literal["one", "pair", "edge"]
_MOST_SHOWN = 10  # defects, and ranks of a circle
_BESIDE = 3  # cells that are shown before and after a marked one
_COMMUNICATORS = {
    "one": "one communicator for all ranks",
    "pair": "a communicator for each pair of ranks",
    "edge": "a communicator for each rank and each other rank that it sends to",
}
_SENDS = {
    "rendezvous": "a send ends when its receive has started",
    "eager": "a send ends at once",
}


@dataclass(frozen=True, eq=False)
class Verdict:
    """The result of `verify`. `str` of it is the report of the command line.

    Attributes:
        orders: The orders.
        transport: The assumed transport.
        defects: Defects of single cells, and values that are never sent, received or computed.
        circle: The waits of ranks that do not continue: each leads to the next one, and the last to
            the first. Empty if all ranks end.
        stuck: Rank -> the cell that it never ends, if ranks wait for each other.
        needs: The activations and buffers that each rank needs; None if something is wrong.
    """

    orders: Orders
    transport: Transport
    defects: tuple[Defect, ...]
    circle: tuple[Wait, ...]
    stuck: Mapping[int, int]
    needs: Proof | None

    @property
    def is_right(self) -> bool:
        """True if all ranks end, and there is no defect."""
        return not self.defects and not self.circle

    @property
    def sentences(self) -> tuple[str, ...]:
        """One sentence for each wait of the circle."""
        return tuple(map(self._sentence, self.circle))

    @property
    def marked(self) -> Mapping[int, frozenset[int]]:
        """Rank -> its cells that `sentences` name."""
        marked = defaultdict[int, set[int]](set)
        for rank, position, other, *others in self.circle:
            marked[rank].add(self._cell(rank, position))
            if other >= 0:
                marked[other].update(self._cell(other, each) for each in others)
        return {rank: frozenset(marked[rank]) for rank in sorted(marked)}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def as_json(self) -> str:
        """Returns the verdict as JSON: ranks and cells are counted from 0."""
        needs = self.needs
        table: dict[str, Any] = {
            "name": self.orders.name,
            "is_right": self.is_right,
            "ranks": len(self.orders.cells),
            "stages": len(self.orders.program.schedule.stage_to_rank),
            "microbatches": self.orders.program.schedule.num_microbatches,
            "sends": self.transport.sends,
            "communicators": self.transport.communicators,
            "batched": self.transport.batched,
            "circle": [
                {"rank": w.rank, "cell": self._cell(w.rank, w.position), "sentence": sentence}
                for w, sentence in zip(self.circle, self.sentences, strict=True)
            ],
            "stuck": {str(rank): cell for rank, cell in self.stuck.items()},
            "defects": [defect._asdict() for defect in self.defects],
            "live_activations": needs and needs.live_activations,
            "receive_buffers": needs and needs.receive_buffers,
            "in_flight": needs and needs.in_flight,
        }
        return json.dumps(table, indent=2)

    def _lines(self) -> Iterator[str]:
        schedule = self.orders.program.schedule
        sizes = (
            _many(schedule.num_ranks, "rank"),
            _many(len(schedule.stage_to_rank), "stage"),
            _many(schedule.num_microbatches, "microbatch"),
        )
        yield f"{self.orders.name}: {', '.join(sizes)}"
        yield self.assumed
        if self.is_right:
            yield "right: every rank ends, and every value arrives where it is read"
        for defect in self.defects[:_MOST_SHOWN]:
            yield f"wrong: {self.in_words(defect)}"
        if len(self.defects) > _MOST_SHOWN:
            yield f"wrong: {len(self.defects) - _MOST_SHOWN} more"
        if self.circle:
            yield f"wrong: {self.summary_of_circle}"
            yield from (f"  {sentence}" for sentence in self.sentences[:_MOST_SHOWN])
            if len(self.circle) > _MOST_SHOWN:
                yield f"  and {len(self.circle) - _MOST_SHOWN} more waits"
            yield from self._around()
        if self.needs:
            yield from _needs_in_words(self.needs)

    @property
    def assumed(self) -> str:
        """The assumed transport, in words."""
        transport = self.transport
        batched = "transfers side by side start together" if transport.batched else "one by one"
        added = "; transfers were added where torch's runtime puts them"
        return (
            f"assumed: {_SENDS[transport.sends]}; {_COMMUNICATORS[transport.communicators]}; "
            f"{batched}{added if self.orders.transfers == 'placed' else ''}"
        )

    @property
    def summary_of_circle(self) -> str:
        """The circle in one line."""
        if self.circle[-1].other_rank < 0:
            return "ranks wait for something that never comes:"
        ranks = list(dict.fromkeys(w.rank for w in self.circle))
        return f"ranks {_listed(ranks)} wait for each other in a circle:"

    def in_words(self, defect: Defect) -> str:
        """Returns a defect with its place."""
        if defect.rank < 0:
            return defect.text
        if defect.cell == END:
            return f"rank {defect.rank}: {defect.text}"
        return f"rank {defect.rank}, cell {defect.cell + 1}: {defect.text}"

    def _sentence(self, wait: Wait) -> str:
        rank, position, other_rank, other_position, behind = wait
        own = f"rank {rank}: {self._transfer(rank, position)}"
        if other_rank < 0:
            is_send = self._op(rank, position) == Op.SEND
            return f"{own} waits for {'a receive' if is_send else 'a send'} that no rank has"
        text = f"{own} waits for {self._transfer(other_rank, other_position)} of rank {other_rank}"
        if self._op(other_rank, behind) in (Op.SEND, Op.POST_RECEIVE):
            return (
                f"{text}, which is behind {self._transfer(other_rank, behind)} on the communicator"
            )
        cell = self._cell(other_rank, behind)
        if cell == END:
            return f"{text}, which comes only after the end of the step"
        return f"{text}, which comes only after {self.orders.cells[other_rank][cell]}"

    def _transfer(self, rank: int, position: int) -> str:
        """Returns a transfer in torch's notation, and its cell if that has another name."""
        name = _name_at(self.orders, rank, position)
        cell = self._cell(rank, position)
        text = self.orders.cells[rank][cell] if cell != END else ""
        is_other = name not in text and not self.orders.is_own
        return f"{name} ({text})" if is_other and text else name

    def _op(self, rank: int, position: int) -> int:
        return int(self.orders.program.items[rank][position] & OP_MASK)

    def _cell(self, rank: int, position: int) -> int:
        return self.orders.cell_of[rank][position]

    def _around(self) -> Iterator[str]:
        """Yields, for each rank of the circle, its cells around the marked ones."""
        marked = self.marked
        for rank in list(marked)[:_MOST_SHOWN]:
            cells = [
                (number, cell)
                for number, cell in enumerate(self.orders.cells[rank])
                if cell or number in marked[rank]
            ]
            places = [n for n, (number, _) in enumerate(cells) if number in marked[rank]]
            if not places:
                continue
            begin, end = max(0, places[0] - _BESIDE), places[-1] + 1 + _BESIDE
            text = [f">{cell}<" if n in marked[rank] else cell for n, cell in cells[begin:end]]
            before, behind = "... " * (begin > 0), " ..." * (end < len(cells))
            yield f"rank {rank}  {before}{' '.join(text)}{behind}"


def verify(
    source: object,
    *,
    sends: Sends = "rendezvous",
    communicators: Communicators | None = None,
    batched: bool = False,
) -> Verdict:
    """Proves that orders end and that each value arrives, or reports defects. Starts no ranks.

    If one run ends, all runs end, because no action of a rank depends on time.

    Args:
        source: A path of a CSV file with a line for each rank; a list, or a table by rank, of the
            actions of each rank; a ``_PipelineScheduleRuntime`` of torch; or a schedule or Program
            of pipegrad. Actions are torch's, with transfers or without; ``PipeInstruction`` of
            DeepSpeed; or names of the functions of Megatron's schedules.
        sends: "rendezvous": a send ends when its receive has started, as large messages do.
            "eager": a send ends at once.
        communicators: "one" for all transfers, "pair": one for each two ranks, or "edge": one for
            each direction between two ranks. On a communicator the transfers of a rank start one
            after the other. By default "one", and "edge" for a schedule or Program of pipegrad.
        batched: True if transfers between which a rank neither computes nor waits start together,
            as in ``batch_isend_irecv``.

    Raises:
        ScheduleError: If the orders cannot be read, or an argument is none of these.
    """
    for name, value, choices in (
        ("sends", sends, get_args(Sends)),
        ("communicators", communicators or "one", get_args(Communicators)),
    ):
        if value not in choices:
            raise ScheduleError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
    orders = read_orders(source)
    default: Communicators = "edge" if orders.is_own else "one"
    transport = Transport(sends, communicators or default, batched)
    # If inputs never come, ranks wait for each other with any transport.
    real = Transport("eager", "edge") if orders.transfers == "impossible" else transport
    program = orders.program
    run = TransportRun(program, real)
    defects = [*orders.defects, *_wrong_transfers(orders, run)]
    try:
        program.schedule.check_complete(forward_only=program.forward_only)
    except ScheduleError as error:
        text = str(error).split("\n")[0].removeprefix(f"schedule {program.schedule.name!r} ")
        defects.insert(0, Defect(-1, END, text.removeprefix("is not complete: ")))
        return Verdict(orders, transport, tuple(defects), (), {}, None)
    run.go()
    known = {(defect.rank, defect.cell) for defect in defects}
    defects += [d for d in _wrong_items(orders, run) if d[:2] not in known]
    circle = run.circle()
    needs = None if defects or circle else Proof.of(run.ranks)
    stuck = {rank: orders.cell_of[rank][at] for rank, at in run.stuck.items()}
    return Verdict(orders, transport, tuple(defects), circle, stuck, needs)


def _wrong_transfers(orders: Orders, run: TransportRun) -> Iterator[Defect]:
    """Yields transfers that break the order of an edge, first in, first out.

    The receiver takes the next message of the edge, because a message carries no name. Therefore
    both ends must list the same transfers in the same order.
    """
    for (source, target), (receives, sends) in sorted(run.edges.items(), key=itemgetter(0)):
        received = {end.transfer: end.position for end in receives}
        sent = {end.transfer: end.position for end in sends}
        yield from _unmatched(orders, source, target, received, sent)


def _unmatched(
    orders: Orders, source: int, target: int, received: dict[int, int], sent: dict[int, int]
) -> Iterator[Defect]:
    """Yields transfers that one end of an edge lacks, and the first one in another order."""
    for transfer in sorted(sent.keys() - received.keys()):
        yield _defect(orders, source, sent[transfer], f"rank {target} never receives this")
    for transfer in sorted(received.keys() - sent.keys()):
        yield _defect(orders, target, received[transfer], f"rank {source} never sends this")
    sends = [transfer for transfer in sent if transfer in received]
    receives = [transfer for transfer in received if transfer in sent]
    for one, other in zip(sends, receives, strict=True):
        if one != other:
            taken = _name_at(orders, target, received[other])
            why = f"rank {target} takes it for {taken}: a message carries no name"
            yield _defect(orders, source, sent[one], why)
            return


def _defect(orders: Orders, rank: int, position: int, why: str) -> Defect:
    return Defect(
        rank, orders.cell_of[rank][position], f"{_name_at(orders, rank, position)}: {why}"
    )


def _wrong_items(orders: Orders, run: TransportRun) -> Iterator[Defect]:
    """Yields the first wrong item of each rank."""
    for rank, error in sorted(run.wrong.items()):
        cell = orders.cell_of[rank][error.position]
        text = orders.cells[rank][cell] if cell != END else "the end of the step"
        yield Defect(rank, cell, f"{text}: {error.why}")


def _name_at(orders: Orders, rank: int, position: int) -> str:
    """Returns a send or receive in torch's notation, by the stage on its rank: ``1RECV_F0``."""
    program = orders.program
    code = program.items[rank][position]
    link, kind, _, _ = program.channels[code >> OP_BITS + MICROBATCH_BITS]
    is_send = code & OP_MASK == Op.SEND
    _, producer, consumers, _ = program.links[link]
    at_producer = is_send == (kind == "F")
    of_rank = [s for s in consumers if program.schedule.stage_to_rank[s] == rank]
    stage = producer if at_producer else min(of_rank, default=min(consumers))
    microbatch = code >> OP_BITS & MICROBATCH_MASK
    return f"{stage}{'SEND' if is_send else 'RECV'}_{kind}{microbatch}"


def _needs_in_words(needs: Proof) -> Iterator[str]:
    """Yields the needs of each rank; ranks in a row with equal needs share a line."""
    yield "most at a time: live activations, receive buffers, receives under way"
    rows = list(zip(needs.live_activations, needs.receive_buffers, needs.in_flight, strict=True))
    for row, alike in groupby(range(len(rows)), rows.__getitem__):
        ranks = list(alike)
        is_one = len(ranks) == 1
        name = f"rank {ranks[0]}" if is_one else f"ranks {ranks[0]} to {ranks[-1]}"
        yield f"  {name:<14}{row[0]:>6}{row[1]:>6}{row[2]:>6}"


def _many(number: int, noun: str) -> str:
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def _listed(ranks: list[int]) -> str:
    shown = [str(rank) for rank in ranks[:_MOST_SHOWN]]
    if len(ranks) > _MOST_SHOWN:
        shown.append("others")
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]
