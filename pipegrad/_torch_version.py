"""Refuses a torch that is too old. `pipegrad` imports this file before all others."""

from __future__ import annotations

import re
import sys
from glob import iglob

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


# Read the version from the name of a folder, because importing torch takes two seconds, and
# importlib.metadata or pathlib takes longer than the rest of `import pipegrad`.
_installed = (path for folder in sys.path for path in iglob(f"{folder}/torch-[0-9]*-info"))  # noqa: PTH207
refuse_old(next(_installed, "").rpartition("torch-")[2].removesuffix(".dist-info"))
