"""Orders: the actions of ranks of any framework, in its own notation and as a Program.

Files are read, but not executed. A cell is one of these:

- torch's notation: ``2F0``, ``1SEND_B3``, ``0REDUCE_GRAD``, ``(0F1;1B0)OVERLAP_F_B``. A receive
  ends before the compute that reads it, a send at its ``1WAIT_SEND_B3`` or, as in torch before
  2.15, before the end of the step.
- An instruction of DeepSpeed, as its ``repr`` prints it: ``RecvActivation(buffer_id=1)``. A
  transfer ends before the next instruction. A stage is a rank.
- A function of Megatron's schedules, by its name: ``send_forward_recv_backward``. The transfers of
  one call start in Megatron's order, and end before the next call. A stage is a rank, or, with
  interleaving, ``forward_step(vp_stage=1)``. Computes are counted, and a transfer carries the next
  value that its rank computes or needs. A call with ``recv_prev=False`` or ``output_tensor=None``,
  for example, does not have that transfer.
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
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Literal, NamedTuple, TypeGuard

from pipegrad import run_files
from pipegrad.errors import ScheduleError, reason
from pipegrad.limits import MOST_ORDERS_BYTES, check_size
from pipegrad.orders.building import KINDS_OF, Building, Defect, Step
from pipegrad.printable import shortened
from pipegrad.schedules.program.lower import lower
from pipegrad.schedules.program.program import Program
from pipegrad.schedules.schedule import Action, Schedule
from pipegrad.schedules.torch_csv import TRANSFERS, check_numbers, parts

_CELL_OF = attrgetter("cell")


@dataclass(frozen=True)
class Orders:
    """The orders of all ranks.

    Attributes:
        name: Name of the file, or of the source.
        cells: For each rank, its cells as they were written; "" is idle.
        program: The orders as a Program.
        cell_of: For each rank and item of the program, its cell.
        defects: Cells without a meaning in a pipeline. The program does not have them.
        transfers: "own" if the source has transfers. "placed" if it has only computes, and torch
            has added transfers where its runtime puts them. "impossible" if inputs never come; then
            receives are first, and each send is right after its compute.
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
    """Returns the orders of a file, of lists, of a schedule of torch, or of one of pipegrad.

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
        name = shortened(str(source), 300)
        return _of_cells(name, *_rows_of_file(Path(source), name))
    if hasattr(source, "pipeline_order") and hasattr(source, "_stage"):
        raise ScheduleError(
            f"orders are a {type(source).__name__}: with one stage a rank torch runs code, and not "
            f"its table pipeline_order; expected a list of the actions of each rank"
        )
    if hasattr(source, "micro_batches") and hasattr(source, "stage_id"):
        raise ScheduleError(
            f"orders are a {type(source).__name__} of stage {source.stage_id}: expected a list "
            f"with the one of each rank"
        )
    name = type(source).__name__ if hasattr(source, "pipeline_order_with_comms") else "orders"
    # An older torch, or a schedule that computes only, has no transfers.
    for attribute in ("pipeline_order_with_comms", "pipeline_order"):
        source = getattr(source, attribute, None) or source
    rows = _rows_of_lists(source)
    return _of_cells(name, rows, [f"rank {rank}" for rank in range(len(rows))])


def _rows_of_file(path: Path, name: str) -> tuple[list[list[str]], list[str]]:
    """Returns the cells of each rank, and their places; empty lines and comments are no ranks."""
    rows, places = list[list[str]](), list[str]()
    try:
        text = run_files.read(path, MOST_ORDERS_BYTES).decode("utf-8-sig")
        lines = csv.reader(io.StringIO(text, newline=""))
        for line in lines:
            row = [cell.strip() for cell in line]
            if row and row != [""] and not row[0].startswith("#"):
                rows.append(row)
                places.append(f"line {lines.line_num}")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{name}: byte {error.start} is no UTF-8 text") from error
    except (OSError, ValueError) as error:  # a path may be none
        raise ScheduleError(f"{name}: {reason(error)}") from error
    except csv.Error as error:
        raise ScheduleError(f"{name} is not a CSV file: {error}") from error
    while rows and not any(rows[-1]):
        rows.pop()
    return rows, places


def _rows_of_lists(source: object) -> list[list[str]]:
    """Returns cells from lists, from a table of ranks, or from anything that yields lists."""
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
    rows = list[list[str]]()
    for rank, of_rank in enumerate(source):
        if not _is_list(of_rank):
            raise ScheduleError(
                f"orders of rank {rank} are {shortened(repr(of_rank))}: expected a list of its "
                f"actions"
            )
        rows.append(list(_flat(of_rank)))
    return rows


def _is_list(value: object) -> TypeGuard[Iterable[object]]:
    is_action = isinstance(value, tuple) and hasattr(value, "_fields")  # torch's are tuples
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes)) and not is_action


def _flat(value: object) -> Iterator[str]:
    """Yields the cells of a rank; DeepSpeed has a list of them for each step."""
    if _is_list(value):
        for item in value:
            yield from _flat(item)
    else:
        yield "" if value is None else str(value).strip()


def _of_cells(name: str, rows: list[list[str]], places: list[str]) -> Orders:
    steps = _steps(rows, [f"{name}, {place}" for place in places])
    if not steps:
        raise ScheduleError(f"{name} has no cells; expected a line for each rank, such as 0F0,0B0")
    computes = [[step for step in of_rank if step.done in KINDS_OF] for of_rank in steps]
    rank_of: dict[int, int] = {}
    for rank, of_rank in enumerate(computes):
        if not of_rank:
            raise ScheduleError(f"{name}, {places[rank]} computes nothing; each rank has a stage")
        for step in of_rank:
            rank_of.setdefault(step.stage, rank)
    microbatches = {step.microbatch for step in joined(*computes)}
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
        from pipegrad.interop.private import with_transfers  # other orders need no torch

        order = [
            [[(s.stage, s.done, s.microbatch) for s in cell] for _, cell in groupby(own, _CELL_OF)]
            for own in steps
        ]
        made = with_transfers(order, schedule.stage_to_rank)
        transfers = "impossible" if made is None else "placed"
        if made is not None:
            steps = [
                [Step(n, done, stage, m) for n, (stage, done, m) in enumerate(own)] for own in made
            ]
            cells = tuple(tuple(map(str, own)) for own in steps)
    building = Building(schedule, steps, adds_transfers=transfers == "impossible")
    defects = tuple(building.defects)
    return Orders(name, cells, building.program, building.cell_of, defects, transfers)


def _of_program(program: Program) -> Orders:
    """Returns the orders of a Program of pipegrad: each item is a cell."""
    cells = tuple(
        tuple(" ".join(program.words(item).split()) for item in program.decoded(rank))
        for rank in range(len(program.items))
    )
    cell_of = tuple(array("q", range(len(of_rank))) for of_rank in cells)
    return Orders(program.schedule.name, cells, program, cell_of, is_own=True)


# Meaning of cells.


class _Call(NamedTuple):
    """A call of a function of Megatron's, or an instruction of DeepSpeed."""

    name: str
    arguments: Mapping[str, str]


def _steps(rows: Sequence[Sequence[str]], places: Sequence[str]) -> list[list[Step]]:
    calls = [list(map(_call, row)) for row in rows]
    said = [call.arguments for of_rank in calls for call in of_rank if call]
    # With overlap_p2p_comm Megatron starts the transfers of all calls in another order.
    is_overlapped = any(arguments.get("overlap_p2p_comm") == "True" for arguments in said)
    num_chunks = 1 + max((int(arguments.get("vp_stage", 0)) for arguments in said), default=0)
    return [
        list(_steps_of(row, of_rank, place, _Named(rank, len(rows), num_chunks, of_rank), order))
        for rank, (row, of_rank, place) in enumerate(zip(rows, calls, places, strict=False))
        for order in [_OVERLAPPED[rank % 2] if is_overlapped else _FIXED]
    ]


def _steps_of(
    row: Sequence[str],
    calls: Sequence[_Call | None],
    place: str,
    named: _Named,
    order: Sequence[str],
) -> Iterator[Step]:
    last_sent: dict[str, Step] = {}
    for number, (cell, call) in enumerate(zip(row, calls, strict=True)):
        where = f"{place}, cell {number + 1}"
        if call is None:
            if cell[:1].isalpha():
                raise ScheduleError(
                    f"{where}: {shortened(cell)!r} is not understood; expected actions of torch "
                    f"such as 2F0, of DeepSpeed such as ForwardPass(buffer_id=0), or of Megatron "
                    f"such as send_forward, with a comma between"
                )
            for stage, done, microbatch in parts(cell, where):
                yield Step(number, done, stage, microbatch)
            continue
        does = _NAMED[call.name]
        meaning = [done for done in order if done in does] or does
        steps = [
            Step(number, done, *named.next(done, call, where))
            for done in meaning
            if not named.is_idle(done, call)
        ]
        yield from steps
        waited = [step for step in steps if step.done in TRANSFERS]
        if call.arguments.get("overlap_p2p_comm") == "True":
            # Receives end before the compute that reads them. A send ends after the next send.
            sends = {step.done: step for step in waited if step.done.startswith("SEND")}
            waited = [
                last_sent.pop(done)
                for done in does
                if done in last_sent and call.arguments.get(_FLAGS[done]) != "None"
            ]
            last_sent |= sends
        for step in waited:
            yield step._replace(cell=number, done=f"WAIT_{step.done}")


_FIXED = ("SEND_B", "RECV_F", "SEND_F", "RECV_B")
_OVERLAPPED = (  # on even ranks and on odd ones
    ("SEND_F", "RECV_F", "SEND_B", "RECV_B"),
    ("RECV_F", "SEND_F", "RECV_B", "SEND_B"),
)
_FLAGS = {  # the argument that removes the transfer from a call
    "SEND_F": "output_tensor",
    "SEND_B": "input_tensor_grad",
    "RECV_F": "recv_prev",
    "RECV_B": "recv_next",
}
_CALL = re.compile(r"(?:\w{1,60}\.){0,3}([A-Za-z_]{1,60})(?:\(([^()]{0,200})\))?", re.ASCII)
_ARGUMENT = re.compile(
    r"((?:buffer_id|vp_stage)=\d{1,9}|(?:output_tensor|input_tensor_grad)=None"
    r"|(?:recv_prev|recv_next|overlap_p2p_comm)=(?:True|False))",
    re.ASCII,
)
# Name of a function or instruction -> its actions.
_NAMED: Mapping[str, tuple[str, ...]] = {
    # DeepSpeed. It reduces over all ranks of a stage, and over tied stages, at the end.
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
    "send_forward_recv_forward": ("SEND_F", "RECV_F"),
    "send_backward_recv_backward": ("SEND_B", "RECV_B"),
    "send_forward_backward_recv_forward_backward": _FIXED,
}


def _call(cell: str) -> _Call | None:
    call = _CALL.fullmatch(cell)
    if call is None or call[1] not in _NAMED:
        return None
    said = [argument for argument in re.split(r"[,;\s]+", call[2] or "") if argument]
    if not all(map(_ARGUMENT.fullmatch, said)):
        return None
    return _Call(call[1], dict(argument.split("=") for argument in said))


class _Named:
    """Finds the stage and the microbatch of each call of a rank.

    Instructions of DeepSpeed name a buffer. Their microbatch is that of the last forward that was
    computed in this buffer. Other calls are counted.
    """

    def __init__(
        self, rank: int, num_ranks: int, num_chunks: int, calls: Iterable[_Call | None]
    ) -> None:
        self._rank, self._last = rank, num_ranks * num_chunks - 1
        self._last_rank, self._is_plain = num_ranks - 1, num_chunks == 1
        self._counts = Counter[str]()
        self._in_buffer: dict[str, int] = {}
        self._newest: dict[str, int] = {}  # F or B -> the stage that was computed last
        computed: dict[str, list[tuple[int, int]]] = {"F": [], "B": []}
        counts = Counter[tuple[str, int]]()
        for call in calls:
            if call and call.name in ("forward_step", "backward_step"):
                (kind,) = _NAMED[call.name]
                stage = int(call.arguments.get("vp_stage", 0)) * num_ranks + rank
                computed[kind].append((stage, counts[kind, stage]))
                counts[kind, stage] += 1
        self._of = {
            done: [value for value in computed[done[-1]] if value[0] != self._end(done)]
            for done in TRANSFERS
        } | computed

    def _end(self, done: str) -> int:
        """Returns the stage that has no such transfer."""
        return {"RECV_F": 0, "SEND_B": 0, "SEND_F": self._last, "RECV_B": self._last}[done]

    def is_idle(self, done: str, call: _Call) -> bool:
        """True if a call of Megatron skips this transfer; first and last ranks make all calls."""
        if done not in TRANSFERS or call.name[0].isupper():
            return False
        if call.arguments.get(_FLAGS[done]) in ("None", "False"):
            return True
        if done.startswith("SEND"):
            # With several stages a rank, an argument of the call shows that it sends nothing.
            return self._is_plain and self._newest.get(done[-1], self._rank) == self._end(done)
        is_end = self._rank == (0 if done == "RECV_F" else self._last_rank)
        return is_end and (self._is_plain or call.name in ("recv_forward", "recv_backward"))

    def next(self, done: str, call: _Call, where: str) -> tuple[int, int]:
        """Returns stage and microbatch."""
        if call.name[0].isupper():
            buffer = call.arguments.get("buffer_id")
            counted = done in KINDS_OF or done in TRANSFERS
            return self._rank, self._microbatch_of(done, buffer, where) if counted else -1
        number = self._counts[done]
        self._counts[done] += 1
        values = self._of[done]
        value = values[number] if number < len(values) else (self._rank, number)
        if done in KINDS_OF:
            self._newest[done] = value[0]
        return value

    def _microbatch_of(self, done: str, buffer: str | None, where: str) -> int:
        if buffer is not None and done not in ("F", "RECV_F"):
            if buffer not in self._in_buffer:
                raise ScheduleError(f"{where}: nothing was computed in buffer {buffer} before")
            return self._in_buffer[buffer]
        number = self._counts[done]
        self._counts[done] += 1
        if buffer is not None and done == "F":
            self._in_buffer[buffer] = number
        return number
