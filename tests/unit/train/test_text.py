"""Text becomes tokens once, and batches that are the same on every rank, whatever the cut."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipegrad.errors import ConfigError
from pipegrad.train import corpus
from pipegrad.train.config import Config
from pipegrad.train.corpus import Corpus, read_corpus
from pipegrad.train.schema import Data, Model

datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home and the working folder, with an empty cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(*files: str, length: int = 2, **keys: Any) -> Config:
    data = Data(files=list(files), sequence_length=length, **keys)
    return Config(model=Model(factory="a:b"), data=data)


def tokens_of(*files: str, **keys: Any) -> list[int]:
    tokens: list[int] = read_corpus(config(*files, **keys))._tokens.to_pylist()
    return tokens


def text_of(*files: str, **keys: Any) -> str:
    return bytes(tokens_of(*files, **keys)).decode()


def caches() -> dict[Path, int]:
    """The files of tokens, and when they were written."""
    return {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*.arrow")}


def write_rows() -> None:
    """Writes two texts as each kind of rows, with other columns before and behind."""
    rows = [{"id": 1, "text": "one"}, {"text": "zwölf\n", "tags": ["a"]}]
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    Path("rows.jsonl").write_text(f"\ufeff{lines}\n\n", encoding="utf-8")
    Path("rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk("rows")
    data.to_parquet("rows.parquet")
    datasets.DatasetDict(train=data).save_to_disk("splits")


def test_rows_of_every_kind_are_documents_and_so_are_files_of_text() -> None:
    write_rows()
    Path("b.txt").write_text("two\r\n\nthree")
    for name in ("rows.jsonl", "rows.jsonl.gz", "rows.parquet", "rows"):
        assert text_of(name, "b.txt") == "onezwölf\ntwo\n\nthree"
        assert text_of(name, "b.txt", separator="|") == "one|zwölf\n|two\n\nthree|"
    Path("c.jsonl").write_text('{"body": "four"}\n')
    assert text_of("c.jsonl", column="body") == "four"


BAD: dict[str, tuple[bytes | None, str]] = {
    "a.jsonl": (b'{"text": "a"', "JSON parse error: Missing a comma or '}'"),
    "b.jsonl": (b'{"content": "a"}', "NoneType in the column 'text', expected text in each row"),
    "d.jsonl": (b'{"text": 3}', "has a value of int in the column 'text'"),
    "e.jsonl": (b'{"text": "\xe9"}', "'utf-8' codec can't decode byte 0xe9"),
    "splits": (None, r"has the data sets \['train'\]: name the folder of one"),
    "cache": (None, "cannot be read: Directory cache is neither"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_and_leaves_nothing(name: str) -> None:
    write_rows()
    content, says = BAD[name]
    if content is not None:
        Path(name).write_bytes(b'{"text": "good"}\n' + content + b"\n")
    Path("cache").mkdir(exist_ok=True)
    Path("b.txt").write_text("good")
    says = rf"data.files = \['b.txt', '{name}'\]: {name} .*{says}"
    with pytest.raises(ConfigError, match=says):
        read_corpus(config("b.txt", name))
    assert not caches()


def test_a_column_that_no_row_has_is_named() -> None:
    write_rows()
    with pytest.raises(ConfigError, match=r"has no column 'body', only \['id', 'text'\]"):
        tokens_of("rows", column="body")
    with pytest.raises(ConfigError, match="rows has a value of int in the column 'id'"):
        tokens_of("rows", column="id")


def test_tokens_are_used_again_until_a_text_changes() -> None:
    Path("a").write_bytes(b"abc")
    assert text_of("a") == "abc"
    before = caches()
    assert len(before) == 1
    assert text_of("a", length=1) == "abc"
    assert caches() == before
    # As long, and with the time of before, as `cp -p` leaves it.
    times = Path("a").stat()
    Path("a").write_bytes(b"xyz")
    os.utime("a", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert text_of("a") == "xyz"
    assert text_of("a", separator="|") == "xyz|"
    assert len(caches()) == 3


KILLED = """
import os
from pipegrad.train.config import Config
from pipegrad.train import corpus
from pipegrad.train.schema import Data, Model
pieces = corpus._pieces
def killed(*arguments):
    yield from pieces(*arguments)
    os.kill(os.getpid(), 9)
corpus._pieces = killed
corpus.read_corpus(Config(model=Model(factory="a:b"), data=Data(files=["a"], sequence_length=2)))
"""


def test_a_cache_whose_writer_was_killed_is_written_again() -> None:
    Path("a").write_bytes(b"abcd")
    environment = os.environ | {"HF_DATASETS_CACHE": str(Path("cache").resolve())}
    command = [sys.executable, "-c", KILLED]
    assert subprocess.run(command, check=False, env=environment).returncode == -9
    [begun] = caches()
    assert "incomplete" in str(begun)
    assert text_of("a") == "abcd"
    [whole] = caches()
    assert "incomplete" not in str(whole)


def test_a_cache_that_cannot_be_written_is_named() -> None:
    Path("a").write_bytes(b"abc")
    Path("cache").write_text("a file")
    says = "cannot be written into .*cache: .*; the environment variable HF_DATASETS_CACHE"
    with pytest.raises(ConfigError, match=says):
        tokens_of("a")


def test_the_digest_is_of_the_text_alone() -> None:
    Path("a").write_bytes(b"abcd")
    Path("other").mkdir()
    Path("other/b").write_bytes(b"abcd")
    Path("c").write_bytes(b"abce")
    digests = [read_corpus(config(name)).digest for name in ("a", "other/b", "c")]
    assert digests[0] == digests[1] != digests[2]


def test_files_are_joined_in_order_and_may_be_a_pattern_in_the_home_folder() -> None:
    """``~`` and patterns were taken for names of files."""
    Path("texts").mkdir()
    for name in ("b.txt", "a.txt", "[c].txt", "other"):
        Path("texts", name).write_text(f"{name} ")
    assert text_of("~/texts/?.txt") == "a.txt b.txt "
    assert text_of("~/texts/[c].txt") == "[c].txt "
    assert text_of("~/texts/b.txt", "~/texts/a.txt") == "b.txt a.txt "


def test_tokens_may_go_across_lines_but_not_across_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer("a\nb", "a", "\n", "b", pre="none")
    Path("a.txt").write_text("a\nb\na\nb")
    assert tokens_of("a.txt", tokenizer="tokenizer.json") == [0, 2, 0]
    monkeypatch.setattr(corpus, "_LINES", 1)
    Path("a.txt").touch()
    assert tokens_of("a.txt", tokenizer="tokenizer.json") == [4, 3, 2, 4, 3]


def tokenizer(*words: str, pre: str = "") -> None:
    """Writes a tokenizer that asks to cut texts off; without `pre` it is of words."""
    if pre:
        merges = [("a", "\n"), ("a\n", "b")]
        vocabulary = {word: index for index, word in enumerate((*words, "a\n"))}
        built = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    else:
        vocabulary = {word: index for index, word in enumerate(words)} | {"<|end|>": 300}
        built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=words[0]))
        built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.enable_truncation(1)
    built.enable_padding()
    built.save("tokenizer.json")


def test_a_tokenizer_of_the_library() -> None:
    tokenizer("[UNK]", "one", "two")
    Path("a.txt").write_text("one two\nthree one\n")
    Path("b.jsonl").write_text('{"text": "two"}\n{"text": "two two"}\n')
    named: dict[str, Any] = {"tokenizer": "tokenizer.json"}
    read = read_corpus(config("a.txt", "b.jsonl", separator="<|end|>", **named))
    assert read._tokens.to_pylist() == [1, 2, 0, 1, 300, 2, 300, 2, 2, 300]
    assert str(read._tokens.type) == "uint16"
    with pytest.raises(ConfigError, match=r"data.separator = '</s>': .*has no such token"):
        tokens_of("a.txt", separator="</s>", **named)


@pytest.mark.parametrize("name", ["other.json", "."])
def test_a_file_of_another_kind_is_no_tokenizer(name: str) -> None:
    Path("a.txt").write_text("one two\n")
    Path("other.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"tokenizer = .*is no file of the library tokenizers"):
        tokens_of("a.txt", tokenizer=name)


@pytest.mark.parametrize("library", ["tokenizers", "datasets"])
def test_without_a_library_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    Path("a.txt").write_text("one two\n")
    tokenizer("one")
    monkeypatch.setitem(sys.modules, library, None)
    says = rf"this needs the library {library}: pip install 'pipegrad\[hf\]'"
    with pytest.raises(ConfigError, match=says):
        read_corpus(config("a.txt", tokenizer="tokenizer.json"))
    assert len(read_corpus(config())) > 300_000  # what Python says of itself needs neither


# --- batches


def corpus_of(text: bytes, length: int) -> Corpus:
    return Corpus(np.frombuffer(text, np.uint8), length, hashlib.sha256(text).hexdigest())


def whole(shares: list[tuple[torch.Tensor, torch.Tensor]], part: int) -> torch.Tensor:
    return torch.cat([share[part] for share in shares])


@pytest.mark.parametrize("make", [lambda: corpus_of(bytes(range(200)), 5), None])
def test_targets_follow_their_tokens_in_shares_of_batches_that_all_differ(
    make: Callable[[], Corpus] | None,
) -> None:
    Path("a").write_text("".join(map(chr, range(32, 127))))  # in one piece
    text = make() if make else read_corpus(config("a", length=5))
    first = text.batch(3, seed=0, size=8)
    tokens, target = first
    assert tokens.shape == target.shape == (8, 5)
    assert torch.equal(target, tokens + 1)
    assert tokens.dtype == target.dtype == torch.int64
    torch.rand(7)  # the global generator is another's
    shares = [text.batch(3, seed=0, size=8, share=k, num_shares=4) for k in range(4)]
    for part in (0, 1):
        assert torch.equal(whole(shares, part), first[part])
    seen = {
        tuple(text.batch(step, seed=seed, size=4)[0].flatten().tolist())
        for step in range(1, 20)
        for seed in range(5)
    }
    assert len(seen) == 19 * 5


def test_every_place_is_drawn_the_last_too_also_across_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(corpus, "_LINES", 1)
    Path("a").write_text("a\nb\nc\n")
    for text, length in ((corpus_of(b"a\nb\nc\n", 4), 4), (read_corpus(config("a", length=4)), 4)):
        tokens, target = text.batch(1, seed=0, size=64)
        assert {bytes(row).decode() for row in tokens.tolist()} == {"a\nb\n", "\nb\nc"}
        assert {row[-1] for row in target.tolist()} == {ord("c"), ord("\n")}
        assert text.sequences(1, size=1) is not None
        assert text.sequences(2, size=1) is None
        assert len(text) == length + 2


def test_a_text_of_one_sequence_is_enough() -> None:
    Path("a").write_text("abcde")
    tokens, _ = read_corpus(config("a", length=4)).batch(1, seed=0, size=2)
    assert tokens.tolist() == [[97, 98, 99, 100]] * 2
    with pytest.raises(ConfigError, match="the text has 5 bytes: choose at most 4"):
        read_corpus(config("a", length=5))
