"""Runs a cell, and says what was wrong with how it ended."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipegrad.checkpoint.files import Files
from pipegrad.checkpoint.folders import INDEX
from pipegrad.errors import CheckpointError
from tests.faults.cell import LAYOUTS, STEPS, Cell
from tests.faults.expected import Expected, expected
from tests.faults.job import RUN, START_SECONDS, STEP_SECONDS, write_job
from tests.faults.network import Network
from tests.faults.world import LAUNCHER, Ended, World, had_checkpoint, run_torchrun

START_BY_TORCHRUN_SECONDS = 60.0
TORCHRUN_GRACE_SECONDS = 30.0  # torchrun waits for ranks after SIGTERM, before it kills them
# Beyond a timeout, for ranks to tell each other and to end. Without a network they wait longer for
# answers that do not come.
GRACE_SECONDS, CUT_GRACE_SECONDS = 15.0, 30.0


@dataclass(frozen=True)
class Outcome:
    """How a cell ended."""

    cell: Cell
    ended: Ended
    error: str  # the first line of the report; "" without one
    culprit: int | None  # whom this line names first
    checkpoints: dict[str, bool | None]  # whether they are whole; None if one does not claim to be
    had_checkpoint: bool  # a whole one was there when the fault struck
    loss: float | None  # of the last step; None if the run did not come to it
    complaints: tuple[str, ...]


def bound_seconds(cell: Cell) -> float:
    """Returns how long ranks may take to end after the fault."""
    is_start = cell.place in ("construction", "handler")
    grace = CUT_GRACE_SECONDS if cell.fault == "cut" else GRACE_SECONDS
    return (START_SECONDS if is_start else STEP_SECONDS) + grace


def outcome(
    cell: Cell,
    *,
    network: Network | None = None,
    by_torchrun: bool = False,
    folder: Path | None = None,
) -> Outcome:
    """Runs a cell, and leaves its files in a folder, if one is given; returns how it ended."""
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return outcome(cell, network=network, by_torchrun=by_torchrun, folder=Path(temporary))
    ended = _run_by_torchrun(cell, folder) if by_torchrun else _run(cell, network, folder)
    errors = re.findall(r"^Error.*$", ended.stderr, re.MULTILINE)
    # An error of several ranks has a line for each, below the first one.
    reports = re.findall(r"^Error.*\n?.*", ended.stderr, re.MULTILINE)
    ranks = [int(rank) for report in reports for rank in re.findall(r"\brank (\d+)", report)[:1]]
    # Each side of a cut has a report, and that of the rank behind it may be first.
    if cell.fault == "cut" and cell.rank in ranks:
        ranks = [cell.rank]
    found = Outcome(
        cell,
        ended,
        error=errors[0] if errors else "",
        culprit=ranks[0] if ranks else None,
        checkpoints=_checkpoints(folder / RUN),
        had_checkpoint=had_checkpoint(folder),
        loss=_loss(folder / RUN),
        complaints=(),
    )
    complaints = tuple(_complaints(found, len(errors), expected(cell)))
    return Outcome(**{**found.__dict__, "complaints": complaints})


def _run(cell: Cell, network: Network | None, folder: Path) -> Ended:
    write_job(cell, folder)
    pipeline, data = LAYOUTS[cell.layout]
    # A run that goes on after its fault makes all its steps.
    lasts = cell.fault == "" or getattr(expected(cell), "ends", "") == "finishes"
    world = World(
        folder,
        pipeline * data,
        variables=cell.variables,
        bound_seconds=60.0 if lasts else bound_seconds(cell),
        stopped=[cell.rank] if cell.fault == "stop" else [],
        network=network,
        cut=cell.rank if cell.fault == "cut" else None,
        keeps_store=cell.rank == 0,
    )
    return world.run()


def _run_by_torchrun(cell: Cell, folder: Path) -> Ended:
    write_job(cell, folder)
    pipeline, data = LAYOUTS[cell.layout]
    limit = START_BY_TORCHRUN_SECONDS + bound_seconds(cell)
    if cell.fault in ("stop", "stall"):
        limit += TORCHRUN_GRACE_SECONDS
    return run_torchrun(folder, pipeline * data, variables=cell.variables, limit_seconds=limit)


@cache
def loss_without_fault(layout: str) -> float:
    """Returns the loss of the last step of a run in which nothing fails."""
    found = outcome(Cell("", "", layout, 0))
    assert found.loss is not None, found.ended.stderr
    return found.loss


def _complaints(found: Outcome, num_errors: int, wanted: object) -> Iterator[str]:
    """Yields what is not as expected, the worst first."""
    assert isinstance(wanted, Expected)
    cell, ended = found.cell, found.ended
    if cell.fault and not ended.has_struck:
        yield "the fault did not strike"
    alive = [rank for rank, code in ended.codes.items() if code is None]
    if cell.fault == "stop":
        alive = [rank for rank in alive if rank != cell.rank]
    if alive:
        yield f"hangs: ranks {alive} do not end"
    if ended.leftover:
        yield f"leaves processes: {len(ended.leftover)}"
    if wanted.ends == "finishes":
        yield from _complaints_of_success(found)
    else:
        yield from _complaints_of_failure(found, num_errors, wanted)
    broken = [name for name, is_whole in found.checkpoints.items() if is_whole is False]
    if broken:
        yield f"leaves a checkpoint that looks whole and is not: {broken}"
    if found.had_checkpoint and not any(found.checkpoints.values()):
        yield "leaves no whole checkpoint"


def _complaints_of_success(found: Outcome) -> Iterator[str]:
    if any(found.ended.codes.values()):
        yield f"exit codes are {found.ended.codes}, expected zeros"
    elif found.loss is None or not math.isfinite(found.loss):
        yield f"the loss of the last step is {found.loss}"
    elif found.cell.fault == "slow" and found.loss != loss_without_fault(found.cell.layout):
        yield f"ends with the loss {found.loss}, not that of a run without a fault"


def _complaints_of_failure(found: Outcome, num_errors: int, wanted: Expected) -> Iterator[str]:
    cell, codes = found.cell, found.ended.codes
    # What a rank does to itself decides its own code.
    others = {r: c for r, c in codes.items() if r != cell.rank or cell.fault not in _OWN_CODE}
    silent = [rank for rank, code in others.items() if code == 0]
    if silent:
        yield f"silent: ranks {silent} end with code 0"
    signals = {rank: code for rank, code in others.items() if code is not None and code < 0}
    if signals:
        yield f"ranks die of signals: {signals}"
    if not found.error:
        yield "there is no report"
    elif wanted.culprit is not None and found.culprit != wanted.culprit:
        yield f"names rank {found.culprit}, expected rank {wanted.culprit}"
    if wanted.says not in found.ended.stderr:
        yield f"does not say {wanted.says!r}"
    # Both sides of a cut have a report, and each rank has one if the store is gone with rank 0.
    most = len(codes) - 1 if cell.rank == 0 else 2 if cell.fault == "cut" else 1
    if num_errors > most:
        yield f"{num_errors} reports, expected {most}"
    tracebacks = found.ended.stderr.count("Traceback (most recent call last)")
    if tracebacks and LAUNCHER not in codes:  # torchrun prints one of its own
        yield f"{tracebacks} tracebacks"


_OWN_CODE = ("_exit", "kill", "stop", "cut")


def _checkpoints(run: Path) -> dict[str, bool | None]:
    """Returns the checkpoints of a run, and whether they are whole."""
    return {folder.name: _is_whole(folder) for folder in sorted(run.glob("*checkpoint-*"))}


def _is_whole(folder: Path) -> bool | None:
    if not (folder / INDEX).exists():
        return None
    try:
        Files(folder).verify()
    except CheckpointError:
        return False
    return True


def _loss(run: Path) -> float | None:
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    last = json.loads(lines[-1]) if lines else {}
    return float(last["loss"]) if last.get("step") == STEPS else None
