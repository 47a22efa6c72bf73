"""verify: proves that a Program is right on all ranks, or shows the wrong cell of its grid."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from pipegrad.errors import ScheduleError
from pipegrad.schedules.program.program import (
    KIND_BITS,
    KIND_MASK,
    KINDS,
    MICROBATCH_BITS,
    MICROBATCH_MASK,
    OP_BITS,
    OP_MASK,
    Op,
    Program,
    decode,
)
from pipegrad.schedules.program.simulate import ItemError, SimulatedRank, cell_of
from pipegrad.schedules.program.waits import Transport, Waits
from pipegrad.schedules.schedule import Action

Key = tuple[int, int]  # an edge, or a rank and its comm stream


@dataclass(frozen=True)
class Proof:
    """What a Program needs while it runs. Each field has one number for each pipeline rank.

    Attributes:
        live_activations: The most microbatches, over all stages of the rank, whose forward has run
            and whose backward has not ended.
        live_graphs: The most of these microbatches whose input gradients are not computed yet.
            Autograd holds all activations of them. Of the others it holds only the factors of
            weight gradients.
        receive_buffers: The most buffers of received values and gradients at a time. Buffers of
            posted receives count.
        in_flight: The most transfers at a time that are posted and not yet waited for.
    """

    live_activations: tuple[int, ...]
    live_graphs: tuple[int, ...]
    receive_buffers: tuple[int, ...]
    in_flight: tuple[int, ...]


def verify(program: Program) -> Proof:
    """Proves that `program` ends and computes the right thing; returns what it needs.

    It proves for all ranks at once:

    - Each action runs once, on its rank, and after its inputs.
    - Every edge is first in, first out.
    - Each value is posted, waited for, sent and released once.
    - No ranks wait for each other in a circle. This assumes that a send ends only when its receive
      is posted. It also assumes that a collective ends only when all its ranks have launched it
      and all collectives before it on their comm streams have ended.
    - A collective is launched once on each of its ranks, after the gradients that it reduces are
      final.

    Nothing that a rank does depends on time. So if one run ends, all runs end, and simulating one
    run is enough.

    Raises:
        ScheduleError: If the proof fails. The message shows the grid, with the wrong cell marked.
    """
    # The simulation relies on the earlier checks: known ranks, and edges whose two ends agree.
    check_actions(program)
    _check_collective_ranks(program)
    for wrong in wrong_transfers(program):
        other = f": {_item_words(program, *wrong.other)}" if wrong.other else ""
        raise ItemError(program, wrong.rank, wrong.position, f"{wrong.why}{other}")
    ranks = [SimulatedRank(program, rank) for rank in range(len(program.items))]
    stuck = Waits(program, Transport()).stuck
    for rank in ranks:
        rank.run(stuck.get(rank.rank))
    if stuck:
        _refuse_cycle(program, stuck)
    _check_newest(program)
    _check_collectives(program, ranks)
    return needs(ranks)


def needs(ranks: Sequence[SimulatedRank]) -> Proof:
    """Returns what ranks that have run to their end have needed."""
    return Proof(
        tuple(rank.most_live for rank in ranks),
        tuple(rank.most_graphs for rank in ranks),
        tuple(rank.most_buffers for rank in ranks),
        tuple(rank.most_in_flight for rank in ranks),
    )


def check_actions(program: Program) -> None:
    """Refuses a schedule with missing or doubled actions.

    Raises:
        ScheduleError: If there are some. The message shows the grid, with them marked.
    """
    schedule = program.schedule
    if not program.forward_only:
        schedule.check_complete()
        return
    counts = Counter(action for actions in schedule.actions for action in actions)
    missing = [
        str(Action(stage, "F", microbatch))
        for stage in range(len(schedule.stage_to_rank))
        for microbatch in range(schedule.num_microbatches)
        if counts[Action(stage, "F", microbatch)] != 1
    ]
    if missing:
        raise ScheduleError(
            f"schedule {schedule.name!r} does not have {', '.join(missing[:5])} once\n"
            f"{schedule.marked(())}"
        )


def _check_collective_ranks(program: Program) -> None:
    """Refuses collectives over unknown ranks, or of stages that are not on their ranks."""
    rank_of = dict(enumerate(program.schedule.stage_to_rank))
    for name, ranks, reduced, _, readers in program.collectives:
        stages = sorted({*reduced, *readers})
        outside = [s for s in stages if rank_of.get(s) not in ranks]
        if not set(ranks) <= set(rank_of.values()) or outside or not ranks:
            raise ScheduleError(
                f"{name} is over pipeline ranks {list(ranks)} and of stages {list(stages)}: "
                f"expected ranks of {sorted(set(rank_of.values()))} that hold these stages"
            )


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
    sent = defaultdict[Key, list[tuple[int, int]]](list)
    posted = defaultdict[Key, list[tuple[int, int]]](list)
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


def _check_newest(program: Program) -> None:
    """Refuses a value that is sent late: the executor keeps only what a stage computed last."""
    for rank, items in enumerate(program.items):
        newest: dict[int, int] = {}  # stage -> microbatch
        for position, code in enumerate(items):
            op, which = code & OP_MASK, code >> OP_BITS + MICROBATCH_BITS
            if op == Op.COMPUTE and which & KIND_MASK == KINDS.index("F"):
                newest[which >> KIND_BITS] = code >> OP_BITS & MICROBATCH_MASK
            elif op == Op.SEND and program.channels[which].kind == "F":
                stage = program.links[program.channels[which].link].producer
                if newest[stage] != code >> OP_BITS & MICROBATCH_MASK:
                    why = f"sent after stage {stage} has computed another one"
                    raise ItemError(program, rank, position, why)


def _check_collectives(program: Program, ranks: Sequence[SimulatedRank]) -> None:
    """Refuses collectives that a rank never launches, and comm streams that wait in a circle."""
    queues: dict[Key, list[int]] = {}
    for rank in ranks:
        due = {n for n, c in enumerate(program.collectives) if rank.rank in c.ranks}
        if not program.forward_only and due != set(rank.launched):
            never = [program.collectives[n].name for n in sorted(due - set(rank.launched))]
            raise ScheduleError(f"rank {rank.rank} never launches {', '.join(never[:5])}")
        for number in rank.launched:
            queues.setdefault((rank.rank, program.collectives[number].comm_stream), []).append(
                number
            )
    # A comm stream runs its collectives one by one, and a collective ends when all its ranks have
    # come to it. If the heads of all queues wait for ranks that never come, the order is wrong.
    heads = dict.fromkeys(queues, 0)
    arrived = defaultdict[int, int](int)
    ready = list(queues)
    while ready:
        queue = ready.pop()
        if heads[queue] == len(queues[queue]):
            continue
        number = queues[queue][heads[queue]]
        collective = program.collectives[number]
        # Counted, and not matched by name: a rank that comes to another collective leaves this one
        # incomplete for good, and both queues are found stuck.
        arrived[number] += 1
        if arrived[number] == len(collective.ranks):
            for member in collective.ranks:
                heads[member, collective.comm_stream] += 1
                ready.append((member, collective.comm_stream))
    stuck = {q: n[heads[q]] for q, n in queues.items() if heads[q] < len(n)}
    if stuck:
        lines = "\n".join(
            f"  rank {rank}, comm stream {comm_stream}: {program.collectives[number].name}, over "
            f"ranks "
            f"{list(program.collectives[number].ranks)}"
            for (rank, comm_stream), number in stuck.items()
        )
        raise ScheduleError(f"collectives wait for each other, in the orders they launch:\n{lines}")


def _refuse_cycle(program: Program, stuck: Mapping[int, int]) -> NoReturn:
    # Every stuck rank waits for another stuck rank, so the message shows them all.
    cells = [cell_of(program, rank, position) for rank, position in stuck.items()]
    lines = "\n".join(
        f"  rank {rank}: {_item_words(program, rank, position)}, for {cell}"
        for (rank, position), cell in zip(stuck.items(), cells, strict=True)
    )
    raise ScheduleError(
        f"schedule {program.schedule.name!r} cannot go on: ranks wait for each other:\n{lines}\n"
        f"{program.schedule.marked(cells)}"
    )


def _item_words(program: Program, rank: int, position: int) -> str:
    return program.words(decode(program.items[rank][position]))
