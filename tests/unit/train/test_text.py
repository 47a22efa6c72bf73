"""Text becomes tokens once, and batches that are the same on every rank, whatever the cut."""

from __future__ import annotations

import hashlib
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipegrad.comm.plain import dumps, loads
from pipegrad.errors import ConfigError
from pipegrad.train.config import Config
from pipegrad.train.data import Corpus, read_corpus, tokens
from pipegrad.train.data.tokenizer import Bytes
from pipegrad.train.data.tokens import write_tokens
from pipegrad.train.schema import Data, Model


def config(folder: Path, *names: str, **keys: Any) -> Config:
    """A configuration that reads files of a folder, and keeps its token files there."""
    data = Data(
        files=[str(folder / name) for name in names],
        cache=str(folder / "cache"),
        sequence_length=2,
        **keys,
    )
    return Config(model=Model(factory="a:b"), data=data)


def bytes_of(read: Config) -> bytes:
    return write_tokens(read, "data.files", read.data.files, Bytes()).mapped().tobytes()


def test_lines_of_json_are_documents(tmp_path: Path) -> None:
    rows = [{"text": "one", "id": 1}, {"text": "zwölf\n"}, {"text": ""}]
    text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_text(f"\ufeff{text}", encoding="utf-8")
    (tmp_path / "b.txt").write_text("two\n")
    both = config(tmp_path, "a.jsonl", "b.txt")
    assert bytes_of(both) == "onezwölf\ntwo\n".encode()
    ended = config(tmp_path, "a.jsonl", "b.txt", separator="|")
    assert bytes_of(ended) == "one|zwölf\n||two\n|".encode()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "a"', "line 2, is not JSON: Expecting ',' delimiter"),
        (b'{"content": "a", "id": 3}', r"line 2, has no string 'text', found \['content', 'id'\]"),
        (b'["a"]', "line 2, has no string 'text', found list"),
        (b'{"text": null}', r"line 2, has no string 'text', found \['text'\]"),
        (b'{"text": "\xe9"}', "line 2, is not JSON: 'utf-8' codec"),
        (b'{"text": "\\ud800"}', "line 2, has half of a character: 'utf-8' codec"),
        (b"[" * 100_000, "line 2, is not JSON: "),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, says: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=f"data.files = .*a.jsonl, {says}"):
        bytes_of(config(tmp_path, "a.jsonl"))
    assert not list((tmp_path / "cache").iterdir())  # nothing is left of it


def test_places_are_counted_across_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_PIECE_BYTES", 3)
    content = "äöü\nß, and a long line".encode()
    (tmp_path / "a").write_bytes(content)
    assert bytes_of(config(tmp_path, "a")) == content
    for at in range(9, len(content)):
        (tmp_path / "a").write_bytes(content[:at] + b"\xff" + content[at:])
        with pytest.raises(ConfigError, match=f"is not UTF-8 text: byte 0xff at {at};"):
            bytes_of(config(tmp_path, "a"))
    (tmp_path / "a").write_bytes("ä".encode()[:1])
    with pytest.raises(ConfigError, match="is not UTF-8 text: byte 0xc3 at 0;"):
        bytes_of(config(tmp_path, "a"))


def test_pieces_end_with_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_PIECE_BYTES", 8)
    (tmp_path / "a").write_bytes(b"one\ntwo\nthree four five\nsix")
    read = config(tmp_path, "a")
    pieces = list(tokens._pieces(read, "data.files", tmp_path / "a"))
    assert [text for text, _ in pieces] == ["one\ntwo\n", "three fo", "ur five\n", "six", "", ""]
    assert [ends for _, ends in pieces] == [False] * 5 + [True]


def test_a_token_file_is_used_again_until_a_text_changes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    read = config(tmp_path, "a")
    first = write_tokens(read, "data.files", read.data.files, Bytes())
    made = Path(first.path).stat().st_mtime_ns, Path(first.path).stat().st_ino
    assert loads(dumps(first)) == first
    mapped = first.mapped()
    assert isinstance(mapped, np.memmap)
    assert not mapped.flags.writeable
    again = write_tokens(read, "data.files", read.data.files, Bytes())
    assert (Path(again.path).stat().st_mtime_ns, Path(again.path).stat().st_ino) == made
    # As long, and with the time of before, as `cp -p` leaves it.
    times = (tmp_path / "a").stat()
    (tmp_path / "a").write_bytes(b"xyz")
    os.utime(tmp_path / "a", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert bytes_of(read) == b"xyz"
    assert bytes_of(config(tmp_path, "a", separator="|")) == b"xyz|"


@pytest.mark.parametrize("end", ["json", "tokens"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"ab")])
def test_a_token_file_that_is_not_whole_is_made_again(
    tmp_path: Path, end: str, damage: Callable[[Path], object]
) -> None:
    (tmp_path / "a").write_bytes(b"abcd")
    assert bytes_of(config(tmp_path, "a")) == b"abcd"
    [file] = (tmp_path / "cache").glob(f"*.{end}")
    damage(file)
    assert bytes_of(config(tmp_path, "a")) == b"abcd"


RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "pointers": lambda record: {**record, "dtype": "O", "numel": 1},
    "another file": lambda record: {**record, "path": record["path"].replace("cache", "other")},
    "the same file by another path": lambda record: {**record, "path": f"{record['path']}/."},
    "wider tokens": lambda record: {**record, "dtype": "uint16", "numel": 4},
    "no dtype": lambda record: {**record, "dtype": ["u1"]},
    "more tokens": lambda record: {**record, "numel": 2**62},
    "fewer tokens": lambda record: {**record, "numel": -8},
    "a digest that is none": lambda record: {**record, "digest": 3},
    "a field more": lambda record: {**record, "mode": "w"},
    "a field less": lambda record: {"path": record["path"]},
    "a time that is none": lambda record: {**record, "modified_ns": "now", "digest": "0" * 64},
    "a list": lambda record: [record],
    "a text": lambda record: "record",
}


@pytest.mark.parametrize("change", RECORDS.values(), ids=RECORDS)
def test_a_record_that_was_not_written_is_not_believed(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    """A record with the dtype "O" ended the process: bytes of the file were taken for pointers."""
    (tmp_path / "a").write_bytes(b"abcdefgh")
    (tmp_path / "other").mkdir()
    read = config(tmp_path, "a")
    first = write_tokens(read, "data.files", read.data.files, Bytes())
    (tmp_path / "other" / Path(first.path).name).write_bytes(b"stuvwxyz")
    [record] = (tmp_path / "cache").glob("*.json")
    record.write_text(json.dumps(change(json.loads(record.read_text()))))
    assert write_tokens(read, "data.files", read.data.files, Bytes()) == first
    assert first.mapped().tobytes() == b"abcdefgh"


@pytest.mark.parametrize("content", [b"[" * 100_000, b"9" * 5000, b"\xff", b"{", b""])
def test_a_record_that_is_no_json_is_made_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(b"abcd")
    assert bytes_of(config(tmp_path, "a")) == b"abcd"
    [record] = (tmp_path / "cache").glob("*.json")
    record.write_bytes(content)
    assert bytes_of(config(tmp_path, "a")) == b"abcd"


def test_tokens_that_were_changed_are_made_again_and_a_copy_is_used(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abcd")
    assert bytes_of(config(tmp_path, "a")) == b"abcd"
    [path] = (tmp_path / "cache").glob("*.tokens")
    os.utime(path, ns=(0, 0))
    assert bytes_of(config(tmp_path, "a")) == b"abcd"
    assert path.stat().st_mtime_ns == 0
    path.write_bytes(b"abce")
    assert bytes_of(config(tmp_path, "a")) == b"abcd"


def test_users_of_one_cache_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one got a PermissionError."""
    (tmp_path / "a").write_bytes(b"abcd")
    assert bytes_of(config(tmp_path, "a")) == b"abcd"
    files = set((tmp_path / "cache").iterdir())
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    for file in files:
        file.chmod(0)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert bytes_of(config(tmp_path, "a")) == b"abcd"
    assert len(files | set((tmp_path / "cache").iterdir())) == 4


@pytest.mark.parametrize("end", ["json", "tokens"])
def test_a_planted_token_file_is_named(tmp_path: Path, end: str) -> None:
    (tmp_path / "a").write_bytes(b"abcd")
    assert bytes_of(config(tmp_path, "a")) == b"abcd"
    [path] = (tmp_path / "cache").glob(f"*.{end}")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"data.cache = .*: .*\.{end} is a symbolic link, expec"):
        bytes_of(config(tmp_path, "a"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match=r"data.cache = .*cache cannot be written: .*File exists"):
        read_corpus(config(tmp_path, "a"))


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 999)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (99, limits[1]))
    try:
        with pytest.raises(
            ConfigError, match=r"cache cannot be written: File too large; .* are free"
        ):
            read_corpus(config(tmp_path, "a"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "cache").iterdir())
    assert len(read_corpus(config(tmp_path, "a"))) == 3 * 999


# --- the library


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A tokenizer of words, which asks to cut texts off."""
    library = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "one": 1, "two": 2, "<|end|>": 300}
    made = library.Tokenizer(library.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.enable_truncation(1)
    made.enable_padding()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_of_the_library(tmp_path: Path, path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two\nthree one\n")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n{"text": "two two"}\n')
    read = config(tmp_path, "a.txt", "b.jsonl", tokenizer=str(path), separator="<|end|>")
    corpus = read_corpus(read)
    assert corpus._tokens.tolist() == [1, 2, 0, 1, 300, 2, 300, 2, 2, 300]
    assert corpus._tokens.dtype == np.uint16
    assert corpus.digest != read_corpus(config(tmp_path, "a.txt", tokenizer=str(path))).digest
    with pytest.raises(ConfigError, match=r"data.separator = '</s>': .*has no such token"):
        read_corpus(config(tmp_path, "a.txt", tokenizer=str(path), separator="</s>"))


@pytest.mark.usefixtures("path")
def test_a_file_of_another_kind_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two\n")
    (tmp_path / "other.json").write_text('{"model_type": "llama"}')
    for name, says in {
        "other.json": "is no file of the library tokenizers",
        "nowhere.json": "there is no .*nowhere.json, seen from the working directory",
        ".": "cannot be read: .*Is a directory",
    }.items():
        with pytest.raises(ConfigError, match=f"data.tokenizer = .*: .*{says}"):
            read_corpus(config(tmp_path, "a.txt", tokenizer=str(tmp_path / name)))


def test_without_the_library_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'pipegrad\[tokenizers\]'"):
        read_corpus(config(tmp_path, "a.txt", tokenizer="tokenizer.json"))


def corpus_of(text: bytes, length: int) -> Corpus:
    return Corpus(np.frombuffer(text, np.uint8), length, hashlib.sha256(text).hexdigest())


def test_targets_follow_their_tokens_in_shares_of_batches_that_all_differ() -> None:
    corpus = corpus_of(bytes(range(200)), 5)
    whole = corpus.batch(3, seed=0, size=8)
    tokens, target = whole
    assert tokens.shape == target.shape == (8, 5)
    assert torch.equal(target, tokens + 1)
    assert tokens.dtype == target.dtype == torch.int64
    torch.rand(7)  # the global generator is another's
    shares = [corpus.batch(3, seed=0, size=8, share=k, num_shares=4) for k in range(4)]
    for part in (0, 1):
        assert torch.equal(torch.cat([share[part] for share in shares]), whole[part])
    seen = {
        tuple(corpus.batch(step, seed=seed, size=4)[0].flatten().tolist())
        for step in range(1, 20)
        for seed in range(5)
    }
    assert len(seen) == 19 * 5


def test_every_place_is_drawn_the_last_too() -> None:
    corpus = corpus_of(b"abcdef", 4)
    tokens, target = corpus.batch(1, seed=0, size=64)
    assert {bytes(row).decode() for row in tokens.tolist()} == {"abcd", "bcde"}
    assert {row[-1] for row in target.tolist()} == {ord("e"), ord("f")}


@pytest.mark.usefixtures("home")
def test_a_text_of_one_sequence_is_enough(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abcde")
    assert len(read_corpus(plain())) > 300_000  # what Python says of itself
    tokens, _ = read_corpus(plain(str(tmp_path / "a"))).batch(1, seed=0, size=2)
    assert tokens.tolist() == [[97, 98, 99, 100]] * 2
    with pytest.raises(ConfigError, match="the text has 5 bytes: choose at most 4"):
        read_corpus(plain(str(tmp_path / "a"), length=5))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where token files are by default."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def plain(*files: str, length: int = 4) -> Config:
    return Config(model=Model(factory="a:b"), data=Data(files=list(files), sequence_length=length))


def test_files_are_joined_in_order_and_may_be_a_pattern_in_the_home_folder(home: Path) -> None:
    """``~`` and patterns were taken for names of files."""
    (home / "texts").mkdir()
    for name in ("b.txt", "a.txt", "[c].txt", "other"):
        (home / "texts" / name).write_text(f"{name} ")
    assert read_corpus(plain("~/texts/?.txt")).digest == corpus_of(b"a.txt b.txt ", 4).digest
    assert read_corpus(plain("~/texts/[c].txt")).digest == corpus_of(b"[c].txt ", 4).digest
    joined = read_corpus(plain("~/texts/b.txt", "~/texts/a.txt"))
    assert len(joined) == len("b.txt a.txt ")
    assert joined.digest == corpus_of(b"b.txt a.txt ", 4).digest
