"""Schedules in the notation of torch.distributed.pipelining; without torch."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from pipegrad.errors import ScheduleError
from pipegrad.printable import shortened
from pipegrad.schedules.schedule import Action, Kind, Schedule

_COMPUTE: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
_SKIPPED = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_OF_TRANSFERS = (*TRANSFERS, "WAIT_SEND_F", "WAIT_SEND_B")  # torch 2.15 waits for each send
# At most nine digits, because a huge number in a file must not fill the memory.
_CELL = re.compile(r"(\d{1,9})([A-Z_]+)(\d{0,9})", re.ASCII)
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def read_csv(
    text: str, *, name: str = "csv", feeds: tuple[tuple[int, ...], ...] | None = None
) -> Schedule:
    """Returns the schedule that torch's compute-only CSV notation describes.

    Each line is a rank, in order. Its cells are its actions: ``2F0``, ``1B3``, or, for a split
    backward, ``2I0`` and ``2W0``. ``(0F1;1B0)OVERLAP_F_B`` is 0F1, then 1B0. An empty cell is idle.
    UNSHARD, RESHARD, REDUCE_GRAD and its wait are skipped, because pipegrad decides these itself.

    Args:
        text: The content of the file.
        name: Name of the schedule, also in errors.
        feeds: Sources of each stage; see `Schedule`. Needed if the stages are not a chain.

    Raises:
        ScheduleError: If a cell is none of these, a stage is on two lines, a number of a stage or
            microbatch is left out, or the schedule is not complete or can never be run.

    Source: ``_load_csv`` and ``_Action.from_str`` in torch/distributed/pipelining/schedules.py.
    """
    try:
        lines = list(csv.reader(text.rstrip().splitlines()))
    except csv.Error as error:
        raise ScheduleError(f"{name} is not a CSV file: {error}") from error
    # The file has no map from stages to ranks. The line of a stage's first action is its rank.
    rank_of: dict[int, int] = {}
    actions = tuple(_line_actions(name, rank, cells, rank_of) for rank, cells in enumerate(lines))
    if not actions:
        raise ScheduleError(f"{name} has no cells; expected a line for each rank, such as 0F0,0B0")
    microbatches = {action.microbatch for of_rank in actions for action in of_rank}
    check_numbers(name, "stage", set(rank_of))
    check_numbers(name, "microbatch", microbatches)
    stage_to_rank = tuple(rank_of[stage] for stage in range(len(rank_of)))
    schedule = Schedule(name, len(microbatches), stage_to_rank, actions, feeds=feeds)
    _ = schedule.ticks  # raises if it can never be run
    return schedule


def write_csv(schedule: Schedule) -> str:
    """Returns the schedule's grid in torch's notation, with idle cells, one line for each rank.

    `read_csv` of the result has the same actions.

    Raises:
        ScheduleError: If the schedule is not complete or can never be run.

    Source: ``_dump_csv`` in torch/distributed/pipelining/schedules.py, for its ``compute_only``.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(schedule.grid)
    return text.getvalue()


def for_torch(schedule: Schedule) -> str:
    """Returns `write_csv` of a schedule that torch's ``_PipelineScheduleRuntime`` can run.

    Raises:
        ScheduleError: If the stages are not a chain. torch sends the output of a stage to the next
            stage only.
    """
    chain = tuple((stage - 1,) if stage else () for stage in range(len(schedule.stage_to_rank)))
    if schedule.feeds not in (None, chain):
        raise ScheduleError(
            f"schedule {schedule.name!r} feeds its stages from the stages {schedule.feeds}, and "
            f"torch sends the output of a stage to the next stage only: run it by "
            f"pipegrad.Scheduler, or take a schedule whose stages are a chain"
        )
    return write_csv(schedule)


def _line_actions(
    name: str, rank: int, cells: list[str], rank_of: dict[int, int]
) -> tuple[Action, ...]:
    """Returns the actions of a line, and adds the rank of each stage to `rank_of`."""
    actions = list[Action]()
    for number, cell in enumerate(cells, start=1):
        where = f"{name}, line {rank + 1}, cell {number}"
        for action in _actions(cell.strip(), where):
            holder = rank_of.setdefault(action.stage, rank)
            if holder != rank:
                raise ScheduleError(
                    f"{where}: {action} is of stage {action.stage}, which line {holder + 1} has "
                    f"already; a stage is on one rank"
                )
            actions.append(action)
    if not actions:
        raise ScheduleError(f"{name}, line {rank + 1} has no cells; each rank holds a stage")
    return tuple(actions)


def _actions(cell: str, where: str) -> Iterator[Action]:
    for stage, done, microbatch in parts(cell, where):
        # Transfers of a file are an error, because their order was made for torch's runtime, and
        # pipegrad proves only its own order.
        if done in _OF_TRANSFERS:
            raise ScheduleError(
                f"{where}: {cell} is a transfer; give the compute-only file, pipegrad lowers "
                f"transfers by itself"
            )
        if done in _COMPUTE:
            yield Action(stage, _COMPUTE[done], microbatch)


def parts(cell: str, where: str) -> Iterator[tuple[int, str, int]]:
    """Yields the actions of a cell: stage, kind, and microbatch; -1 if it has none.

    Raises:
        ScheduleError: If it is not understood. The message begins with `where`.
    """
    if cell == "":
        return
    if overlapped := _OVERLAP.fullmatch(cell):
        for part in overlapped[1].split(";"):
            yield from parts(part.strip(), where)
        return
    stage, done, microbatch = match.groups() if (match := _CELL.fullmatch(cell)) else ("", "", "")
    if done not in _SKIPPED and not (microbatch and (done in _COMPUTE or done in _OF_TRANSFERS)):
        raise ScheduleError(
            f"{where}: {shortened(cell)!r} is not understood; expected stage, kind (F, B, I or "
            f"W) and microbatch, such as 2F0"
        )
    yield int(stage), done, int(microbatch or -1)


def check_numbers(name: str, kind: str, numbers: set[int]) -> None:
    """Refuses numbers of stages or microbatches that leave one out."""
    if missing := sorted(set(range(len(numbers))) - numbers):
        raise ScheduleError(
            f"{name} has a {kind} {max(numbers)} but no {kind} {missing[0]}; expected all from 0 on"
        )
