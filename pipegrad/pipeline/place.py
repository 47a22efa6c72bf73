"""The position of this rank in a Program: for errors, and for the report of a failure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from pipegrad.comm.activity import Details
from pipegrad.schedules import Action
from pipegrad.schedules.program.program import Item, Op, Program
from pipegrad.topology import Topology

_COLUMNS = 24  # of a grid


class Place:
    """The position of this rank in a step.

    Attributes:
        rank: This rank in its pipeline.
        position: The index of the item that runs.
    """

    def __init__(self, program: Program, topology: Topology) -> None:
        self._program = program
        self._topology = topology
        self.rank = topology.coordinate(topology.pipeline)
        self._ranks = topology.ranks_along(topology.pipeline)  # a Program numbers pipeline ranks
        self.position = 0

    def items(self) -> Iterator[Item]:
        """Yields the items of this rank."""
        return self._program.decoded(self.rank)

    def details(self) -> Details:
        """Returns a description of the current item; any thread may call it."""
        # The position is read once, because the thread that runs the step continues meanwhile, and
        # all words must describe one item.
        program, topology, position = self._program, self._topology, self.position
        begun = list(islice(self.items(), position + 1))
        actions = [program.action(item) for item in begun if item.op is Op.COMPUTE]
        words, waits_for = "all items of the step are done", tuple[int, ...]()
        for item in begun[position:]:
            words = " ".join(program.words(item, self._ranks).split())
            if item.op in (Op.WAIT_RECEIVE, Op.RELEASE):
                waits_for = (self._ranks[program.peer(item)],)
        number = next(i for i, ranks in enumerate(topology.pipelines) if topology.rank in ranks)
        return Details(
            words,
            waits_for,
            (number, self.rank),
            str(actions[-1]) if actions else "",
            self.drawn,
        )

    def drawn(self, pipeline: int, marks: Mapping[int, str]) -> str:
        """Returns the grid of a pipeline, with the last action of each rank marked."""
        schedule, words = self._program.schedule, {mark for mark in marks.values() if mark}
        actions = [a for actions in schedule.actions for a in actions if str(a) in words]
        ranks = self._topology.pipelines[pipeline]
        rows = enumerate(schedule.marked(actions, _COLUMNS).splitlines())
        grid = "\n".join(row.replace(f"rank {i} ", f"rank {ranks[i]} ", 1) for i, row in rows)
        return f"schedule {schedule.name}; >{Action(0, 'F', 0)}< is a rank's last action:\n{grid}"

    def add_to(self, error: BaseException) -> None:
        """Adds the failed action and this rank to an error's notes."""
        for item in islice(self.items(), self.position, self.position + 1):
            if item.op is Op.COMPUTE:
                error.add_note(f"In {self._program.action(item)} on pipeline rank {self.rank}.")
            elif item.op is Op.SHARED_WEIGHTS:
                where = f"shared weights of stage {item.which}"
                error.add_note(f"In {where} on pipeline rank {self.rank}.")
