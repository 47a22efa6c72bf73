"""Corpus: files of text as tokens, and the batches of a run. They are the same for every cut.

[Note: from files to tokens] The library `datasets` opens files, and writes their tokens into its
cache. The first rank of a machine that comes holds a lock meanwhile. The others wait at the lock,
and then map the same file into their memory, because the system loads a mapped file once for all
of them. A cache that was interrupted is never read, because the library renames a cache when it is
whole. The name depends on paths, sizes and times of the files, and on the tokenizer, the separator
and the column. A later run with the same text uses it again.
"""

from __future__ import annotations

import glob
import hashlib
import pydoc_data.topics
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipegrad import run_files
from pipegrad.errors import ConfigError, causes_of, reason, root_of
from pipegrad.partition.hf.files import extra
from pipegrad.train.config import Config, beside, path_of

TOKENIZER = "tokenizer.json"  # in a directory of transformers
_VERSION = 2  # of the output of `_pieces`
_LINES, _DOCUMENTS = 10_000, 256  # so many are encoded at once, in some 100 KB
Tokens = NDArray[np.unsignedinteger[Any]]


class Tokenizer:
    """Turns text into tokens: each byte of UTF-8 is one.

    Attributes:
        size: Tokens are smaller than this.
        dtype: The dtype of tokens, as numpy names it.
        digest: Differs between tokenizers that make different tokens.
        unit: A word for tokens in messages.
    """

    size, dtype, digest, unit = 256, "uint8", "bytes", "bytes"

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the tokens of each text, without special tokens."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens. Bytes that are no UTF-8 become a replacement character."""
        return bytes(tokens).decode(errors="replace")

    def separator(self, text: str) -> Tokens:
        """Returns the tokens of ``data.separator``.

        Raises:
            ConfigError: If the tokenizer has no such token.
        """
        return self.encode([text])[0]


class FileTokenizer(Tokenizer):
    """A tokenizer of a file of the library `tokenizers`.

    Raises:
        ConfigError: If the library is missing, or the file cannot be read.
    """

    unit = "tokens"

    def __init__(self, config: Config, path: Path) -> None:
        self._config, self._path = config, path
        library: Any = extra("tokenizers")
        words = f"{path} is no file of the library tokenizers: "
        with config.refusing("data.tokenizer", words, say=reason):
            text = run_files.read(path).decode()
            self._tokenizer = library.Tokenizer.from_str(text)
        # Use all text, because a file may cut off long texts and fill up short ones.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab()
        if not vocabulary:
            config.refuse("data.tokenizer", f"{path} has no tokens")
        self.size = max(vocabulary.values()) + 1  # numbers may be missing in between
        self.dtype = "uint16" if self.size <= 2**16 else "uint32"
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(text.ids, self.dtype) for text in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def separator(self, text: str) -> Tokens:
        token = self._tokenizer.token_to_id(text)
        if token is None:
            self._config.refuse("data.separator", f"{self._path} has no such token")
        return np.array([token], self.dtype)


def tokenizer_of(config: Config) -> Tokenizer:
    """Returns the tokenizer of a configuration.

    Raises:
        ConfigError: If its library is missing, or its file cannot be read.
    """
    path = tokenizer_file(config)
    return Tokenizer() if path is None else FileTokenizer(config, path)


def tokenizer_file(config: Config) -> Path | None:
    """Returns the file of the tokenizer: ``data.tokenizer``, or the model's; None for bytes."""
    if config.data.tokenizer is not None:
        return path_of(config.data.tokenizer)
    if config.model.pretrained is not None:
        path = beside(config, config.model.pretrained) / TOKENIZER
        return path if path.exists() else None
    return None


class Corpus:
    """The tokens of a text, in memory or mapped from a file.

    Args:
        tokens: Integers ``(numel,)`` of numpy or pyarrow, of which pieces are taken.
        sequence_length: Tokens of a sequence. One more token follows it, as the last target.
        digest: Digest of the tokens.
    """

    def __init__(self, tokens: Any, sequence_length: int, digest: str) -> None:  # noqa: ANN401
        self._tokens = tokens
        self._length = sequence_length
        self.digest = digest

    def __len__(self) -> int:
        return len(self._tokens)

    def batch(
        self, step: int, *, seed: int, size: int, share: int = 0, num_shares: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Returns tokens and their successors, both int64 ``(size / num_shares, length)``."""
        # Every rank draws the same `size` positions in the text and reads its share of them,
        # because a batch must depend on seed and step alone, not on the number of ranks.
        generator = torch.Generator().manual_seed(mixed(seed, step))
        locations = torch.randint(len(self) - self._length, (size,), generator=generator)
        return self._sequences(locations.chunk(num_shares)[share])

    def sequences(
        self, number: int, *, size: int, share: int = 0, num_shares: int = 1
    ) -> tuple[Tensor, Tensor] | None:
        """Returns batch `number`, from 1, of consecutive sequences of the text, as `batch` does.

        None if the text has no such batch that is full.
        """
        if number * size * self._length >= len(self):
            return None
        indices = torch.arange((number - 1) * size, number * size)
        return self._sequences(indices.chunk(num_shares)[share] * self._length)

    def _sequences(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        sequences = torch.empty(len(starts), self._length + 1, dtype=torch.int64)
        for sequence, start in zip(sequences.numpy(), starts.tolist(), strict=True):
            sequence[:] = self._tokens[start : start + self._length + 1]
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()


def mixed(*numbers: int) -> int:
    """Returns one seed from several numbers. It has 32 bits, the most of torch's CPU generator."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4])


def seed_all(seed: int) -> None:
    """Gives the generators of random numbers of this process a seed."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def read_corpus(config: Config, key: str = "data.files") -> Corpus:
    """Returns the text of a configuration; without files CPython's help (466 KB). Local.

    Raises:
        ConfigError: If a file or the cache cannot be used, or the text is shorter than a sequence
            and one more token.
    """
    tokenizer, sources = tokenizer_of(config), _sources(config, key)
    if sources:
        tokens, digest = _cached(config, key, sources, tokenizer)
    else:
        text = "".join(body for _, body in sorted(pydoc_data.topics.topics.items()))
        tokens = tokenizer.encode([text])[0]
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()
    length, numel, unit = config.data.sequence_length, len(tokens), tokenizer.unit
    if numel <= length:
        which = "" if key == "data.files" else f" of {key}"
        complaint = f"the text{which} has {numel} {unit}: choose at most {numel - 1}"
        config.refuse("data.sequence_length", complaint)
    return Corpus(tokens, length, digest)


def _sources(config: Config, key: str) -> list[str]:
    """Returns the files and folders that a key names, in order; patterns are replaced by theirs."""
    sources = list[str]()
    for name in config.data.files if key == "data.files" else config.eval.files:
        path = path_of(name)
        # A file whose name looks like a pattern is taken as a file.
        matching = [str(path)] if path.exists() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
        # Devices and pipes may never end.
        found = [each for each in matching if Path(each).is_file() or Path(each).is_dir()]
        if not found:
            config.refuse(key, f"no file matches {name}, seen from the working directory")
        sources += found
    return sources


def _cached(config: Config, key: str, sources: list[str], tokenizer: Tokenizer) -> tuple[Any, str]:
    """Returns the tokens of some files, and a digest; see [Note: from files to tokens]."""
    library: Any = extra("datasets")
    library.disable_progress_bars()
    library.logging.set_verbosity(library.logging.CRITICAL)  # the error has the message
    import pyarrow

    tokens = library.LargeList(library.Value(tokenizer.dtype))
    features = library.Features({"tokens": tokens, "digest": library.Value("string")})
    files = [f for s in map(Path, sources) for f in (sorted(s.iterdir()) if s.is_dir() else [s])]
    states = [(str(file.resolve()), file.stat()) for file in files]
    stamps = [(path, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in states]
    names = config.data.separator, config.data.column
    identity = repr((_VERSION, stamps, tokenizer.digest, names))
    try:
        pieces = library.Dataset.from_generator(
            lambda: _pieces(config, key, sources, tokenizer),
            features=features,
            fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:32],
            writer_batch_size=1,  # of pieces, which are long
        )
    except Exception as error:  # noqa: BLE001 - whatever the library raises
        refusals = (one for one in causes_of(error) if isinstance(one, ConfigError))
        cause = next(refusals, root_of(error))  # the library has wrapped it
        if isinstance(cause, ConfigError):
            raise cause  # noqa: B904 - it is the cause of `error`: they would make a ring
        config.refuse(
            key,
            f"its tokens cannot be written into {library.config.HF_DATASETS_CACHE}: "
            f"{reason(cause)}; the environment variable HF_DATASETS_CACHE may name another folder",
            cause=error,
        )
    table = pieces.with_format("arrow")[:]
    digest = hashlib.sha256("".join(table["digest"].to_pylist()).encode()).hexdigest()
    # Flat pieces stay mapped: they are no copies.
    return pyarrow.chunked_array([chunk.flatten() for chunk in table["tokens"].chunks]), digest


def _pieces(
    config: Config, key: str, sources: Sequence[str], tokenizer: Tokenizer
) -> Iterator[dict[str, Any]]:
    """Yields the tokens of many documents, or lines, and their digest."""
    end = config.data.separator
    separator = None if end is None else tokenizer.separator(end)
    for source in sources:
        is_empty = True
        for texts in _texts(config, key, source):
            encoded = tokenizer.encode(texts)
            if separator is not None:
                encoded = [part for tokens in encoded for part in (tokens, separator)]
            tokens = np.concatenate(encoded)
            yield {"tokens": tokens, "digest": hashlib.sha256(tokens.tobytes()).hexdigest()}
            is_empty = False
        if is_empty:
            config.refuse(key, f"{source} has no text")


def _texts(config: Config, key: str, source: str) -> Iterator[list[str]]:
    """Yields the texts of a file or folder, many at once."""
    size, column, is_plain = _DOCUMENTS, config.data.column or "text", False

    def words(error: BaseException) -> str:
        return str(root_of(error)).strip().partition("\n")[0]

    with config.refusing(key, f"{source} cannot be read: ", say=words):
        if (data := _opened(config, key, source)) is None:
            # Lines are joined: a tokenizer may have tokens that go across their ends.
            by = "line" if config.data.separator is None else "document"
            rows: Any = extra("datasets").IterableDataset
            data = rows.from_text(glob.escape(source), sample_by=by, keep_linebreaks=True)
            is_plain, size, column = True, _LINES if by == "line" else 1, "text"
        for batch in data.iter(size):
            if column not in batch:
                config.refuse(key, f"{source} has no column {column!r}, only {[*batch]}")
            texts: list[Any] = batch[column]
            if others := [text for text in texts if not isinstance(text, str)]:
                what = f"{type(others[0]).__name__} in the column {column!r}"
                config.refuse(key, f"{source} has a value of {what}, expected text in each row")
            if is_plain:
                texts = ["".join(texts)]
                if "\0" in texts[0]:
                    config.refuse(key, f"{source} is binary, not text: it has a zero byte")
            yield texts


def _opened(config: Config, key: str, source: str) -> Any:  # noqa: ANN401 - a data set
    """Returns the rows of a folder or file; None if it is plain text."""
    library: Any = extra("datasets")
    kinds = Path(source.lower()).suffixes[-2:]  # the last one may mark a compressed file
    if Path(source).is_dir():
        folder = library.load_from_disk(source)
        if isinstance(folder, dict):
            config.refuse(key, f"{source} has the data sets {[*folder]}: name the folder of one")
        return folder
    if ".jsonl" in kinds:
        return library.IterableDataset.from_json(glob.escape(source))
    if ".parquet" in kinds:
        return library.IterableDataset.from_parquet(glob.escape(source))
    return None
