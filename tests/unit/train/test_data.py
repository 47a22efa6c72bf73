"""Batches are the same on every rank, whatever the cut, and whatever else draws numbers."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from pipegrad.errors import ConfigError
from pipegrad.train.config import Config
from pipegrad.train.data import Corpus, read_corpus
from pipegrad.train.schema import Data, Model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of token files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pipegrad"


def config(*files: str, length: int = 4) -> Config:
    return Config(model=Model(factory="a:b"), data=Data(files=list(files), sequence_length=length))


def corpus_of(text: bytes, length: int) -> Corpus:
    return Corpus(np.frombuffer(text, np.uint8), length, hashlib.sha256(text).hexdigest())


def test_targets_follow_their_tokens() -> None:
    corpus = corpus_of(bytes(range(200)), 5)
    tokens, target = corpus.batch(3, seed=0, size=6)
    assert tokens.shape == target.shape == (6, 5)
    assert torch.equal(target, tokens + 1)
    assert tokens.dtype == target.dtype == torch.int64


def test_shares_are_parts_of_the_whole_batch() -> None:
    corpus = corpus_of(bytes(range(200)), 5)
    whole = corpus.batch(3, seed=0, size=8)
    torch.rand(7)  # the global generator is another's
    shares = [corpus.batch(3, seed=0, size=8, share=k, num_shares=4) for k in range(4)]
    for part in (0, 1):
        assert torch.equal(torch.cat([share[part] for share in shares]), whole[part])


def test_steps_and_seeds_differ() -> None:
    corpus = corpus_of(bytes(range(200)), 5)
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


def test_files_are_joined_in_order(tmp_path: Path) -> None:
    for name, text in (("a", "one\n"), ("b", "zwölf")):
        (tmp_path / name).write_text(text)
    corpus = read_corpus(config(str(tmp_path / "a"), str(tmp_path / "b")))
    assert len(corpus) == len("one\nzwölf".encode())
    assert corpus.digest == corpus_of("one\nzwölf".encode(), 4).digest
    assert corpus.digest != read_corpus(config(str(tmp_path / "b"), str(tmp_path / "a"))).digest


def test_a_text_of_one_sequence_is_enough(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abcde")
    assert len(read_corpus(config())) > 300_000  # what Python says of itself
    tokens, _ = read_corpus(config(str(tmp_path / "a"))).batch(1, seed=0, size=2)
    assert tokens.tolist() == [[97, 98, 99, 100]] * 2
    with pytest.raises(ConfigError, match="the text has 5 bytes: choose at most 4"):
        read_corpus(config(str(tmp_path / "a"), length=5))


def test_files_may_be_a_pattern_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``~`` and patterns were taken for names of files."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "texts").mkdir()
    for name in ("b.txt", "a.txt", "[c].txt", "other"):
        (tmp_path / "texts" / name).write_text(f"{name} ")
    assert read_corpus(config("~/texts/?.txt")).digest == corpus_of(b"a.txt b.txt ", 4).digest
    assert read_corpus(config("~/texts/[c].txt")).digest == corpus_of(b"[c].txt ", 4).digest
