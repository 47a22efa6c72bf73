"""The injector: makes the fault of this process's cell strike once, at its place.

Models, handlers and hooks of `parts` say where they are. What no user's code sees, such as a send,
says it by a wrapper that `install` puts around one function.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.faults.cell import FAULT_STEP, SLOW_SECONDS, Cell

HIT, CUT = "hit", "cut"  # files: the fault strikes now; the link is down

_FIRST_CHECKPOINT = Path("run/checkpoint-2/index.json")
_CELL = Cell.here()
_RANK = int(os.environ.get("RANK", "0"))


class _State:
    """Where this rank is."""

    step = 0  # of `Trainer.step`; 0 while the job is set up
    calls = 0  # of the present step, at the place
    has_struck = False
    is_installed = False


def strikes(place: str) -> str:
    """Returns the fault if it changes a value here and now, else "". Other faults strike inside."""
    if _CELL is None or place != _CELL.place or _CELL.rank != _RANK or not _is_time(_CELL):
        return ""
    # A model is made twice, without memory and with it. The first may fail: the second tells why.
    if _State.has_struck and (_CELL.place != "construction" or _CELL.fault == "slow"):
        return ""
    if not _State.has_struck:
        _note_hit()
    _State.has_struck = True
    act = _ACTS.get(_CELL.fault)
    if act is None:
        return _CELL.fault
    act()
    return ""


def _is_time(cell: Cell) -> bool:
    if cell.place in ("construction", "handler"):
        return True
    _State.calls += 1
    if cell.place == "first step":
        return _State.step == 1
    if cell.place == "writing" and not _FIRST_CHECKPOINT.exists():
        return False  # it may be written while steps go on
    # The second call: then messages of the first microbatch are on their way.
    needs = 2 if cell.place in ("forward", "backward", "transfer", "writing") else 1
    return _State.step >= FAULT_STEP and _State.calls >= needs


def _note_hit() -> None:
    """Writes the time into a file, and whether there is a checkpoint. The file appears whole."""
    unfinished = Path(f"{HIT}.{_RANK}")
    unfinished.write_text(f"{time.time()} {int(_FIRST_CHECKPOINT.exists())}")
    unfinished.rename(HIT)


# What a rank does to itself.


def _raise() -> None:
    raise RuntimeError("injected")


def _exit() -> None:
    sys.exit(0)


def _exit_at_once() -> None:
    os._exit(0)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _stall() -> None:
    while True:
        time.sleep(3600)


def _wait_for_cut() -> None:
    while not Path(CUT).exists():
        time.sleep(0.01)


def _sleep() -> None:
    time.sleep(SLOW_SECONDS)


_ACTS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "exit": _exit,
    "_exit": _exit_at_once,
    "kill": _kill,
    "stop": _stop,
    "stall": _stall,
    "cut": _wait_for_cut,
    "slow": _sleep,
}


# What no user's code sees.


def install() -> None:
    """Wraps the functions where no public seam is. Call it before the first step."""
    if _CELL is None or _State.is_installed:
        return
    _State.is_installed = True
    from pipegrad.gradients import param_sync
    from pipegrad.pipeline.transfers import Transfers
    from pipegrad.train.loop import Trainer

    _before(Trainer, "step", _begin_step)
    _before(Transfers, "send", lambda *_: strikes("transfer"))
    _before(zlib, "crc32", lambda *_: strikes("writing"))
    _after(param_sync, "sync_parameters", _change_synced)
    register_optimizer_step_pre_hook(_change_stepped)


def _begin_step(_trainer: object, number: int, *_: object) -> None:
    _State.step, _State.calls = number, 0


def _change_synced(parameters: torch.Tensor, *_: object) -> None:
    if strikes("parameter sync") == "non-finite":
        parameters.fill_(torch.nan)


def _change_stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
    fault = strikes("optimizer") if _State.step else ""
    parameter = optimizer.param_groups[0]["params"][0]
    if fault == "no gradient":
        parameter.grad = None
    elif fault == "non-finite":
        parameter.grad.fill_(torch.nan)
    elif fault == "shape":
        parameter.data = parameter.data[:-1]


def _before(owner: Any, name: str, call: Callable[..., object]) -> None:
    function = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        call(*args)
        return function(*args, **options)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, call: Callable[..., object]) -> None:
    function = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        call(*args)
        return result

    setattr(owner, name, wrapped)
