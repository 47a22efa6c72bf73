"""Steps: parts of cells, and the Program that they make."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import chain as joined
from itertools import pairwise
from typing import NamedTuple

from pipegrad.schedules.program.lower import chain
from pipegrad.schedules.program.program import (
    MICROBATCH_BITS,
    OP_BITS,
    Channel,
    Op,
    Program,
    action_index,
    encode,
)
from pipegrad.schedules.schedule import Action, Kind, Schedule
from pipegrad.schedules.torch_csv import TRANSFERS

KINDS_OF: Mapping[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
END = -1  # the cell of a rank's actions at the end of the step


class Step(NamedTuple):
    """One part of a cell.

    Attributes:
        cell: Position of its cell in the list of the rank.
        done: Action in torch's notation; or ``WAIT_SEND_F``, for example: this transfer ends here.
        stage: The stage.
        microbatch: The microbatch; -1 if it has none.
    """

    cell: int
    done: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.done}{self.microbatch if self.microbatch >= 0 else ''}"


class Defect(NamedTuple):
    """A defect of orders.

    Attributes:
        rank: The rank; -1 if no single rank has the defect.
        cell: Position of the cell in the list of the rank, or `END`.
        text: The defect in words.
    """

    rank: int
    cell: int
    text: str


# A Program of steps.


class Building:
    """Turns steps into a Program, and collects steps without a meaning.

    Args:
        schedule: The schedule of the computes.
        steps: The steps of each rank.
        adds_transfers: True if the steps have no transfers. Then a send starts right after the
            compute that makes it, and all receives start first, in the order of their sends.

    Attributes:
        schedule: The schedule of the computes.
        cell_of: For each rank and item, its cell.
        adds_transfers: See above.
        received: For each rank the transfers that it receives, if they were added.
        defects: Steps that the Program does not have, with the reason.
        program: The Program.
    """

    def __init__(
        self, schedule: Schedule, steps: Sequence[Sequence[Step]], *, adds_transfers: bool = False
    ) -> None:
        self.schedule, rank_of = schedule, schedule.stage_to_rank
        self.adds_transfers = adds_transfers
        self.defects: list[Defect] = []
        done = {(step.done, step.stage) for of_rank in steps for step in of_rank}
        kinds = {kind for kind, _ in done}
        self.reduced = {stage for kind, stage in done if kind == "REDUCE_GRAD"}
        self.ends_reductions = "WAIT_REDUCE_GRAD" in kinds
        channels = [
            channel
            for link, (source, target) in enumerate(pairwise(rank_of))
            if source != target
            for channel in (Channel(link, "F", source, target), Channel(link, "B", target, source))
        ]
        self.channel_of: dict[tuple[int, str], int] = {c[:2]: n for n, c in enumerate(channels)}
        self.received = [list[int]() for _ in steps]
        for step in joined(*steps) if adds_transfers else ():
            if (made := self.made(step)) >= 0:
                transfer = made << MICROBATCH_BITS | step.microbatch
                self.received[channels[made].target].append(transfer)
        of_ranks = [_RankItems(self, rank, of_rank) for rank, of_rank in enumerate(steps)]
        self.cell_of = tuple(of_rank.cells for of_rank in of_ranks)
        for stage, rank in enumerate(rank_of):
            if self.reduced and stage not in self.reduced:
                text = f"the gradients of stage {stage} are never reduced, those of others are"
                self.defects.append(Defect(rank, END, text))
        self.program = Program(
            schedule,
            chain(len(rank_of)),
            tuple(channels),
            tuple(of_rank.items for of_rank in of_ranks),
            forward_only=kinds.intersection(KINDS_OF) == {"F"},
        )

    def made(self, step: Step) -> int:
        """Returns the channel by which a compute's result goes to another rank; -1 if none does."""
        _, done, stage, _ = step
        link = {"F": (stage, "F"), "B": (stage - 1, "B"), "I": (stage - 1, "B")}.get(done)
        return self.channel_of.get(link, -1) if link else -1

    def channel(self, step: Step) -> int | str:
        """Returns the channel of a transfer, or the reason why there is none."""
        _, done, stage, microbatch = step
        is_downwards = done in ("SEND_F", "RECV_B")  # between the stage and the next one
        link, num_stages = stage - (not is_downwards), len(self.schedule.stage_to_rank)
        if not 0 <= stage < num_stages:
            return f"there is no stage {stage}"
        if microbatch >= self.schedule.num_microbatches:
            return f"no stage computes microbatch {microbatch}"
        if not 0 <= link < num_stages - 1:
            return f"stage {stage} is the {'last' if is_downwards else 'first'} one"
        on_one_rank = f"stages {link} and {link + 1} are on one rank"
        return self.channel_of.get((link, done[-1]), on_one_rank)


class _RankItems:
    """Creates the items of one rank.

    Attributes:
        items: The items.
        cells: For each item, its cell.
    """

    def __init__(self, building: Building, rank: int, steps: Sequence[Step]) -> None:
        self.items, self.cells = array("q"), array("q")
        self._building, self._rank = building, rank
        self._last = {s.stage: n for n, s in enumerate(steps) if s.done in {"B", "W"}}
        self._last_inputs = {s.stage: n for n, s in enumerate(steps) if s.done in {"B", "I"}}
        self._waited = set[int]()
        self._open: dict[int, Op] = {}  # transfers in flight -> the wait for each
        self._reducing = -1  # the stage whose reduction has not ended, in orders of torch 2.15
        do: dict[str, Callable[[int, Step], None]] = {
            **dict.fromkeys(KINDS_OF, self._compute),
            **dict.fromkeys(TRANSFERS, self._transfer),
            **dict.fromkeys((f"WAIT_{transfer}" for transfer in TRANSFERS), self._wait),
            "REDUCE_GRAD": self._reduce,
            "WAIT_REDUCE_GRAD": self._end_reduction,
        }
        for transfer in building.received[rank]:
            self._add(END, transfer << OP_BITS | Op.POST_RECEIVE)
        for number, step in enumerate(steps):
            # UNSHARD and RESHARD send nothing between stages, and torch raises if one is missing.
            if step.done in do:
                do[step.done](number, step)
        for transfer, op in self._open.items():
            if op is Op.RELEASE:  # torch before 2.15 waits for sends at the end of the step
                self._add(END, transfer << OP_BITS | op)
        if self._reducing >= 0:
            text = (
                f"the reduction of stage {self._reducing} never ends: WAIT_REDUCE_GRAD is missing"
            )
            building.defects.append(Defect(rank, END, text))

    def _add(self, cell: int, item: int) -> None:
        self.items.append(item)
        self.cells.append(cell)

    def _refuse(self, step: Step, why: str) -> None:
        self._building.defects.append(Defect(self._rank, step.cell, f"{step}: {why}"))

    def _transfer(self, _number: int, step: Step) -> None:
        channel = self._building.channel(step)
        if isinstance(channel, str):
            self._refuse(step, channel)
            return
        is_send = step.done.startswith("SEND")
        op = Op.SEND if is_send else Op.POST_RECEIVE
        self._add(step.cell, encode(op, channel, step.microbatch))
        transfer = channel << MICROBATCH_BITS | step.microbatch
        self._open[transfer] = Op.RELEASE if is_send else Op.WAIT_RECEIVE

    def _wait(self, _number: int, step: Step) -> None:
        name = step.done.removeprefix("WAIT_")
        channel = self._building.channel(step._replace(done=name))
        transfer = -1 if isinstance(channel, str) else channel << MICROBATCH_BITS | step.microbatch
        if transfer in self._open:
            self._waited.add(transfer)
            self._add(step.cell, transfer << OP_BITS | self._open.pop(transfer))
        elif (self._rank, step.cell) not in {d[:2] for d in self._building.defects}:
            self._refuse(step, f"there is no {name} to wait for")

    def _compute(self, number: int, step: Step) -> None:
        cell, done, stage, microbatch = step
        building = self._building
        needed = {"F": (stage - 1, "F"), "B": (stage, "B"), "I": (stage, "B")}.get(done)
        channel = building.channel_of.get(needed, -1) if needed else -1
        transfer = channel << MICROBATCH_BITS | microbatch
        if channel >= 0 and transfer not in self._waited:
            self._waited.add(transfer)
            self._open.pop(transfer, None)
            self._add(cell, transfer << OP_BITS | Op.WAIT_RECEIVE)
        is_last = self._last.get(stage) == number
        if done == "B" and is_last:
            self._add(cell, encode(Op.LAST_BACKWARD, stage))
        index = action_index(Action(stage, KINDS_OF[done], microbatch))
        self._add(cell, encode(Op.COMPUTE, index, microbatch))
        if building.adds_transfers and building.made(step) >= 0:
            self._transfer(number, step._replace(done="SEND_F" if done == "F" else "SEND_B"))
        if self._last_inputs.get(stage) == number < self._last.get(stage, -1):
            self._add(cell, encode(Op.INPUTS_FINAL, stage))
        if is_last and stage not in building.reduced:
            self._add(cell, encode(Op.FINAL, stage))

    def _reduce(self, _number: int, step: Step) -> None:
        if self._reducing >= 0:
            self._refuse(step, f"the reduction of stage {self._reducing} has not ended")
        self._reducing = step.stage if self._building.ends_reductions else -1
        if step.stage in self._last:
            self._add(step.cell, encode(Op.FINAL, step.stage))
        else:
            self._refuse(step, f"rank {self._rank} has no backward of stage {step.stage}")

    def _end_reduction(self, _number: int, step: Step) -> None:
        if self._reducing != step.stage:
            self._refuse(step, f"no reduction of stage {step.stage} is under way")
        self._reducing = -1
