"""Manifest: the file of a run that describes it, and has a note of each launch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipegrad import run_files
from pipegrad.errors import in_words
from pipegrad.train.config import path_of
from pipegrad.train.run.launch import process

MANIFEST = "manifest.json"


def read_manifest(run: Path) -> dict[str, Any] | None:
    """Returns the manifest in the folder of a run; None if it has none.

    Raises:
        ValueError: If it is not what a run has written. The message names the file.
    """
    path = run / MANIFEST
    try:
        found: Any = run_files.parsed_json(run_files.read(path))
        launches = found.get("launches", [])
        if not all(isinstance(launch, dict) for launch in launches):
            raise TypeError("a launch in it is no table")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not what a run has written: {in_words(error)}: restore it, or remove it "
            f"and name the run's folder as train.resume"
        ) from error
    return {**found, "launches": list(launches)}


def is_of_output(run: Path, output: Path) -> bool:
    """Returns whether a run was made with this ``train.output``. The run is beside it, or there.

    Raises:
        ValueError: If its manifest is not what a run has written.
    """
    manifest = read_manifest(run)
    if manifest is None:  # somebody has put checkpoints there
        return run.name == output.name
    try:
        configured = path_of(manifest["config"]["train"]["output"])
    except (LookupError, TypeError) as error:
        raise ValueError(
            f"{run / MANIFEST} does not say which train.output it is of: name the run's folder as "
            f"train.resume"
        ) from error
    # The rest of the path depends on the working directory.
    return configured.name in (output.name, output.resolve().name)


def is_of_launch(run: Path, launch: Sequence[str]) -> bool:
    """Returns whether another process of this launch worked in the folder of a run at last.

    Args:
        run: The folder.
        launch: The names of this launch.
    """
    try:
        manifest = read_manifest(run) or {}
    except ValueError:
        return False
    last = manifest.get("launches", [])[-1:]
    names = last[0].get("launch") if last else None
    # A process may make several runs. They are not restarts of each other.
    is_own = bool(last) and last[0].get("process") == process(os.getpid())
    return isinstance(names, list) and not is_own and any(name in launch for name in names)


def with_launch(
    folder: Path,
    manifest: Mapping[str, Any],
    *,
    launch: Sequence[str],
    first_step: int,
    checkpoint: Path | None,
) -> dict[str, Any]:
    """Returns the manifest of a run, with a note of this launch.

    Args:
        folder: Of the run. If it has a manifest, that one is kept.
        manifest: Of a new run.
        launch: The names of this launch.
        first_step: The first step that this launch makes.
        checkpoint: What it goes on from, if anything.

    Raises:
        ValueError: If the manifest in the folder is not what a run has written.
    """
    found = read_manifest(folder) or {**manifest, "launches": []}
    note = {
        "launch": list(launch),
        "process": process(os.getpid()),
        "started": datetime.now(UTC).isoformat(),
        "first_step": first_step,
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }
    return {**found, "launches": [*found["launches"], note]}
