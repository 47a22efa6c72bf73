"""Launcher: gives torchrun, or `pipegrad launch`, the cause of a failure, which it prints last."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path


def tell_launcher(cause: str, *, is_all: bool = False) -> None:
    """Writes the cause where torchrun looks for it; does nothing without torchrun.

    Args:
        cause: What has failed.
        is_all: Whether a rank of this machine prints the cause and nothing more. Then
            `pipegrad launch` does not say it again.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        now = str(int(time.time()))
        info = {"py_callstack": cause, "timestamp": now, "is_all": is_all}
        message = {"message": cause, "extraInfo": info}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": message}))
