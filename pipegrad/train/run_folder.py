"""The folder of a run: it is always new, so no run overwrites another."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from pipegrad.errors import ConfigError
from pipegrad.train.config import Config, path_of


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
    # Runs that start at the same time try the same names. `mkdir` and the exclusive open in `begin`
    # fail for all but one of them, and the others try the next number.
    while True:
        try:
            working = Path.cwd()
            if output.resolve() in (working, *working.parents):
                config.refuse(
                    "train.output",
                    f"is {output.resolve()}, which holds more than a run: name a folder that "
                    f"is not there yet, as in 'runs/run'",
                )
            folder = output
            if number > 1:
                folder = folder.parent / f"{folder.resolve().name}-{number}"
            folder.mkdir(parents=True)
            begin(folder)
        except FileExistsError:
            number += 1
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            config.refuse("train.output", f"cannot be written: {error}", cause=error)
        else:
            return str(folder)


def free_space(folder: Path) -> str:
    """Returns the free bytes of a folder's disk as text; "" if they are not known."""
    try:
        return f"; {shutil.disk_usage(folder).free:,} bytes are free there"
    except OSError:
        return ""
