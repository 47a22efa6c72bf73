"""verify: proves a Program for all ranks at once, or shows where in the grid it is wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from pipegrad.errors import ScheduleError
from pipegrad.schedules.program.program import OP_BITS, OP_MASK, Op, Program, decode
from pipegrad.schedules.program.simulate import PlayedRank, State, cell_of, refuse
from pipegrad.schedules.schedule import Action

Key = tuple[int, int]  # an edge, or a rank and its comm stream


@dataclass(frozen=True)
class Proof:
    """What a Program needs while it runs, a number a pipeline rank.

    Attributes:
        live_activations: Most microbatches, over all its stages, whose forward has run and whose
            backward has not ended.
        live_graphs: Most of them whose inputs' gradients are not computed yet: autograd holds
            all of their activations, and of the others what weights are multiplied with.
        receive_buffers: Most buffers of received values and gradients held at a time, those that
            are posted included.
        in_flight: Most transfers posted and not yet waited for at a time.
    """

    live_activations: tuple[int, ...]
    live_graphs: tuple[int, ...]
    receive_buffers: tuple[int, ...]
    in_flight: tuple[int, ...]


def verify(program: Program) -> Proof:
    """Returns what `program` needs, once it is proven that it ends, and computes the right thing.

    Proven, for all ranks at once: each action runs once, on its rank, behind what it needs; every
    edge is first in, first out; each value is posted, waited for, sent and released once; nobody
    waits for somebody who waits for it, where a send ends only once its receive is posted, and a
    collective once all its ranks have launched it and all before it in their comm streams; a
    collective is launched once on each of its ranks, behind the finality of what it reduces.

    Nothing a rank does depends on time, so if one run ends, all do: one is played.

    Raises:
        ScheduleError: Shows the grid, with the cell where it goes wrong marked.
    """
    _check_actions(program)
    _check_collective_ranks(program)
    _check_edges(program)
    ranks = [PlayedRank(program, rank) for rank in range(len(program.items))]
    _play(program, ranks)
    _check_collectives(program, ranks)
    return Proof(
        tuple(rank.most_live for rank in ranks),
        tuple(rank.most_graphs for rank in ranks),
        tuple(rank.most_buffers for rank in ranks),
        tuple(rank.most_in_flight for rank in ranks),
    )


def _check_actions(program: Program) -> None:
    """Refuses a schedule that lacks actions."""
    schedule = program.schedule
    if not program.forward_only:
        schedule.check_complete()
        return
    found = Counter(action for row in schedule.actions for action in row)
    missing = [
        str(Action(stage, "F", microbatch))
        for stage in range(len(schedule.stage_to_rank))
        for microbatch in range(schedule.num_microbatches)
        if found[Action(stage, "F", microbatch)] != 1
    ]
    if missing:
        raise ScheduleError(
            f"schedule {schedule.name!r} does not have {', '.join(missing[:5])} once\n"
            f"{schedule.marked(())}"
        )


def _check_collective_ranks(program: Program) -> None:
    """Refuses collectives over ranks that there are not, or of stages that are elsewhere."""
    places = dict(enumerate(program.schedule.stage_to_rank))
    for name, ranks, reduced, _, readers in program.collectives:
        stages = sorted({*reduced, *readers})
        outside = [s for s in stages if places.get(s) not in ranks]
        if not set(ranks) <= set(places.values()) or outside or not ranks:
            raise ScheduleError(
                f"{name} is over pipeline ranks {list(ranks)} and of stages {list(stages)}: "
                f"expected ranks of {sorted(set(places.values()))} that hold these stages"
            )


def _check_edges(program: Program) -> None:
    """Refuses edges that are not first in, first out."""
    sent = defaultdict[Key, list[tuple[int, int]]](list)
    posted = defaultdict[Key, list[tuple[int, int]]](list)
    kinds = {int(Op.SEND): sent, int(Op.POST_RECEIVE): posted}
    for rank, items in enumerate(program.items):
        for place, code in enumerate(items):
            table = kinds.get(code & OP_MASK)
            if table is not None:
                channel = program.channels[decode(code).which]
                if rank != (channel.source if table is sent else channel.target):
                    refuse(program, rank, place, f"a transfer of another rank: {channel}")
                table[channel.source, channel.target].append((code >> OP_BITS, place))
    for edge in sorted({*sent, *posted}):
        for (left, at), (right, there) in _pairs(sent[edge], posted[edge]):
            if left != right:
                source, target = edge
                crossed = (
                    "nothing"
                    if right < 0
                    else program.words(decode(right << OP_BITS | Op.POST_RECEIVE))
                )
                if left < 0:
                    refuse(program, target, there, f"rank {source} never sends this")
                refuse(
                    program,
                    source,
                    at,
                    f"rank {target} expects another transfer of the edge here: {crossed}",
                )


def _pairs(
    left: Sequence[tuple[int, int]], right: Sequence[tuple[int, int]]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    nothing = (-1, -1)
    for i in range(max(len(left), len(right))):
        yield (
            left[i] if i < len(left) else nothing,
            right[i] if i < len(right) else nothing,
        )


def _play(program: Program, ranks: Sequence[PlayedRank]) -> None:
    """Runs all ranks until they end; a rank sleeps until what it waits for has happened."""
    state = State()
    ready = list(range(len(ranks)))
    while ready:
        rank = ready.pop()
        blocked = ranks[rank].run(state)
        if blocked is not None:
            state.sleepers.setdefault(blocked, []).append(rank)
        ready += state.woken
        state.woken.clear()
    stuck = [rank for rank in ranks if rank.place < len(rank.items)]
    if stuck:
        _refuse_cycle(program, stuck)


def _check_collectives(program: Program, ranks: Sequence[PlayedRank]) -> None:
    """Refuses collectives that a rank never launches, or comm streams that wait in a circle."""
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
    heads = dict.fromkeys(queues, 0)
    arrived = defaultdict[int, int](int)
    ready = list(queues)
    while ready:
        queue = ready.pop()
        if heads[queue] == len(queues[queue]):
            continue
        number = queues[queue][heads[queue]]
        collective = program.collectives[number]
        arrived[number] += 1
        if arrived[number] == len(collective.ranks):
            for place in collective.ranks:
                heads[place, collective.comm_stream] += 1
                ready.append((place, collective.comm_stream))
    stuck = {q: n[heads[q]] for q, n in queues.items() if heads[q] < len(n)}
    if stuck:
        told = "\n".join(
            f"  rank {rank}, comm stream {comm_stream}: {program.collectives[number].name}, over "
            f"ranks "
            f"{list(program.collectives[number].ranks)}"
            for (rank, comm_stream), number in stuck.items()
        )
        raise ScheduleError(f"collectives wait for each other, in the orders they launch:\n{told}")


def _refuse_cycle(program: Program, stuck: Sequence[PlayedRank]) -> NoReturn:
    cells = [cell_of(program, rank.rank, rank.place) for rank in stuck]
    told = "\n".join(
        f"  rank {rank.rank}: {program.words(decode(rank.items[rank.place]))}, for {cell}"
        for rank, cell in zip(stuck, cells, strict=True)
    )
    raise ScheduleError(
        f"schedule {program.schedule.name!r} cannot go on: ranks wait for each other:\n{told}\n"
        f"{program.schedule.marked(cells)}"
    )
