"""What each cell of the matrix must do, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.faults.cell import Cell


@dataclass(frozen=True)
class Expected:
    """What a cell must do."""

    ends: Literal["fails", "finishes"]  # non-zero on every rank, with one report; or with code 0
    culprit: int | None = None  # whom the report names first; None where no rank is to blame
    says: str = ""  # a part of the report
    why: str = ""  # for the table


@dataclass(frozen=True)
class Excluded:
    """A cell that does not exist."""

    why: str


_NO_GRADIENT = "no gradient is there"
_SENT = "the receiver takes what is sent: as in a forward"
_FIXED = "the plan fixes its shape"
_SAVED = "a checkpoint saves what there is"
_NOT_FINITE = Expected("fails", None, "step 3", "the norm of the gradients is not finite")
_LOSS = "the output does not fit to the targets, and the loss raises"
_NO_SAVE = Expected("finishes", why="the save fails, and a line says so")
_ZEROS = Expected("finishes", why="it counts as zeros")
_SIZE = Excluded("the size of what stages send changes nothing")
_SENDING = ("first step", "forward", "backward", "transfer", "reduction", "evaluation")
_ENDING = ("raise", "exit", "_exit", "kill", "stop", "stall", "cut", "slow")

# Faults that change a value, or end nothing. All others end the job.
_CHANGES: dict[tuple[str, str], Expected | Excluded] = {
    ("raise", "checkpoint"): _NO_SAVE,
    ("raise", "writing"): _NO_SAVE,
    ("exit", "writing"): Excluded("no code of a user runs there"),
    ("no gradient", "construction"): Excluded(_NO_GRADIENT),
    ("no gradient", "handler"): Excluded(_NO_GRADIENT),
    ("no gradient", "first step"): _ZEROS,
    ("no gradient", "forward"): _ZEROS,
    ("no gradient", "backward"): _ZEROS,
    ("no gradient", "transfer"): Excluded("a backward decides it"),
    ("no gradient", "parameter sync"): Excluded(_NO_GRADIENT),
    ("no gradient", "optimizer"): Expected("finishes", why="torch does not step the parameter"),
    ("no gradient", "evaluation"): Excluded(_NO_GRADIENT),
    ("no gradient", "checkpoint"): Excluded(_NO_GRADIENT),
    ("no gradient", "writing"): Excluded(_NO_GRADIENT),
    ("shape", "construction"): Expected("fails", None, "model"),
    ("shape", "handler"): Excluded("it makes no tensor"),
    ("shape", "transfer"): Excluded(_SENT),
    ("shape", "reduction"): Excluded(_FIXED),
    ("shape", "parameter sync"): Excluded(_FIXED),
    ("shape", "checkpoint"): Excluded(_SAVED),
    ("shape", "writing"): Excluded(_SAVED),
    ("non-finite", "construction"): Expected("fails", None, "model"),
    ("non-finite", "handler"): Excluded("it makes no tensor"),
    ("non-finite", "first step"): Expected("fails", None, "step 1"),
    ("non-finite", "forward"): _NOT_FINITE,
    ("non-finite", "backward"): _NOT_FINITE,
    ("non-finite", "transfer"): Excluded(_SENT),
    ("non-finite", "reduction"): _NOT_FINITE,
    ("non-finite", "parameter sync"): Expected("fails", None, "drifted apart"),
    ("non-finite", "optimizer"): Expected("fails", None, "step 4"),
    ("non-finite", "evaluation"): Expected("finishes", why="the held-out loss is nan"),
    ("non-finite", "checkpoint"): Excluded(_SAVED),
    ("non-finite", "writing"): Excluded(_SAVED),
}


def expected(cell: Cell) -> Expected | Excluded:
    """Returns what a cell must do."""
    if cell.size != "small" and (cell.place not in _SENDING or cell.fault not in _ENDING):
        return _SIZE
    if cell.fault in ("", "slow"):
        return Expected("finishes", why="the loss is that of a run without a fault")
    if cell.fault == "shape" and cell.place in ("first step", "forward", "evaluation"):
        # The rank of the last stage computes the loss. With 2 x 2 ranks it is rank 2 itself.
        return Expected("fails", 3 if cell.layout == "4" else 2, why=_LOSS)
    return _CHANGES.get((cell.fault, cell.place), Expected("fails", cell.rank))
