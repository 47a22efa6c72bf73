"""Refusal: the error for a wrong item of a Program, with its cell marked in the grid."""

from __future__ import annotations

from itertools import count
from typing import NoReturn

from pipegrad.errors import ScheduleError
from pipegrad.schedules.program.program import OP_MASK, Item, Op, Program, decode
from pipegrad.schedules.schedule import Action

# Most items prepare the action after them. These belong to the action before them.
_BEHIND = {  # ops that belong to the action before them
    int(op) for op in (Op.SEND, Op.FINAL, Op.LAUNCH, Op.PUBLISH, Op.INPUTS_FINAL, Op.SHARED_WEIGHTS)
}


def refuse(program: Program, rank: int, position: int, why: str) -> NoReturn:
    """Raises a ScheduleError that shows the grid, with the cell of an item marked."""
    cell = cell_of(program, rank, position)
    item: Item = decode(program.items[rank][position])
    raise ScheduleError(
        f"schedule {program.schedule.name!r}, rank {rank}, {cell}: {program.words(item)}: {why}\n"
        f"{program.schedule.marked([cell])}"
    )


def cell_of(program: Program, rank: int, position: int) -> Action:
    """Returns the action that an item belongs to.

    This is the item's own action for COMPUTE, else the action that it prepares or follows.
    """
    items = program.items[rank]
    steps = count(position, -1) if items[position] & OP_MASK in _BEHIND else count(position)
    for index in steps:
        if not 0 <= index < len(items):
            break
        if items[index] & OP_MASK == Op.COMPUTE:
            return program.action(decode(items[index]))
    actions = program.schedule.actions[rank]
    return actions[-1] if actions else Action(0, "F", 0)
