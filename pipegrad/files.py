"""Files that anybody may have written: read whole, within limits, and never waited for."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

from pipegrad.limits import MOST_JSON_BYTES, MOST_JSON_CONTAINERS


def read_file(path: Path, most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """Returns the content of a regular file.

    Raises:
        OSError: If it cannot be read, is no regular file, or is larger. `reason` says which.
        ValueError: If the path is none.
    """
    # A pipe that nobody writes to would not even be opened; nor does a device have an end.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as file:
        mode = os.fstat(number).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        content = file.read(most_bytes + 1)  # files of /proc have the size 0
    if len(content) > most_bytes:
        complaint = f"it has more than {most_bytes:,} bytes, the most that is read"
        raise OSError(errno.EFBIG, complaint, str(path))
    return content


def parsed_json(content: bytes) -> object:
    """Returns what JSON says.

    Raises:
        ValueError: If it is none, or too much or too deep to be read. A JSONDecodeError says where.
    """
    num_containers = content.count(b"[") + content.count(b"{")
    if num_containers > MOST_JSON_CONTAINERS:
        raise ValueError(
            f"it has {num_containers:,} lists and objects, expected at most "
            f"{MOST_JSON_CONTAINERS:,}"
        )
    try:
        parsed: object = json.loads(content)
    except RecursionError as error:
        raise ValueError("its lists and objects are nested too deeply") from error
    except UnicodeDecodeError as error:  # it would bring the whole content along
        raise ValueError(f"byte {error.start} is no UTF-8 text") from error
    return parsed
