"""Origin: where a run goes on from, and in which folder.

[Note: what a run goes on from]
1. A rank that torchrun has restarted goes on with the run of its own launch, whatever the
   configuration says: the manifest of a run says which launch made it; see
   [Note: one launch, several starts].
2. ``train.resume`` names a checkpoint: a new run begins with its values.
3. It names the folder of a run: this run goes on in this folder, from its newest checkpoint.
4. It is "auto": as 3, with the newest run of ``train.output``; a new run if there is none. A run of
   another ``train.output`` may have such a name, too. Its manifest says so.

In 1 and 4 nobody has named the folder. So the run of another user is not taken. If there are only
such runs, 4 is refused. A checkpoint that is found in the folder of a run belongs to the owner of
the folder, to this user, or to root; see [Note: who may write there].
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipegrad import run_files
from pipegrad.train.checkpoint.storage import INDEX, checkpoints, step_of
from pipegrad.train.config import Config, path_of
from pipegrad.train.run_folder import MANIFEST, RunLock, is_of_launch, is_of_output, read_manifest

AUTO = "auto"


@dataclass(frozen=True)
class Origin:
    """Where a run goes on from.

    Attributes:
        folder: The folder of the run that goes on; None for a new run.
        checkpoints: What to read, and what was there before it, newest first; empty to start anew.
        complaint: Why there is no such thing; "" if there is.
        notes: For the user.
    """

    folder: Path | None = None
    checkpoints: tuple[Path, ...] = ()
    complaint: str = ""
    notes: tuple[str, ...] = ()


def find_origin(config: Config, launch: Sequence[str]) -> Origin:
    """Returns where a run goes on from; see [Note: what a run goes on from].

    One rank decides for all, since a folder may change at any time.

    Args:
        config: The configuration.
        launch: The names of this launch.
    """
    try:
        return _found(config, launch)
    except (ValueError, run_files.PlantedError) as error:  # of a manifest, or of a checkpoint
        return Origin(complaint=str(error))


def _found(config: Config, launch: Sequence[str]) -> Origin:
    configured = _configured(config)
    runs = [run for run in _runs(path_of(config.train.output)) if run_files.is_own(run)]
    runs += [configured.folder] if configured.folder else []
    own = [run for run in runs if is_of_launch(run, launch)]
    if not own:
        return configured
    run = max(own, key=_age)
    # A run that was ended before its first checkpoint starts again as it was configured.
    return Origin(run, _checkpoints(run) or configured.checkpoints)


def locked_origin(config: Config, launch: Sequence[str]) -> tuple[Origin, RunLock | None]:
    """Returns where a run goes on from, and the lock of the folder that it goes on in.

    Args:
        config: The configuration.
        launch: The names of this launch.

    Raises:
        ConfigError: If another process works in this folder.
    """
    origin = find_origin(config, launch)
    if origin.folder is None:
        return origin, None
    try:
        lock = RunLock(origin.folder)
    except OSError as error:
        config.refuse("train.resume", str(error), cause=error)
    # Until it was locked, another job may have written there.
    return replace(find_origin(config, launch), notes=lock.notes), lock


def _configured(config: Config) -> Origin:
    """Returns what ``train.resume`` names."""
    if config.train.resume is None:
        return Origin()
    try:
        if config.train.resume == AUTO:
            return _newest(path_of(config.train.output))
        return _named(path_of(config.train.resume))
    except (ValueError, run_files.PlantedError) as error:  # of a manifest, or of a checkpoint
        return Origin(complaint=str(error))


def _newest(output: Path) -> Origin:
    """Returns the newest run of a ``train.output``."""
    runs = [run for run in _runs(output) if checkpoints(run)]
    own = [run for run in runs if run_files.is_own(run) and is_of_output(run, output)]
    if own:
        run = max(own, key=lambda run: checkpoints(run)[0].stat().st_mtime_ns)
        return Origin(run, _checkpoints(run))
    for run in runs:
        if not run_files.is_own(run) and is_of_output(run, output):
            raise ValueError(
                f"{run} is a run of another user: name its folder as train.resume to go on with "
                f"it, or choose another train.output"
            )
    return Origin()


def _named(folder: Path) -> Origin:
    """Returns what the folder of a run, or of a checkpoint, has."""
    if not _is_run(folder):
        step = step_of(folder)
        before = [f for f in _of_owner(folder.parent) if (step_of(f) or 0) < (step or 0)]
        return Origin(None, (folder, *before))
    read_manifest(folder)
    if not (found := _checkpoints(folder)):
        return Origin(complaint="is the folder of a run that has no whole checkpoint")
    return Origin(folder, found)


def _checkpoints(run: Path) -> tuple[Path, ...]:
    """Returns the checkpoints of a run, the newest first.

    Raises:
        PlantedError: If another user has put the newest there. Older ones are left out.
    """
    for newest in checkpoints(run)[:1]:
        run_files.refuse_planted(newest)
    return tuple(_of_owner(run))


def _of_owner(run: Path) -> list[Path]:
    return [folder for folder in checkpoints(run) if not run_files.is_planted(folder)]


def _is_run(folder: Path) -> bool:
    """True if this is the folder of a run, not of a checkpoint."""
    with suppress(OSError, ValueError):  # a path that is none is refused as a checkpoint
        if step_of(folder) is None and not (folder / INDEX).exists():
            return (folder / MANIFEST).exists() or bool(checkpoints(folder))
    return False


def _runs(output: Path) -> list[Path]:
    """Returns the folders that runs with this ``train.output`` have made."""
    with suppress(OSError, ValueError):  # a path that is none is refused when the folder is made
        whole = output.resolve()
        numbered = re.compile(rf"{re.escape(whole.name)}-\d+")
        siblings = [f for f in whole.parent.iterdir() if numbered.fullmatch(f.name)]
        # As the user wrote it, for messages.
        runs = [output, *(output.parent / folder.name for folder in siblings)]
        return [run for run in runs if run.is_dir()]
    return []


def _age(run: Path) -> int:
    return (run / MANIFEST).stat().st_mtime_ns
