"""Refuses a torch that is too old. `pipegrad` imports this file before all others."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib import metadata

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


# The version of the installation: importing torch takes two seconds.
with suppress(metadata.PackageNotFoundError):
    refuse_old(metadata.version("torch"))
