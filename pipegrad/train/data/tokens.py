"""Token files: the tokens of text files, written once a machine and mapped by all its ranks.

[Note: token files] A rank with the whole text in its memory would take several times its size, and
each rank of a machine again. So one rank of each machine reads the text piece by piece, makes
tokens of it, and writes them into a file of the folder ``data.cache``. All ranks of the machine map
this file into their memory. The system then loads only pages that are read, once for all ranks.

The name of the file depends on paths, sizes and times of the text files, on the tokenizer, on the
separator, and on the user. So a later run with the same text uses the file again. A record lies
beside it. The record is written last, so a file without a record is not whole.

Nobody can tell whether tokens are those of a text without making them again. So users of one folder
have files of their own, which nobody else can read, and no user reads those of another.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pipegrad import run_files
from pipegrad.comm.agreement import agree_keeping
from pipegrad.errors import ConfigError
from pipegrad.train.config import Config, path_of
from pipegrad.train.data.tokenizer import Tokenizer, Tokens

_VERSION = 2  # of token files
_PRIVATE = 0o600  # permissions
_RECORD_BYTES = 2**16  # the most that is read of one
_NO_RECORD = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
_MODIFIED = "modified_ns"  # when the file was, in its record
_PIECE_BYTES = 2**18  # text that is encoded by itself
_BATCH_CHARACTERS = 2**22  # text that is encoded at once, by all threads of a tokenizer
_WRITE_SECONDS = 4 * 3600.0  # timeout for the slowest machine to make tokens of its text


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens.

    Attributes:
        path: Where it is.
        dtype: Of a token, as numpy names it.
        numel: Number of tokens.
        digest: SHA-256 of all tokens.
    """

    path: str
    dtype: str
    numel: int
    digest: str

    def mapped(self) -> Tokens:
        """Returns the tokens ``(numel,)``, mapped into memory and read-only."""
        if not self.numel:
            return np.zeros(0, self.dtype)  # an empty file cannot be mapped
        with run_files.opened_own(Path(self.path)) as file:
            return np.memmap(file, np.dtype(self.dtype), mode="r", shape=(self.numel,))


def shared_token_file(
    config: Config, key: str, files: Sequence[str], tokenizer: Tokenizer
) -> TokenFile:
    """Returns the token file of some text files, on this rank's machine. Every rank must call it.

    Args:
        config: The configuration.
        key: Where it names the files, for messages.
        files: Paths, and shell-style patterns of paths.
        tokenizer: Makes the tokens.

    Raises:
        ConfigError: As `write_tokens` does; on all ranks.
    """
    # Machines, and the ranks of a machine, as torchrun numbers them. Ranks that were started in
    # another way write their own files. These are the same, and the last one counts.
    machine = os.environ.get("GROUP_RANK", "0")
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"

    def write() -> tuple[TokenFile | str | None, tuple[str, TokenFile | str | None]]:
        own: TokenFile | str | None = None
        if is_first:
            try:
                own = write_tokens(config, key, files, tokenizer)
            except ConfigError as error:
                own = str(error)
        return own, (machine, own)

    def read() -> tuple[TokenFile, None]:
        # What the first rank of a machine says of its text is said by all ranks of this machine.
        of_machine = [x for name, x in written if name == machine and x is not None]
        file = of_machine[0] if own is None else own
        if isinstance(file, str):
            raise ConfigError(file)
        return file, None

    subject = f"the text of {key}"
    own, written = agree_keeping(subject, write, timeout_seconds=_WRITE_SECONDS)
    return agree_keeping(subject, read)[0]


def write_tokens(config: Config, key: str, files: Sequence[str], tokenizer: Tokenizer) -> TokenFile:
    """Returns the token file of some text files. If the folder has it already, nothing is read.

    The arguments are those of `shared_token_file`.

    Raises:
        ConfigError: If a file is missing, empty or not text, or the folder cannot be written.
    """
    paths = [path for file in files for path in _matching(config, key, file)]
    separator = tokenizer.separator(config.data.separator) if config.data.separator else None
    states = [_state(config, key, path) for path in paths]
    identity = repr((_VERSION, os.geteuid(), states, tokenizer.digest, config.data.separator))
    folder = _cache_folder(config)
    name = hashlib.sha256(identity.encode()).hexdigest()[:32]
    path, record = folder / f"{name}.tokens", folder / f"{name}.json"
    dtype = str(tokenizer.encode([""])[0].dtype)
    try:
        if (known := _recorded(record, path, dtype)) is not None:
            return known
        folder.mkdir(parents=True, exist_ok=True)
        pieces = (piece for path in paths for piece in _pieces(config, key, path))
        with run_files.replacing(path, _PRIVATE) as out:
            numel, digest = _write(out, pieces, tokenizer, separator)
        file = TokenFile(str(path), dtype, numel, digest)
        content = asdict(file) | {_MODIFIED: path.stat().st_mtime_ns}
        run_files.replace(record, json.dumps(content).encode(), _PRIVATE)
    except run_files.PlantedError as error:
        config.refuse("data.cache", f"{error}. It may name another folder", cause=error)
    except OSError as error:
        complaint = f"{folder} cannot be written: {run_files.why_not_written(folder, error)}"
        config.refuse("data.cache", f"{complaint}. It may name another folder", cause=error)
    return file


def _write(
    out: BinaryIO,
    pieces: Iterable[tuple[str, bool]],
    tokenizer: Tokenizer,
    separator: Tokens | None,
) -> tuple[int, str]:
    """Writes the tokens of all pieces; returns their number and the SHA-256 of all."""
    digest, numel = hashlib.sha256(), 0
    for batch in _batches(pieces):
        encoded = tokenizer.encode([text for text, _ in batch])
        for tokens, (_, ends) in zip(encoded, batch, strict=True):
            for part in (tokens, separator) if ends and separator is not None else (tokens,):
                content = part.tobytes()
                out.write(content)
                digest.update(content)
                numel += part.size
    return numel, digest.hexdigest()


def _batches(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Yields pieces in groups that are encoded at once."""
    batch, size = list[tuple[str, bool]](), 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0]) + 1
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(config: Config, key: str, path: Path) -> Iterator[tuple[str, bool]]:
    """Yields the pieces of a file's documents, each with whether it ends its document."""
    try:
        with path.open("rb") as file:
            if path.suffix.lower() == ".jsonl":
                yield from _documents(config, key, file)
            else:
                yield from _whole_lines(config, key, file)
    except OSError as error:
        config.refuse(key, f"{path} cannot be read: {error.strerror}", cause=error)


def _documents(config: Config, key: str, file: BinaryIO) -> Iterator[tuple[str, bool]]:
    """Yields the field ``text`` of each line of JSON. Empty lines are left out."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        where = f"{file.name}, line {number},"
        try:
            value: object = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            config.refuse(key, f"{where} is not JSON: {error}", cause=error)
        text = value.get("text") if isinstance(value, dict) else None
        if not isinstance(text, str):
            fields = sorted(value) if isinstance(value, dict) else type(value).__name__
            config.refuse(key, f"{where} has no string 'text', found {fields}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            config.refuse(key, f"{where} has half of a character: {error}", cause=error)
        yield text, True


def _whole_lines(config: Config, key: str, file: BinaryIO) -> Iterator[tuple[str, bool]]:
    """Yields the text of a file in pieces that end with a line, if lines are not very long."""
    decoder, rest, num_read = codecs.getincrementaldecoder("utf-8")(), "", 0
    content = b"first"
    while content:
        content = file.read(_PIECE_BYTES)
        num_read += len(content)
        try:
            rest += decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:
            # The decoder keeps bytes of a character that is not whole, before `content`.
            at = num_read - len(error.object) + error.start
            position = f"byte {error.object[error.start]:#04x} at {at}"
            complaint = f"{file.name} is not UTF-8 text: {position}; convert it"
            config.refuse(key, complaint, cause=error)
        if "\0" in rest:
            config.refuse(key, f"{file.name} is binary, not text: it has a zero byte")
        end = rest.rfind("\n") + 1 or len(rest)
        yield rest[:end], False
        rest = rest[end:]
    yield rest, True


def _matching(config: Config, key: str, file: str) -> list[Path]:
    """Returns the files of one entry of a list of files, which may be a pattern."""
    # A file whose name looks like a pattern is taken as a file.
    path = path_of(file)
    if glob.has_magic(file) and not os.path.lexists(path):
        try:
            paths = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        except ValueError as error:
            config.refuse(key, f"{file}: {error}", cause=error)
        if not paths:
            config.refuse(key, f"no file matches {file}, seen from the working directory")
        return paths
    return [path]


def _state(config: Config, key: str, path: Path) -> tuple[str, int, int, int]:
    """Returns path, size and times of a file: with other content, at least one is different."""
    try:
        state = path.stat()
    except FileNotFoundError as error:
        config.refuse(key, f"there is no {path}, seen from the working directory", cause=error)
    except OSError as error:
        config.refuse(key, f"{path} cannot be read: {error.strerror}", cause=error)
    except ValueError as error:  # a zero byte
        config.refuse(key, f"{str(path)!r} is no path: {error}", cause=error)
    if not state.st_size:
        config.refuse(key, f"{path} is empty")
    return str(path.resolve()), state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _cache_folder(config: Config) -> Path:
    if config.data.cache is not None:
        return path_of(config.data.cache)
    return path_of(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "pipegrad"


def _recorded(record: Path, path: Path, dtype: str) -> TokenFile | None:
    """Returns the token file of a record; None if there is none, or if it is not whole.

    Args:
        record: Of the file.
        path: The one that it should name.
        dtype: The one that it should name.

    Raises:
        PlantedError: If another user has written the record or the file.
    """
    with ExitStack() as files:
        try:
            lines, tokens = (
                files.enter_context(run_files.opened_own(file)) for file in (record, path)
            )
            content = json.loads(lines.read(_RECORD_BYTES))
            digest, modified = content["digest"], content.pop(_MODIFIED)
        except (FileNotFoundError, NotADirectoryError, *_NO_RECORD):
            return None
        state = os.fstat(tokens.fileno())
        numel, rest = divmod(state.st_size, np.dtype(dtype).itemsize)
        file = TokenFile(str(path), dtype, numel, digest)
        if rest or content != asdict(file) or not isinstance(digest, str):
            return None
        # The file may be a copy, or its disk may have changed it.
        if modified != state.st_mtime_ns:
            return file if digest == hashlib.file_digest(tokens, "sha256").hexdigest() else None
        return file
