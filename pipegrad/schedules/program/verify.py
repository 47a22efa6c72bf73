"""verify: proves that a Program is right on all ranks, or shows the wrong cell of its grid."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NoReturn

from pipegrad.errors import ScheduleError
from pipegrad.schedules.program.program import OP_BITS, OP_MASK, Op, Program, decode
from pipegrad.schedules.program.simulate import SimulatedRank, State, cell_of, refuse
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
    _check_actions(program)
    _check_collective_ranks(program)
    _check_edges(program)
    ranks = [SimulatedRank(program, rank) for rank in range(len(program.items))]
    _simulate(program, ranks)
    _check_collectives(program, ranks)
    return Proof(
        tuple(rank.most_live for rank in ranks),
        tuple(rank.most_graphs for rank in ranks),
        tuple(rank.most_buffers for rank in ranks),
        tuple(rank.most_in_flight for rank in ranks),
    )


def _check_actions(program: Program) -> None:
    """Refuses a schedule with missing or doubled actions."""
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


def _check_edges(program: Program) -> None:
    """Refuses edges that are not first in, first out.

    A message carries no name, so the receiver takes the next message of the edge. Both ends must
    therefore list the same transfers in the same order.
    """
    sent = defaultdict[Key, list[tuple[int, int]]](list)
    posted = defaultdict[Key, list[tuple[int, int]]](list)
    kinds = {int(Op.SEND): sent, int(Op.POST_RECEIVE): posted}
    for rank, items in enumerate(program.items):
        for position, code in enumerate(items):
            table = kinds.get(code & OP_MASK)
            if table is not None:
                channel = program.channels[decode(code).which]
                if rank != (channel.source if table is sent else channel.target):
                    refuse(program, rank, position, f"a transfer of another rank: {channel}")
                table[channel.source, channel.target].append((code >> OP_BITS, position))
    for edge in sorted({*sent, *posted}):
        for (sending, sent_at), (posting, posted_at) in zip_longest(
            sent[edge], posted[edge], fillvalue=(-1, -1)
        ):
            if sending != posting:
                source, target = edge
                crossed = (
                    "nothing"
                    if posting < 0
                    else program.words(decode(posting << OP_BITS | Op.POST_RECEIVE))
                )
                if sending < 0:
                    refuse(program, target, posted_at, f"rank {source} never sends this")
                refuse(
                    program,
                    source,
                    sent_at,
                    f"rank {target} expects another transfer of the edge here: {crossed}",
                )


def _simulate(program: Program, ranks: Sequence[SimulatedRank]) -> None:
    """Runs all ranks until they end; a rank sleeps until the event that it waits for."""
    state = State()
    ready = list(range(len(ranks)))
    # A rank runs as far as it can, and is run again only when its event has happened. So the work
    # grows with the number of items, not with the number of ranks times items.
    while ready:
        rank = ready.pop()
        blocked = ranks[rank].run(state)
        if blocked is not None:
            state.sleepers.setdefault(blocked, []).append(rank)
        ready += state.woken
        state.woken.clear()
    stuck = [rank for rank in ranks if rank.position < len(rank.items)]
    if stuck:
        _refuse_cycle(program, stuck)


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


def _refuse_cycle(program: Program, stuck: Sequence[SimulatedRank]) -> NoReturn:
    # Every stuck rank waits for another stuck rank, so the message shows them all.
    cells = [cell_of(program, rank.rank, rank.position) for rank in stuck]
    lines = "\n".join(
        f"  rank {rank.rank}: {program.words(decode(rank.items[rank.position]))}, for {cell}"
        for rank, cell in zip(stuck, cells, strict=True)
    )
    raise ScheduleError(
        f"schedule {program.schedule.name!r} cannot go on: ranks wait for each other:\n{lines}\n"
        f"{program.schedule.marked(cells)}"
    )
