"""All ranks agree or all fail, with the same words and within the time that was given."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from pipegrad.comm.agreement import agree
from pipegrad.comm.failures import FailureNotice, failure_of
from pipegrad.errors import AgreementError, PlanError, StallError
from pipegrad.testing import run_ranks

Outcome = tuple[str, str]


def outcome(function: Callable[[], object]) -> Outcome:
    """Returns how `function` failed: type and text."""
    try:
        found = function()
    except Exception as error:  # noqa: BLE001 - whatever it is, is asserted
        return type(error).__name__, str(error)
    return "returned", repr(found)


def fail(error: Exception) -> NoReturn:
    raise error


def raise_on(failing: dict[int, Exception]) -> int:
    rank = dist.get_rank()
    if rank in failing:
        raise failing[rank]
    return rank


def fail_to_pickle() -> object:
    return lambda: 0


def rounds() -> dict[str, object]:
    rank = dist.get_rank()
    began = time.monotonic()
    said: dict[str, object] = {
        "succeed": agree("one", lambda: {"rank": rank}),
        "one fails": outcome(
            lambda: agree("reading", lambda: raise_on({1: FileNotFoundError("no x.toml")}))
        ),
        "after it": agree("two", lambda: rank),
        "two fail": outcome(
            lambda: agree("both", lambda: raise_on({0: ValueError("a"), 2: KeyError("b")}))
        ),
        "all fail alike": outcome(lambda: agree("all", lambda: fail(PlanError("drop one")))),
        "all fail apart": outcome(lambda: agree("all", lambda: fail(PlanError(f"at {rank}")))),
        "does not pickle": outcome(
            lambda: agree("lambda", lambda: fail_to_pickle() if rank else 0)
        ),
        "many": [agree("again", partial(divmod, 10 * i + rank, 10)) for i in range(30)]
        == [[(i, r) for r in range(3)] for i in range(30)],
        "big": [hash(b) for b in agree("big", lambda: bytes([rank % 2]) * 2**22)]
        == [hash(bytes([r % 2]) * 2**22) for r in range(3)],
    }
    if rank != 1:  # a subset counts its own meetings
        said["subset"] = agree("some", lambda: rank, ranks=[2, 0])
    said["all again"] = agree("all", lambda: rank)
    try:
        agree("a report", lambda: fail(ValueError("a")) if rank == 2 else 0)
    except AgreementError as error:  # a report names who failed first
        said["failed itself"] = failure_of(error).time == error.began
    if not rank:  # a rank that knows that the job has ended waits for nobody
        said["ended"] = outcome(lambda: agree("a", lambda: fail(StallError("rank 2 has ended"))))
    said["quick"] = time.monotonic() - began < 30
    return said


@pytest.mark.smoke
def test_agreement() -> None:
    replies = run_ranks(rounds, 3)
    assert all(reply.pop("quick") for reply in replies)
    assert [reply.pop("subset", None) for reply in replies] == [[0, 2], None, [0, 2]]
    assert [reply.pop("failed itself") for reply in replies] == [False, False, True]
    assert replies[0].pop("ended") == ("StallError", "rank 2 has ended")
    unpickled = replies[0].pop("does not pickle")
    assert replies[0] == {
        "succeed": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
        "one fails": (
            "AgreementError",
            "rank 1: FileNotFoundError: no x.toml (reading: 1 of 3 ranks failed, so all stop)",
        ),
        "after it": [0, 1, 2],
        "two fail": (
            "AgreementError",
            (
                "rank 0: ValueError: a (both: 2 of 3 ranks failed, so all stop)\n"
                "  rank 2: KeyError: 'b'"
            ),
        ),
        "all fail alike": ("PlanError", "drop one"),
        "all fail apart": (
            "AgreementError",
            (
                "rank 0: PlanError: at 0 (all: 3 of 3 ranks failed, so all stop)\n"
                "  rank 1: PlanError: at 1\n  rank 2: PlanError: at 2"
            ),
        ),
        "many": True,
        "big": True,
        "all again": [0, 1, 2],
    }
    assert "(lambda: 2 of 3 ranks failed, so all stop)" in str(unpickled)
    assert unpickled == replies[1].pop("does not pickle") == replies[2].pop("does not pickle")
    assert replies[1] == replies[2] == replies[0]


def one_stays_away(absent: int) -> tuple[Outcome, float]:
    began = time.monotonic()
    if dist.get_rank() == absent:
        return ("away", ""), 0.0
    said = outcome(lambda: agree("start", dist.get_rank, timeout_seconds=0.5))
    return said, time.monotonic() - began


def test_a_rank_that_stays_away_is_named_within_the_timeout() -> None:
    replies = run_ranks(one_stays_away, 3, 1)
    text = (
        "start: nothing heard from ranks [1] within 0.5 s; look at their output, they failed or "
        "are stuck before this point"
    )
    assert [said for said, _ in replies] == [
        ("AgreementError", text), ("away", ""), ("AgreementError", text),
    ]  # fmt: skip
    assert all(seconds < 20 for _, seconds in replies)


def one_stays_away_and_goes_on(absent: int) -> list[object]:
    """A meeting with a name is not counted: a rank that was not there finds the next one."""
    said: list[object] = []
    for number in range(2):
        if dist.get_rank() != absent:
            options: dict[str, Any] = {"timeout_seconds": 0.5, "meeting": f"step {number}"}
            said.append(outcome(partial(agree, "named", dist.get_rank, **options))[0])
        said.append(agree("all", partial(int, number), timeout_seconds=20))
        said.append(agree("named", dist.get_rank, timeout_seconds=20, meeting=f"all {number}"))
    return said


def test_a_rank_that_stays_away_from_a_named_meeting_comes_to_the_next() -> None:
    first, away, last = run_ranks(one_stays_away_and_goes_on, 3, 1)
    assert away == [[0, 0, 0], [0, 1, 2], [1, 1, 1], [0, 1, 2]]
    assert first == last == ["AgreementError", *away[:2], "AgreementError", *away[2:]]


def one_comes_late() -> list[Outcome]:
    """Rank 1 arrives when rank 0 has given up: it must not think that all agreed."""
    notice = FailureNotice("given up")
    if dist.get_rank() == 1:
        while notice.read() is None:
            time.sleep(0.01)
    said = [outcome(lambda: agree("start", dist.get_rank, timeout_seconds=0.3))]
    if dist.get_rank() == 0:
        notice.post("")
    return said


def test_a_late_rank_fails_like_those_that_gave_up_on_it() -> None:
    first, late = run_ranks(one_comes_late, 2)
    assert first[0][0] == late[0][0] == "AgreementError"
    assert "nothing heard from ranks [1] within 0.3 s" in first[0][1]
    assert late == first


def part_ways() -> tuple[Outcome, int]:
    said = "reading" if dist.get_rank() else "writing"
    return outcome(lambda: agree(said, lambda: 0)), len(agree("together again", lambda: 0))


def test_ranks_in_different_places_are_told_so() -> None:
    first, second = run_ranks(part_ways, 2)
    assert first == second
    kind, text = first[0]
    assert kind == "AgreementError"
    assert "{0: 'writing', 1: 'reading'}" in text


def test_alone_it_is_a_call() -> None:
    assert agree("alone", lambda: 3) == [3]
    with pytest.raises(KeyError):
        agree("alone", lambda: {}[3])  # type: ignore[index]


def notices() -> list[str | None]:
    notice, other = FailureNotice("a"), FailureNotice("b")
    before = notice.read()
    agree("read", lambda: None)
    if dist.get_rank() == 1:
        notice.post("first")
        notice.post("second")
    agree("posted", lambda: None)
    if dist.get_rank() == 0:
        notice.post("third")
    agree("again", lambda: None)
    return [before, notice.read(), other.read()]


def test_the_first_failure_stands() -> None:
    assert run_ranks(notices, 2) == [[None, "rank 1: first", None]] * 2
    alone = FailureNotice("alone")
    alone.post("nobody reads it")
    assert alone.read() is None


def test_agreement_error_is_a_runtime_error() -> None:
    assert issubclass(AgreementError, RuntimeError)
