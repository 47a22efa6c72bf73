"""The folder of a run. A new run has a new one, so no run overwrites another."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from pipegrad import run_files
from pipegrad.comm.agreement import agree
from pipegrad.errors import ConfigError, reason
from pipegrad.train.checkpoint.storage import put_aside, remove_unfinished
from pipegrad.train.config import Config, path_of
from pipegrad.train.run.manifest import MANIFEST, read_manifest

METRICS = "metrics.jsonl"
_SEEN_SECONDS = 5.0  # for a network file system to show a new file


def make_run_folder(config: Config, begin: Callable[[Path], None]) -> str:
    """Makes the folder ``train.output``, with a number behind it if it exists already.

    Args:
        config: The configuration.
        begin: Called with the folder, to open the files of the run.

    Returns:
        The path of the folder.

    Raises:
        ConfigError: If the folder cannot be made, or `begin` fails.
    """
    output, number = path_of(config.train.output), 1
    # Runs that start at the same time try the same names. `mkdir` fails for all but one of them,
    # and the others try the next number.
    while True:
        folder = output
        try:
            _refuse_above(config, output)
            if number > 1:
                folder = folder.parent / f"{folder.resolve().name}-{number}"
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except (OSError, ValueError) as error:
            config.refuse("train.output", f"cannot be written: {reason(error)}", cause=error)
        else:
            _begin(config, folder, begin)
            return str(folder)


def _refuse_above(config: Config, output: Path) -> None:
    working = Path.cwd()
    if output.resolve() in (working, *working.parents):
        config.refuse(
            "train.output",
            f"is {output.resolve()}, which holds more than a run: name a folder that "
            f"is not there yet, as in 'runs/run'",
        )


def _begin(config: Config, folder: Path, begin: Callable[[Path], None]) -> None:
    """Opens the files of a new run. If that fails, the run leaves no folder."""
    try:
        begin(folder)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError | ValueError) and not isinstance(error, ConfigError):
            config.refuse("train.output", f"cannot be written: {reason(error)}", cause=error)
        raise


def continue_run_folder(
    config: Config,
    folder: Path,
    step: int,
    begin: Callable[[Path], None],
    *,
    damaged: Sequence[Path] = (),
) -> str:
    """Prepares the folder of a run that goes on after a step; returns its path.

    Removes what the run did after this step: rows of its metrics, and unfinished checkpoints. The
    reports of a failure move into a folder of their own.

    Args:
        config: The configuration.
        folder: Of the run.
        step: The last one that it has made.
        begin: Called with the folder, to open the files of the run.
        damaged: Checkpoints of later steps. They are renamed: otherwise the run would go on from
            one of them.

    Raises:
        ConfigError: If the folder cannot be written, or `begin` fails.
    """
    try:
        remove_unfinished(folder)
        run_files.remove_temporary(folder)
        for later in damaged:
            if later.parent == folder and later.exists():  # another run keeps its own
                put_aside(later)
        _move_reports(folder)
        cut_rows(folder / METRICS, step)
        begin(folder)
    except (OSError, ValueError) as error:
        config.refuse("train.output", f"{folder} cannot be written: {reason(error)}", cause=error)
    return str(folder)


def _move_reports(folder: Path) -> None:
    """Moves the reports of a failure away, since this launch has not failed."""
    if reports := sorted(folder.glob("failure*.txt")):
        launches = (read_manifest(folder) or {}).get("launches", [])
        away = folder / f"failures-of-launch-{len(launches)}"
        run_files.make_folder(away)
        for report in reports:
            report.replace(away / report.name)


def cut_rows(path: Path, step: int) -> None:
    """Removes the rows of later steps from a file of metrics, and a row that is not whole."""
    if not os.path.lexists(path):
        return
    kept = list[bytes]()
    for line in run_files.read(path).splitlines(keepends=True):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                kept.append(line)
    run_files.replace(path, b"".join(kept))


def refuse_unseen(config: Config, folder: Path, *, is_new: bool) -> None:
    """Refuses the folder of a run that some rank does not see; every rank must call it.

    Args:
        config: The configuration.
        folder: The folder.
        is_new: Whether this run has made it. Then it is removed if it is refused.

    Raises:
        ConfigError: If a rank does not see it; on all ranks.
    """

    # A rank of another machine may have a folder of this name on a disk of its own. The manifest
    # says when it was written, so it is another one there.
    def digest() -> str:
        return _digest(folder) if dist.get_rank() == 0 else ""

    expected = agree("the manifest of the run", digest)[0]
    replies = agree("the folder of the run", lambda: (_sees(folder, expected), _machine()))
    blind = {rank: machine for rank, (sees, machine) in enumerate(replies) if not sees}
    if blind:
        if is_new and dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        machines = sorted(set(blind.values()))
        config.refuse(
            "train.output",
            f"ranks {sorted(blind)} on {', '.join(machines)} do not see {folder}, which rank 0 on "
            f"{replies[0][1]} has made, and each rank writes a part of each checkpoint: choose a "
            f"folder that all machines share, or set train.save = false",
        )


def _sees(folder: Path, expected: str) -> bool:
    # A network file system may show a new file late.
    deadline = time.monotonic() + _SEEN_SECONDS
    while (found := _digest(folder)) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return found == expected


def _digest(folder: Path) -> str:
    with suppress(OSError):
        path = folder / MANIFEST
        return hashlib.sha256(run_files.read(path)).hexdigest()
    return ""


def _machine() -> str:
    return f"{socket.gethostname()} in {Path.cwd()}"
