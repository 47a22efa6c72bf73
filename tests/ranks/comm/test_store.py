"""What somebody else writes into the store of a job runs nowhere, and is refused in words."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # public

from pipegrad.comm.agreement import agree
from pipegrad.comm.failures import FailureNotice
from pipegrad.comm.store import STORE_KEY, SignedStore, store
from pipegrad.comm.watch import Neighbours, Watch
from pipegrad.errors import MessageError
from tests.support.gradients.cases import outcome, rank
from tests.support.ranked import gathered

OTHER = "MessageError: another program has written '"


class Trap:
    """Makes a folder wherever it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self._folder,)


@pytest.mark.parametrize(
    ("is_signed", "words"),
    [
        (True, OTHER),
        (False, "MessageError: a message between ranks cannot be read: expected a message"),
    ],
)
@pytest.mark.ranks(2)
def test_a_pickle_in_place_of_a_result_runs_nowhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_signed: bool, words: str
) -> None:
    """Another user of the machine overwrote a result, and both ranks executed it."""
    if not is_signed:
        monkeypatch.delenv(STORE_KEY)
    trap = pickle.dumps(Trap(tmp_path / "it ran"))
    write = SignedStore.set

    def overwritten(self: SignedStore, key: str, value: bytes) -> None:
        if len(key.rpartition("/")[2]) == 64:
            self.raw.set(key, trap)  # type: ignore[arg-type]
        else:
            write(self, key, value)

    with monkeypatch.context() as patch:
        if rank() == 1:
            patch.setattr(SignedStore, "set", overwritten)
        found = outcome(lambda: agree("a subject", rank, name=f"{is_signed}"))
    assert found.startswith(words)
    assert not (tmp_path / "it ran").exists()
    assert agree("it goes on", rank) == [0, 1]


@pytest.mark.ranks(2)
def test_the_notice_of_a_failure_is_refused() -> None:
    notice = FailureNotice("forged")
    if rank() == 1:
        store().raw.set("pipegrad/failed/forged/last", "0")
        store().raw.set("pipegrad/failed/forged/0", "rank 1: it failed")
    agree("it is written", rank)
    for read in (
        notice.read,
        notice.last_failed,
        notice.refuse_failed,
        lambda: notice.post("another"),
    ):
        assert outcome(read).startswith(OTHER)


@pytest.mark.parametrize("forged", ["alarm", "state/0", "report"])
@pytest.mark.ranks(2)
def test_a_job_ends_in_words_whatever_of_its_watch_is_forged(
    monkeypatch: pytest.MonkeyPatch, forged: str
) -> None:
    """The thread that read a forged alarm ended, and nobody noticed."""
    watch, write = Watch(), SignedStore.set
    shown = list[object]()
    watch.show = shown.append
    agree("both watch", rank)
    if forged == "alarm":
        store().raw.set(f"{watch._prefix}/alarm", "0 another")
    else:
        monkeypatch.setattr(
            SignedStore,
            "set",
            lambda self, key, value: (
                self.raw.set(key, "1") if key.endswith(forged) else write(self, key, value)
            ),
        )
        watch.fail(ValueError("a"))
    causes = gathered(watch.report().cause)
    watch.leave()
    # A forged answer is read by the rank that makes the report alone.
    read = ["another program has written 'pipegrad/watch/" in cause for cause in causes]
    assert any(read) if forged == "state/0" else all(read)
    assert any(gathered(len(shown)))


def test_only_ranks_with_the_key_of_a_launch_understand_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = HashStore()

    def of(key: str | None) -> SignedStore:
        monkeypatch.delenv(STORE_KEY) if key is None else monkeypatch.setenv(STORE_KEY, key)
        return SignedStore(raw)

    monkeypatch.setenv(STORE_KEY, "")
    one, again, other, none = of("one"), of("one"), of("other"), of(None)
    one.set("a", b"\0\xff")
    assert again.get("a") == b"\0\xff"
    assert again.set_first("a", "late") == b"\0\xff"
    assert (none.set_first("b", "x"), none.get("b")) == (b"x", b"x")
    raw.set("copied", raw.get("a"))  # type: ignore[arg-type]
    reads: list[tuple[SignedStore, str]] = [(other, "a"), (none, "a"), (one, "b"), (one, "copied")]
    for reader, key in reads:
        with pytest.raises(MessageError, match=f"another program has written '{key}'"):
            reader.get(key)


def test_a_process_that_somebody_else_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE_KEY, "one")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    raw: Store = HashStore()
    neighbours = Neighbours(SignedStore(raw), "job", 0)
    raw.set("job/1", "1 2")
    with pytest.raises(MessageError, match="another program has written 'job/1'"):
        neighbours.learn()
