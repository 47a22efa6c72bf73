"""Orders: what anybody's ranks do, in their own words and as a Program.

Nothing of a file is run. A cell is one of these:

- torch's notation: ``2F0``, ``1SEND_B3``, ``0REDUCE_GRAD``, ``(0F1;1B0)OVERLAP_F_B``. A receive
  ends before the compute that reads it, a send before the end of the step.
- An instruction of DeepSpeed, as its ``repr`` prints it: ``RecvActivation(buffer_id=1)``. A
  transfer ends before the next instruction. A stage is a rank.
- A function of Megatron's schedule without interleaving, by its name:
  ``send_forward_recv_backward``. The transfers of one call start in Megatron's fixed order, and
  end before the next call. A stage is a rank, and computes are counted.
"""

from __future__ import annotations

import csv
import io
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain as joined
from pathlib import Path
from typing import Literal

from pipegrad import run_files
from pipegrad.errors import ScheduleError, reason
from pipegrad.limits import MOST_ORDERS_BYTES, check_size
from pipegrad.orders.building import KINDS_OF, Building, Defect, Step, placed
from pipegrad.printable import printable, shortened
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.program import Program
from pipegrad.schedules.schedule import Action, Schedule
from pipegrad.schedules.torch_csv import TRANSFERS, check_numbers, parts


@dataclass(frozen=True)
class Orders:
    """What ranks do.

    Attributes:
        name: The file, or what was given.
        cells: For each rank its cells, as they were written; "" is idle.
        program: The same as a Program.
        cell_of: For each rank and item of the program its cell.
        defects: Cells that mean nothing in a pipeline. The program does not have them.
        transfers: "own" if they are of the source. "placed" if it has computes alone, and they
            were added where torch's runtime puts them. "impossible" if inputs never come.
        is_own: True for a schedule of pipegrad.
    """

    name: str
    cells: tuple[tuple[str, ...], ...]
    program: Program
    cell_of: tuple[array[int], ...]
    defects: tuple[Defect, ...] = ()
    transfers: Literal["own", "placed", "impossible"] = "own"
    is_own: bool = False


def read_orders(source: object) -> Orders:
    """Returns the orders of a file, of lists, of a schedule of torch, or of pipegrad's own.

    Args:
        source: See `pipegrad.verify`.

    Raises:
        ScheduleError: If they cannot be read. The message names line and cell.
    """
    if isinstance(source, Schedule):
        source = lower(source)
    if isinstance(source, Program):
        return _of_program(source)
    if isinstance(source, (str, Path)):
        name = printable(str(source))
        return _of_cells(name, _rows_of_file(Path(source), name))
    name = type(source).__name__ if hasattr(source, "pipeline_order_with_comms") else "orders"
    # An older torch, or a schedule that computes only, has no transfers.
    for attribute in ("pipeline_order_with_comms", "pipeline_order"):
        source = getattr(source, attribute, None) or source
    return _of_cells(name, _rows_of_lists(source))


def _rows_of_file(path: Path, name: str) -> list[list[str]]:
    try:
        text = run_files.read(path, MOST_ORDERS_BYTES).decode("utf-8-sig")
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text, newline=""))]
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{name}: byte {error.start} is no UTF-8 text") from error
    except (OSError, ValueError) as error:  # a path may be none
        raise ScheduleError(f"{name}: {reason(error)}") from error
    except csv.Error as error:
        raise ScheduleError(f"{name} is not a CSV file: {error}") from error
    while rows and not any(rows[-1]):
        rows.pop()
    return rows


def _rows_of_lists(source: object) -> list[list[str]]:
    """Returns cells of lists, of a table of ranks, or of anything that yields lists."""
    if isinstance(source, Mapping):
        if sorted(source) != list(range(len(source))):
            raise ScheduleError(
                f"orders are of the ranks {shortened(str(list(source)))}: expected all from 0 on"
            )
        source = [source[rank] for rank in range(len(source))]
    if not isinstance(source, Iterable) or isinstance(source, bytes):
        raise ScheduleError(
            f"orders are {shortened(repr(source))}: expected a file, a list of the actions of each "
            f"rank, a schedule of torch with its actions, or a schedule of pipegrad"
        )
    return [list(_flat(of_rank)) for of_rank in source]


def _flat(value: object) -> Iterator[str]:
    """Yields the cells of a rank; DeepSpeed has a list of them for each step."""
    is_action = isinstance(value, tuple) and hasattr(value, "_fields")  # torch's are tuples
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) and not is_action:
        for item in value:
            yield from _flat(item)
    else:
        yield "" if value is None else str(value).strip()


def _of_cells(name: str, rows: list[list[str]]) -> Orders:
    steps = [list(_steps(name, rank, row, len(rows))) for rank, row in enumerate(rows)]
    computes = [[step for step in of_rank if step.done in KINDS_OF] for of_rank in steps]
    if not steps:
        raise ScheduleError(f"{name} has no cells; expected a line for each rank, such as 0F0,0B0")
    for rank, of_rank in enumerate(computes):
        if not of_rank:
            raise ScheduleError(f"{name}, line {rank + 1} computes nothing; each rank has a stage")
    rank_of: dict[int, int] = {}
    for rank, of_rank in enumerate(computes):
        for step in of_rank:
            rank_of.setdefault(step.stage, rank)
    microbatches = {step.microbatch for of_rank in computes for step in of_rank}
    check_numbers(name, "stage", set(rank_of))
    check_numbers(name, "microbatch", microbatches)
    check_size(len(rank_of), len(microbatches))
    schedule = Schedule(
        name,
        len(microbatches),
        tuple(rank_of[stage] for stage in range(len(rank_of))),
        tuple(tuple(Action(s.stage, KINDS_OF[s.done], s.microbatch) for s in c) for c in computes),
    )
    transfers: Literal["own", "placed", "impossible"] = "own"
    cells = tuple(map(tuple, rows))
    if len(rows) > 1 and not any(step.done in TRANSFERS for step in joined(*steps)):
        steps, is_possible = placed(steps, schedule.stage_to_rank)
        transfers = "placed" if is_possible else "impossible"
        cells = tuple(tuple(map(str, of_rank)) for of_rank in steps)
        steps = [[s._replace(cell=n) for n, s in enumerate(of_rank)] for of_rank in steps]
    building = Building(schedule, steps)
    return Orders(
        name,
        cells,
        building.program(),
        tuple(building.cell_of),
        tuple(building.defects),
        transfers,
    )


def _of_program(program: Program) -> Orders:
    """Returns orders of pipegrad's own: each item is a cell."""
    cells = tuple(
        tuple(" ".join(program.words(item).split()) for item in program.decoded(rank))
        for rank in range(len(program.items))
    )
    cell_of = tuple(array("q", range(len(of_rank))) for of_rank in cells)
    return Orders(program.schedule.name, cells, program, cell_of, is_own=True)


# What cells say.


def _steps(name: str, rank: int, row: Sequence[str], num_ranks: int) -> Iterator[Step]:
    named = _Named(rank)
    for number, cell in enumerate(row):
        where = f"{name}, line {rank + 1}, cell {number + 1}"
        call = _CALL.fullmatch(cell)
        if call is None or call[1] not in _NAMED:
            for stage, done, microbatch in parts(cell, where):
                yield Step(number, done, stage, microbatch)
            continue
        # Megatron calls its functions on the first and the last rank, too, and they do nothing.
        idle = _IDLE_FIRST * (rank == 0) + _IDLE_LAST * (rank == num_ranks - 1)
        meaning = [m for m in _NAMED[call[1]] if call[1][0].isupper() or m not in idle]
        for done in meaning:
            microbatch = named.microbatch_of(done, call[2], where) if done in _COUNTED else -1
            yield Step(number, done, rank, microbatch)
        if any(done in TRANSFERS for done in meaning):
            yield Step(number, "WAIT", -1, -1)


_IDLE_FIRST, _IDLE_LAST = ("RECV_F", "SEND_B"), ("SEND_F", "RECV_B")
_COUNTED = (*KINDS_OF, *TRANSFERS)
_CALL = re.compile(r"([A-Za-z_]{1,60})(?:\((?:buffer_id=(\d{1,9}))?\))?", re.ASCII)
# What is called -> what it does. Several transfers are in the fixed order of Megatron.
_NAMED: Mapping[str, tuple[str, ...]] = {
    # DeepSpeed. What it reduces over all ranks of a stage, or of tied ones, it does at the end.
    **dict.fromkeys(("LoadMicroBatch", "OptimizerStep", "ReduceTiedGrads"), ()),
    "ReduceGrads": ("REDUCE_GRAD",),
    "ForwardPass": ("F",),
    "BackwardPass": ("B",),
    "SendActivation": ("SEND_F",),
    "RecvActivation": ("RECV_F",),
    "SendGrad": ("SEND_B",),
    "RecvGrad": ("RECV_B",),
    # Megatron.
    "forward_step": ("F",),
    "backward_step": ("B",),
    "recv_forward": ("RECV_F",),
    "send_forward": ("SEND_F",),
    "recv_backward": ("RECV_B",),
    "send_backward": ("SEND_B",),
    "send_forward_recv_backward": ("SEND_F", "RECV_B"),
    "send_backward_recv_forward": ("SEND_B", "RECV_F"),
    "send_forward_recv_forward": ("RECV_F", "SEND_F"),
    "send_backward_recv_backward": ("SEND_B", "RECV_B"),
}


class _Named:
    """Which microbatch an instruction is of: those of DeepSpeed name a buffer, others are counted.

    A buffer has the microbatch of the last forward that was computed in it.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._counts = Counter[str]()
        self._in_buffer: dict[str, int] = {}

    def microbatch_of(self, done: str, buffer: str | None, where: str) -> int:
        if buffer is not None and done not in ("F", "RECV_F"):
            if buffer not in self._in_buffer:
                raise ScheduleError(f"{where}: nothing was computed in buffer {buffer} before")
            return self._in_buffer[buffer]
        number = self._counts[done]
        self._counts[done] += 1
        if buffer is not None and done == "F":
            self._in_buffer[buffer] = number
        return number
