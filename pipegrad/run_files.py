"""Run files: opens, makes, replaces and removes files and folders of a run, and follows no link.

[Note: who may write there] The folder of a run may lie where other users can write, and its names
can be guessed. The code here writes to regular files alone, and to no link, because the link of
another user would make a run write, empty or remove the target of the link, with the rights of the
run's user. A new file that replaces another one is written under a name that nobody can guess, and
that must not exist before. The owner of an entry is not checked: see docs/trust.md.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from pipegrad.errors import PipegradError, in_words, reason
from pipegrad.limits import MOST_JSON_BYTES, MOST_JSON_CONTAINERS

TEMPORARY = f"*.{'[0-9a-f]' * 16}.partial"  # the pattern of files that `replace` has begun
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
}


class PlantedError(PipegradError, OSError):
    """An entry is of another kind than expected, such as a link. The message names kind and path.

    No run of this user has made it.
    """


def opened(path: Path) -> BufferedReader:
    """Opens a regular file for reading. A link to one is followed: reading changes nothing.

    Raises:
        PlantedError: If it is of another kind.
        OSError: If it cannot be opened.
    """
    # A named pipe would wait for its writer.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    kind = stat.S_IFMT(os.fstat(file.fileno()).st_mode)
    if kind != stat.S_IFREG:
        file.close()
        raise PlantedError(f"{path} is {_KINDS[kind]}, expected a file")
    return file


def read(path: Path, most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """Returns the content of a file.

    Raises:
        OSError: If `opened` raises it, or the file is larger.
    """
    with opened(path) as file:
        content = file.read(most_bytes + 1)  # files of /proc have the size 0
    if len(content) > most_bytes:
        complaint = f"it has more than {most_bytes:,} bytes, the most that is read"
        raise OSError(errno.EFBIG, complaint, str(path))
    return content


def parsed_json(content: bytes) -> object:
    """Returns the value of a JSON text.

    Raises:
        ValueError: If it is no JSON, too large or too deep. A JSONDecodeError has the position.
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


def open_to_change(path: Path, flags: int) -> int:
    """Opens a file that stays, or a folder, and follows no link; returns its number.

    Raises:
        PlantedError: If it is a link, or of another kind.
        OSError: If it cannot be opened.
    """
    expected = stat.S_IFDIR if flags & os.O_DIRECTORY else stat.S_IFREG
    try:
        number = os.open(path, flags | _NO_LINK, 0o666)
    except OSError:
        if os.path.lexists(path):  # the system calls a link a loop, and a socket no device
            _refuse_kind(path, path.lstat().st_mode, expected)
        raise
    try:
        _refuse_kind(path, os.fstat(number).st_mode, expected)
    except PlantedError:
        os.close(number)
        raise
    return number


def _refuse_kind(path: Path, mode: int, expected: int) -> None:
    if (kind := stat.S_IFMT(mode)) != expected:
        raise PlantedError(f"{path} is {_KINDS[kind]}, expected {_KINDS[expected]}: remove it")


def replace(path: Path, content: bytes, permissions: int = 0o666) -> None:
    """Writes a file that replaces another one when it is whole and on the disk.

    `path` has its old content or the new one, even if this process is killed.

    Raises:
        PlantedError: If something is there that is no regular file.
        OSError: If the file cannot be written.
    """
    mode = None
    with suppress(FileNotFoundError):  # one that may not be written is not replaced
        number = open_to_change(path, os.O_WRONLY)
        mode = stat.S_IMODE(os.fstat(number).st_mode) & 0o777
        os.close(number)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    with open(unfinished, "xb", opener=lambda name, how: os.open(name, how, permissions)) as file:
        try:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


def make_folder(path: Path) -> None:
    """Makes a folder, if it is not there.

    Raises:
        PlantedError: If it is a link, or of another kind.
        OSError: If it cannot be made.
    """
    with suppress(FileExistsError):
        path.mkdir(parents=True)
    refuse_planted(path)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, as far as that is possible."""
    with suppress(OSError):
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)  # it refuses links


def refuse_planted(folder: Path) -> None:
    """Refuses a folder that `make_folder` would refuse.

    Raises:
        PlantedError: If it is a link, or of another kind.
        OSError: If it cannot be read.
    """
    os.close(open_to_change(folder, os.O_RDONLY | os.O_DIRECTORY))


def why_not_written(error: BaseException) -> str:
    """Returns the reason why a file cannot be written; if the disk is full, with advice."""
    words = reason(error) if isinstance(error, OSError) else in_words(error)
    is_full = getattr(error, "errno", None) in _FULL
    return f"the disk is full ({words}): make room" if is_full else words
