"""verify: proves that a Program is right on all ranks, or shows the wrong cell of its grid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from pipegrad.errors import ScheduleError
from pipegrad.schedules.program.program import Program, decode
from pipegrad.schedules.program.run import RankRun, Run, cell_of


@dataclass(frozen=True)
class Proof:
    """The resources of a Program while it runs. Each field has one number for each pipeline rank.

    Attributes:
        live_activations: The most microbatches, over all stages of the rank, whose forward has run
            and whose backward has not ended.
        live_graphs: The most of these microbatches whose input gradients are not computed yet.
            Autograd holds all activations of these, and only the factors of weight gradients of the
            others.
        receive_buffers: The most buffers of received values and gradients at a time. Buffers of
            posted receives count.
        in_flight: The most transfers at a time that are posted and not yet waited for.
    """

    live_activations: tuple[int, ...]
    live_graphs: tuple[int, ...]
    receive_buffers: tuple[int, ...]
    in_flight: tuple[int, ...]

    @classmethod
    def of(cls, ranks: Iterable[RankRun]) -> Proof:
        """Returns the proof from ranks that have run to their end."""
        return cls(*zip(*(rank.most for rank in ranks), strict=True))


def verify(program: Program) -> Proof:
    """Proves that `program` ends and runs all actions in a valid order; returns the proof.

    It proves for all ranks at once:

    - Each action runs once, on its rank, and after its inputs.
    - Every edge is first in, first out.
    - Each value is posted, waited for, sent and released once.
    - No ranks wait for each other in a circle. This assumes that a send ends only when its receive
      is posted.

    Reductions are not part of it, because all ranks launch them in the order of one list, their
    plan.

    Raises:
        ScheduleError: If the proof fails. The message shows the grid, with the wrong cell marked.
    """
    program.schedule.check_complete(forward_only=program.forward_only)
    run = Run(program)
    run.go()
    if run.stuck:
        _refuse_cycle(program, run.stuck)
    for rank in run.ranks:
        rank.check_end()
    return Proof.of(run.ranks)


def _refuse_cycle(program: Program, stuck: Mapping[int, int]) -> NoReturn:
    # Show all stuck ranks, because each waits for another one of them.
    cells = [cell_of(program, rank, position) for rank, position in stuck.items()]
    lines = "\n".join(
        f"  rank {rank}: {program.words(decode(program.items[rank][position]))}, for {cell}"
        for (rank, position), cell in zip(stuck.items(), cells, strict=True)
    )
    raise ScheduleError(
        f"schedule {program.schedule.name!r} cannot go on: ranks wait for each other:\n{lines}\n"
        f"{program.schedule.marked(cells)}"
    )
