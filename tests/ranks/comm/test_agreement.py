"""All ranks agree or all fail, with the same words and within the time that was given."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from pipegrad.comm.activity import failure_of
from pipegrad.comm.agreement import agree
from pipegrad.comm.failures import FailureNotice
from pipegrad.errors import AgreementError, PlanError, StallError
from tests.support.gradients.cases import outcome, rank


def fail(error: Exception) -> NoReturn:
    raise error


def raise_on(failing: Mapping[int, Exception]) -> int:
    if rank() in failing:
        raise failing[rank()]
    return rank()


@pytest.mark.ranks(3)
def test_all_agree_or_all_fail_in_the_same_words() -> None:
    assert agree("one", lambda: {"rank": rank()}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    one = {1: FileNotFoundError("no x.toml")}
    assert outcome(lambda: agree("reading", lambda: raise_on(one))) == (
        "AgreementError: rank 1: FileNotFoundError: no x.toml "
        "(reading: 1 of 3 ranks failed, so all stop)"
    )
    assert agree("two", rank) == [0, 1, 2]
    two = {0: ValueError("a"), 2: KeyError("b")}
    assert outcome(lambda: agree("both", lambda: raise_on(two))) == (
        "AgreementError: rank 0: ValueError: a (both: 2 of 3 ranks failed, so all stop)\n"
        "  rank 2: KeyError: 'b'"
    )
    alike = outcome(lambda: agree("all", lambda: fail(PlanError("drop one"))))
    assert alike == "PlanError: drop one"
    assert outcome(lambda: agree("all", lambda: fail(PlanError(f"at {rank()}")))) == (
        "AgreementError: rank 0: PlanError: at 0 (all: 3 of 3 ranks failed, so all stop)\n"
        "  rank 1: PlanError: at 1\n  rank 2: PlanError: at 2"
    )


@pytest.mark.ranks(3)
def test_what_is_no_plain_data_fails_on_all_ranks() -> None:
    found = outcome(lambda: agree("lambda", lambda: (lambda: 0) if rank() else 0))
    assert found.startswith("AgreementError: rank 1: MessageError: builtins.function cannot")
    assert "(lambda: 2 of 3 ranks failed, so all stop)" in found
    assert agree("its words", lambda: found) == [found] * 3


@pytest.mark.ranks(3)
def test_many_meetings_large_answers_and_those_of_some_ranks() -> None:
    for i in range(30):
        met = agree("again", partial(divmod, 10 * i + rank(), 10))
        assert met == [(i, r) for r in range(3)]
    assert agree("big", lambda: bytes([rank() % 2]) * 2**22) == [
        bytes([r % 2]) * 2**22 for r in range(3)
    ]
    if rank() != 1:  # a subset counts its own meetings
        assert agree("some", rank, ranks=[2, 0]) == [0, 2]
    assert agree("all", rank) == [0, 1, 2]


@pytest.mark.ranks(3)
def test_an_error_says_when_its_first_rank_failed_and_nobody_waits_for_a_job_that_has_ended() -> (
    None
):
    with pytest.raises(AgreementError) as caught:
        agree("a report", lambda: fail(ValueError("a")) if rank() == 2 else 0)
    assert (failure_of(caught.value).time == caught.value.began) == (rank() == 2)
    if rank() == 0:  # it knows that the job has ended
        ended = StallError("rank 2 has ended")
        found = outcome(lambda: agree("a", lambda: fail(ended), name="an end"))
        assert found == "StallError: rank 2 has ended"


@pytest.mark.ranks(3)
def test_a_rank_that_stays_away_is_named_within_the_timeout() -> None:
    if rank() != 1:
        began = time.monotonic()
        assert outcome(partial(agree, "start", rank, timeout_seconds=0.5, name="start")) == (
            "AgreementError: start: nothing heard from ranks [1] within 0.5 s; all ranks must "
            "call it. Look at their output: they may have failed, or be stuck before this point"
        )
        assert time.monotonic() - began < 20


@pytest.mark.ranks(3)
def test_a_rank_that_stays_away_from_a_named_meeting_comes_to_the_next() -> None:
    """A meeting with a name is not counted."""
    for number in range(2):
        if rank() != 1:
            options: dict[str, Any] = {"timeout_seconds": 0.5, "name": f"step {number}"}
            found = outcome(partial(agree, "named", rank, **options))
            assert found.startswith("AgreementError: ")
        assert agree("all", partial(int, number), timeout_seconds=60) == [number] * 3
        met = agree("named", rank, timeout_seconds=60, name=f"all {number}")
        assert met == [0, 1, 2]


@pytest.mark.ranks(2)
def test_a_late_rank_fails_like_those_that_gave_up_on_it() -> None:
    """Rank 1 arrives when rank 0 has given up: it must not think that all agreed."""
    notice = FailureNotice("given up")
    while rank() == 1 and notice.read() is None:
        time.sleep(0.01)
    found = outcome(lambda: agree("start", rank, timeout_seconds=0.3))
    if rank() == 0:
        notice.post("")
    assert found.startswith("AgreementError: start: nothing heard from ranks [1] within 0.3 s")
    assert agree("its words", lambda: found, name="its words") == [found] * 2


@pytest.mark.ranks(2)
def test_ranks_in_different_places_are_told_so() -> None:
    found = outcome(lambda: agree("reading" if rank() else "writing", lambda: 0))
    assert found.startswith("AgreementError: ")
    assert "{0: 'writing', 1: 'reading'}" in found
    assert agree("together again", lambda: found) == [found] * 2


def test_alone_it_is_a_call() -> None:
    assert agree("alone", lambda: 3) == [3]
    with pytest.raises(KeyError):
        agree("alone", lambda: {}[3])  # type: ignore[index]


@pytest.mark.ranks(2)
def test_the_first_failure_stands() -> None:
    notice, other = FailureNotice("a"), FailureNotice("b")
    assert notice.read() is None
    dist.barrier()
    for number, text in ((1, "first"), (1, "second"), (0, "third")):
        if rank() == number:
            notice.post(text)
        dist.barrier()
    assert (notice.read(), other.read()) == ("rank 1: first", None)


def test_a_notice_of_one_process_is_read_by_nobody() -> None:
    alone = FailureNotice("alone")
    alone.post("nobody reads it")
    assert alone.read() is None
    assert issubclass(AgreementError, RuntimeError)
