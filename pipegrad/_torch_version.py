"""Refuses a torch that is too old. `pipegrad` imports this file before all others."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path

OLDEST = (2, 11)


def refuse_old(version: str) -> None:
    """Does nothing if a torch of this version is new enough.

    Raises:
        ImportError: If it is too old.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"pipegrad needs torch {oldest} or later, and found torch {version}. "
            f"Install a newer one: pip install 'torch>={oldest}'"
        )


def installed() -> str:
    """Returns the version of torch, read in its folder: importing it takes two seconds."""
    if "torch" not in sys.modules and (spec := find_spec("torch")) is not None:
        for folder in spec.submodule_search_locations or ():
            file = Path(folder) / "version.py"
            found = re.search(
                r"""__version__ = ['"](.*)['"]""", file.read_text() if file.exists() else ""
            )
            if found:
                return found[1]
    return str(importlib.import_module("torch").__version__)


refuse_old(installed())
