"""Launcher: gives torchrun the cause of a failure, which it prints last."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path


def tell_launcher(cause: str) -> None:
    """Writes the cause where torchrun looks for it; does nothing without torchrun."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        now = str(int(time.time()))
        message = {"message": cause, "extraInfo": {"py_callstack": cause, "timestamp": now}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": message}))
