"""Tokenizers: bytes, or a file of the library ``tokenizers``, which is an extra of pipegrad."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipegrad import run_files
from pipegrad.errors import reason
from pipegrad.train.config import Config, beside, path_of

TOKENIZER = "tokenizer.json"  # in a directory of transformers
Tokens = NDArray[np.unsignedinteger[Any]]


class Tokenizer(Protocol):
    """Turns text into tokens.

    Attributes:
        size: Tokens are smaller than it.
        digest: Differs between tokenizers that make different tokens.
        unit: What tokens are called in messages.
    """

    size: int
    digest: str
    unit: str

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the tokens of each text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens."""

    def separator(self, text: str) -> Tokens:
        """Returns the tokens of ``data.separator``.

        Raises:
            ConfigError: If the tokenizer has no such token.
        """


class Bytes:
    """Each byte of UTF-8 is a token."""

    size = 256
    digest = "bytes"
    unit = "bytes"

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of bytes. Bytes that are no UTF-8 become a replacement character."""
        return bytes(tokens).decode(errors="replace")

    def separator(self, text: str) -> Tokens:
        """Returns the bytes of the separator."""
        return self.encode([text])[0]


class FileTokenizer:
    """A tokenizer of a file.

    Args:
        config: The configuration.
        path: Of the file.

    Raises:
        ConfigError: If the library is missing, or the file cannot be read.
    """

    unit = "tokens"

    def __init__(self, config: Config, path: Path) -> None:
        self._config, self._path = config, path
        try:
            import tokenizers
        except ImportError as error:
            config.refuse(
                "data.tokenizer",
                "it needs the library tokenizers: pip install 'pipegrad[tokenizers]'",
                cause=error,
            )
        try:
            text = run_files.read(path).decode("utf-8")
        except FileNotFoundError as error:
            complaint = f"there is no {path}, seen from the working directory"
            config.refuse("data.tokenizer", complaint, cause=error)
        except (OSError, ValueError) as error:
            config.refuse("data.tokenizer", f"{path} cannot be read: {reason(error)}", cause=error)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # noqa: BLE001 - the library raises nothing more precise
            complaint = f"{path} is no file of the library tokenizers: {error}"
            config.refuse("data.tokenizer", complaint, cause=error)
        # A file may ask to cut off long texts and to fill up short ones. All text is wanted here.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab()
        if not vocabulary:
            config.refuse("data.tokenizer", f"{path} has no tokens")
        self.size = max(vocabulary.values()) + 1  # numbers may be missing in between
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the tokens of each text, without special tokens."""
        dtype = np.uint16 if self.size <= 2**16 else np.uint32
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(text.ids, dtype) for text in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, with special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def separator(self, text: str) -> Tokens:
        """Returns the token of the separator."""
        token = self._tokenizer.token_to_id(text)
        if token is None:
            self._config.refuse("data.separator", f"{self._path} has no such token")
        return np.array([token], np.uint16 if self.size <= 2**16 else np.uint32)


def tokenizer_of(config: Config) -> Tokenizer:
    """Returns the tokenizer of a configuration.

    Raises:
        ConfigError: As `FileTokenizer` does.
    """
    path = tokenizer_file(config)
    return Bytes() if path is None else FileTokenizer(config, path)


def tokenizer_file(config: Config) -> Path | None:
    """Returns the file of the tokenizer: ``data.tokenizer``, or the model's; None for bytes."""
    if config.data.tokenizer is not None:
        return path_of(config.data.tokenizer)
    if config.model.pretrained is not None:
        path = beside(config, config.model.pretrained) / TOKENIZER
        return path if path.exists() else None
    return None
