"""Text as bytes, and the batches of a run. They are the same on every rank and for every cut."""

from __future__ import annotations

import glob
import hashlib
import os
import pydoc_data.topics
from pathlib import Path

import torch
from torch import Tensor

from pipegrad.train.config import Config, path_of

_FEWEST_BYTES = 2  # a byte and its successor


class Corpus:
    """A text in memory. Each byte is a token.

    Args:
        text: The bytes.
        sequence_length: Tokens of a sequence. One more token follows it, as the last target.
    """

    def __init__(self, text: bytes, sequence_length: int) -> None:
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._length = sequence_length
        self.digest = hashlib.sha256(text).hexdigest()

    def __len__(self) -> int:
        return len(self._tokens)

    def batch(
        self, step: int, *, seed: int, size: int, share: int = 0, num_shares: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Returns tokens and their successors, both int64 ``(size / num_shares, length)``."""
        # Every rank draws the same `size` positions in the text and reads its share of them. So a
        # batch depends on seed and step alone, not on the number of ranks.
        generator = torch.Generator().manual_seed(mixed(seed, step))
        locations = torch.randint(len(self) - self._length, (size,), generator=generator)
        own = locations.chunk(num_shares)[share]
        sequences = self._tokens[own[:, None] + torch.arange(self._length + 1)].long()
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()


def mixed(*numbers: int) -> int:
    """Returns one seed from several numbers. It has 32 bits, the most of torch's CPU generator."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4])


def read_corpus(config: Config) -> Corpus:
    """Returns the text of all files in order; without files the text of CPython's help (466 KB).

    Raises:
        ConfigError: If a file is missing, empty or not text, or if the whole text is too short.
    """
    files, length = config.data.files, config.data.sequence_length
    if files:
        text = b"".join(_read(config, path) for file in files for path in _matching(config, file))
    else:
        text = "".join(body for _, body in sorted(pydoc_data.topics.topics.items())).encode()
    if len(text) < _FEWEST_BYTES:
        config.refuse("data.files", f"the text has {len(text)} byte, expected a longer one")
    if len(text) <= length:
        config.refuse(
            "data.sequence_length",
            f"the text has {len(text)} bytes: choose at most {len(text) - 1}",
        )
    return Corpus(text, length)


def _matching(config: Config, file: str) -> list[Path]:
    """Returns the files of one entry of ``data.files``, which may be a pattern."""
    # A file whose name looks like a pattern is taken as a file.
    path = path_of(file)
    if glob.has_magic(file) and not os.path.lexists(path):
        try:
            paths = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        except ValueError as error:
            config.refuse("data.files", f"{file}: {error}", cause=error)
        if not paths:
            config.refuse("data.files", f"no file matches {file}, seen from the working directory")
        return paths
    return [path]


def _read(config: Config, path: Path) -> bytes:
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        config.refuse(
            "data.files", f"there is no {path}, seen from the working directory", cause=error
        )
    except OSError as error:
        config.refuse("data.files", f"{path} cannot be read: {error.strerror}", cause=error)
    except ValueError as error:  # a zero byte
        config.refuse("data.files", f"{str(path)!r} is no path: {error}", cause=error)
    if not text:
        config.refuse("data.files", f"{path} is empty")
    try:
        zero = text.decode().find("\0")
    except UnicodeDecodeError as error:
        position = f"byte {text[error.start]:#04x} at {error.start}"
        config.refuse(
            "data.files", f"{path} is not UTF-8 text: {position}; convert it", cause=error
        )
    if zero >= 0:
        config.refuse("data.files", f"{path} is binary, not text: it has a zero byte")
    return text
