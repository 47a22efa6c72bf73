"""Corpus: the tokens of a text, and the batches of a run. They are the same for every cut."""

from __future__ import annotations

import hashlib
import pydoc_data.topics

import torch
from torch import Tensor

from pipegrad.train.config import Config
from pipegrad.train.data.tokenizer import Tokenizer, Tokens, tokenizer_of
from pipegrad.train.data.tokens import TokenFile, write_tokens

_FEWEST_TOKENS = 2  # a token and its successor


class Corpus:
    """The tokens of a text, in memory or mapped from a file.

    Args:
        tokens: Integers ``(numel,)``.
        sequence_length: Tokens of a sequence. One more token follows it, as the last target.
        digest: Of the tokens.
    """

    def __init__(self, tokens: Tokens, sequence_length: int, digest: str) -> None:
        self._tokens = tokens
        self._length = sequence_length
        self.digest = digest

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def num_sequences(self) -> int:
        """Number of sequences that lie one behind the other in the text."""
        return (len(self) - 1) // self._length

    def batch(
        self, step: int, *, seed: int, size: int, share: int = 0, num_shares: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Returns tokens and their successors, both int64 ``(size / num_shares, length)``."""
        # Every rank draws the same `size` positions in the text and reads its share of them. So a
        # batch depends on seed and step alone, not on the number of ranks.
        generator = torch.Generator().manual_seed(mixed(seed, step))
        locations = torch.randint(len(self) - self._length, (size,), generator=generator)
        return self._sequences(locations.chunk(num_shares)[share])

    def sequences(
        self, number: int, *, size: int, share: int = 0, num_shares: int = 1
    ) -> tuple[Tensor, Tensor] | None:
        """Returns batch `number` of those that lie one behind the other, from 1, as `batch` does.

        None if the text has no such batch that is full.
        """
        if number * size > self.num_sequences:
            return None
        indices = torch.arange((number - 1) * size, number * size)
        return self._sequences(indices.chunk(num_shares)[share] * self._length)

    def _sequences(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        indices = starts[:, None] + torch.arange(self._length + 1)
        sequences = torch.from_numpy(self._tokens[indices.numpy()].astype("int64"))
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()


def mixed(*numbers: int) -> int:
    """Returns one seed from several numbers. It has 32 bits, the most of torch's CPU generator."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4])


def read_corpus(config: Config, key: str = "data.files") -> Corpus:
    """Returns the text of a configuration, read by this rank alone.

    Args:
        config: The configuration.
        key: Where it names the files: ``data.files`` or ``eval.files``.

    Raises:
        ConfigError: As `tokenizer_of`, `write_tokens` and `open_corpus` do.
    """
    tokenizer, files = tokenizer_of(config), files_of(config, key)
    written = write_tokens(config, key, files, tokenizer) if files else None
    return open_corpus(config, key, tokenizer, written)


def files_of(config: Config, key: str) -> list[str]:
    """Returns the files that a key names."""
    return config.data.files if key == "data.files" else config.eval.files


def open_corpus(
    config: Config, key: str, tokenizer: Tokenizer, written: TokenFile | None
) -> Corpus:
    """Returns the text of a token file; without one the text of CPython's help (466 KB).

    Args:
        config: The configuration.
        key: Where it names the files of the text.
        tokenizer: Made the tokens.
        written: The tokens.

    Raises:
        ConfigError: If the text is shorter than a sequence and one more token.
    """
    if written is None:
        text = "".join(body for _, body in sorted(pydoc_data.topics.topics.items()))
        tokens = tokenizer.encode([text])[0]
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()
    else:
        tokens, digest = written.mapped(), written.digest
    length, numel, unit = config.data.sequence_length, len(tokens), tokenizer.unit
    if numel < _FEWEST_TOKENS:
        config.refuse(key, f"the text has {numel} {unit.removesuffix('s')}, expected a longer one")
    if numel <= length:
        which = "" if key == "data.files" else f" of {key}"
        complaint = f"the text{which} has {numel} {unit}: choose at most {numel - 1}"
        config.refuse("data.sequence_length", complaint)
    return Corpus(tokens, length, digest)
