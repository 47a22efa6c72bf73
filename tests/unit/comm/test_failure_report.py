"""Who is the cause of a failure, from the records of the ranks. The drawing is the grid's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public

from pipegrad.comm import failures
from pipegrad.comm.activity import Failure, Record
from pipegrad.comm.agreement import same
from pipegrad.comm.failures import FailureNotice, FailureReport, make_report, source_of
from pipegrad.comm.store import SignedStore
from pipegrad.errors import AgreementError

ALL = (0, 1, 2, 3)
TOLD = "a step failed on another rank: rank 2: ValueError: boom. In 1F0"
OF_OTHERS = f"a step failed on another rank: rank 2: RuntimeError: closed{failures._LOST}"


def state(rank: int, **more: object) -> Record:
    return Record(rank, f"pid 10{rank} on host", **more)  # type: ignore[arg-type]


def waiting(rank: int, *ranks: int, what: str = "") -> Record:
    text = what or f"a value of {list(ranks)}"
    return state(rank, at=f"step 3, {text}", waits=((text, ranks),))


def computing(rank: int, seconds: float = 9.0) -> Record:
    return state(rank, at="step 3, compute 2F1", seconds=seconds, line="m.py:7 in f")


def failed(rank: int, error: str, time: float, *, follows: bool = False) -> Record:
    return state(rank, at="step 3", failure=Failure(error, follows, time))


def report(
    records: list[Record],
    silent: Mapping[int, str] | None = None,
    *,
    alarm: str = "",
    reporter: int = 0,
) -> FailureReport:
    return make_report(
        {record.rank: record for record in records},
        silent or {},
        reporter=reporter,
        alarm=alarm,
        draw=lambda pipeline, marks: f"{pipeline} drawn {dict(marks)}",
    )


LATE_2 = "rank 2 was in step 3, compute 2F1, for 9.0 s (m.py:7 in f); other ranks wait for it. LATE"
# What ranks have recorded, and how the cause begins: an error, or a rank that does not go on.
RAISED: dict[str, tuple[list[Record], str]] = {
    "who raised first, and not who followed": (
        [
            failed(0, "a step failed on another rank", 1.0, follows=True),
            failed(1, "KeyError('x')", 3.0),
            failed(2, "ValueError('boom')", 2.0),
            waiting(3, 2),
        ],
        "rank 2: ValueError('boom') [step 3]",
    ),
    "an error that its post, or another rank, has given a number": (
        [
            waiting(0, 3),
            waiting(1, 3),
            failed(2, "a step failed on another rank: rank 3: boom", 2.0, follows=True),
            failed(3, "rank 3: rank 3: bucket 0: boom of rank 3: bad", 2.0),
        ],
        "rank 3: bucket 0: boom of rank 3: bad [step 3]",
    ),
    "who has told its error, and is on the way out with it": (
        [failed(0, TOLD, 2.0, follows=True), waiting(1, 2), state(2), waiting(3, 2)],
        "rank 2: ValueError: boom. In 1F0",
    ),
    "words of the user's own with a rank in them": (
        [waiting(0, 3), waiting(1, 3), waiting(2, 3), failed(3, "no shard of rank 3: a", 2.0)],
        "rank 3: no shard of rank 3: a [step 3]",
    ),
    "what an ended rank has told": (
        [failed(0, TOLD, 1.0, follows=True), waiting(1, 2), waiting(3, 2)],
        "rank 2: ValueError: boom. In 1F0",
    ),
}
LOST: dict[str, tuple[list[Record], str]] = {
    "who is slow, at the end of a chain": (
        [waiting(0, 1), waiting(1, 2), computing(2), waiting(3, 2)],
        LATE_2,
    ),
    "who is outside, and not who is in torch": (
        [waiting(0, 2), waiting(1, 2), state(2), state(3, at="step 3", is_in_torch=True)],
        "rank 2 was outside of pipegrad; other ranks wait for it. LATE",
    ),
    "a free rank for which others wait, before one that is slower": (
        [waiting(0, 2), computing(1, 50.0), computing(2), waiting(3, 2)],
        LATE_2,
    ),
    "who has not come to a collective": (
        [computing(2) if r == 2 else waiting(r, *ALL, what="x") for r in ALL],
        LATE_2,
    ),
    "who is elsewhere, in a circle": (
        [
            waiting(0, *ALL, what="the optimizer"),
            *(waiting(1, 0, what="a value"), waiting(2, 1), waiting(3, 2)),
        ],
        "ranks wait for each other in a circle: rank 0 waits for ranks [1, 2, 3]: the optimizer; ",
    ),
    "who computes, whatever its comm stream waits for": (
        [
            replace(computing(0), is_busy=True, waits=(("bucket 0", (0, 1)),)),
            waiting(1, 0),
            waiting(2, 1),
            waiting(3, 2),
        ],
        LATE_2.replace("rank 2", "rank 0"),
    ),
    "none is stuck, they are slow": (
        [waiting(0, 1), waiting(1, 2), computing(2, 0.1), waiting(3, 2)],
        "no rank is stuck, they are too slow; rank 2 was in step 3, compute 2F1, for 0.1 s",
    ),
    "all have come, and it does not end": (
        [waiting(rank, *ALL, what="the loss") for rank in ALL],
        "ranks [0, 1, 2, 3] are in 'the loss', and it does not end: look at the network",
    ),
    "a lost connection between ranks that live": (
        [
            failed(0, "Connection closed by peer", 2.0, follows=True),
            failed(1, "Connection reset", 1.0, follows=True),
            computing(2, 0.1),
            computing(3, 0.1),
        ],
        "rank 1: Connection reset [step 3]",
    ),
    "a rank without an answer, before errors that follow": (
        [failed(0, "gloo: closed", 1.0, follows=True), waiting(1, 2), waiting(3, 2)],
        "rank 2 has ended without a word (process 102). LATE",
    ),
    "a rank that has ended, if it told of others": (
        [failed(0, OF_OTHERS, 1.0, follows=True), waiting(1, 2), waiting(3, 2)],
        "rank 2 has ended with code 1. LATE",
    ),
    "who did not come to an agreement": (
        [
            state(0, failure=Failure("nothing heard of [2]", True, 1.0, absent=(2,))),
            *(waiting(1, 2), computing(2), waiting(3, 2)),
        ],
        "rank 2 was in step 3, compute 2F1, for 9.0 s (m.py:7 in f). Rank 0: nothing heard",
    ),
}
# What is known of a rank without an answer.
SILENT = {
    "a rank without an answer, before errors that follow": "has ended without a word (process 102)",
    "what an ended rank has told": "has ended with code 1",
    "a rank that has ended, if it told of others": "has ended with code 1",
}


@pytest.mark.parametrize("name", [*RAISED, *LOST])
def test_the_cause_is_named_first(name: str) -> None:
    (states, cause), kind = (RAISED | LOST)[name], "raised" if name in RAISED else "lost"
    found = report(states, {2: SILENT[name]} if name in SILENT else {}, alarm="LATE")
    assert (found.cause[: len(cause)], found.kind) == (cause, kind)
    first, *ranks = found.text.splitlines()
    assert first == found.cause
    assert sorted(line.split()[1].strip(":") for line in ranks) == [*"0123"]


def test_of_many_ranks_without_an_answer_the_first_are_named() -> None:
    found = report([waiting(0, 1)], dict.fromkeys(range(1, 7), "is gone"), alarm="LATE")
    ranks = "; ".join(f"rank {rank} is gone" for rank in (1, 2, 3, 4))
    assert found.cause == f"{ranks}; and 2 more. LATE"
    assert found.text.splitlines()[1] == "  rank 1: is gone"


def test_one_error_of_all_ranks_is_common_and_one_line() -> None:
    found = report([failed(rank, "job.toml: train.steps = 0: at least 1", rank) for rank in ALL])
    assert found == FailureReport(found.cause, found.cause, 0, "common")
    assert found.cause == "job.toml: train.steps = 0: at least 1"


def test_the_grid_is_of_the_pipeline_of_the_cause() -> None:
    rows = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
    states = [
        state(rank, at="step", row=row, mark=f"{row[1]}F{rank}") for rank, row in rows.items()
    ]
    states[2] = replace(states[2], failure=Failure("boom"))
    found = report(states)
    assert found.text.splitlines()[-1] == "1 drawn {0: '0F2', 1: '1F3'}"


def test_a_table_of_many_ranks_has_those_of_the_cause_first() -> None:
    many = [waiting(rank, 77) for rank in range(100) if rank != 77] + [computing(77)]
    found = report(many)
    lines = found.text.splitlines()
    assert lines[1].startswith("  rank 77 ")
    assert lines[-1] == "  ... and 68 more ranks"
    assert len(lines) == 34


def test_a_rank_that_reaches_nobody_reports_what_it_knows() -> None:
    own = waiting(2, 1)
    line = "  rank 2 (pid 102 on host): was in step 3, a value of [1], for 0.0 s"
    alone = report([own], alarm="LATE. no store", reporter=2)
    assert alone.cause == "rank 2 was in step 3, a value of [1], for 0.0 s. LATE. no store"
    assert (alone.text.splitlines()[1:], alone.reporter) == ([line], 2)
    beside = report([own], alarm="no store", silent={0: "has ended without a word"})
    assert beside.cause == "rank 0 has ended without a word. no store"
    assert beside.text.splitlines()[2:] == [line]
    raised = report([failed(2, "boom", 1.0)], alarm="no store", silent={0: "is stopped"})
    assert (raised.cause, raised.kind) == ("rank 2: boom [step 3]. no store", "raised")
    told = report([failed(0, TOLD, 1.0, follows=True)], alarm="no store")
    assert (told.cause, told.kind) == ("rank 2: ValueError: boom. In 1F0. no store", "raised")


def test_the_rank_that_others_tell_of_is_the_last_one_in_front_of_its_words() -> None:
    assert source_of(TOLD) == (2, "rank 2: ValueError: boom. In 1F0")
    assert source_of(f"ReduceError: a step failed on another rank: rank 1: {TOLD}") == source_of(
        TOLD
    )
    assert source_of(f"bucket 0 (w): sum over ranks [0, 1] failed: {TOLD}") == source_of(TOLD)
    assert source_of("no shard of rank 3: a") is None


@pytest.mark.parametrize("final", [False, True])
def test_a_failure_is_final_only_if_that_is_said(
    monkeypatch: pytest.MonkeyPatch, *, final: bool
) -> None:
    board = SignedStore(HashStore())
    monkeypatch.setattr(failures, "store", lambda: board)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    notice = FailureNotice("sync 0")
    notice.post("boom", **({"final": True} if final else {}))
    assert notice.read() == "rank 3: boom"
    assert notice.read_final() == ("rank 3: boom" if final else None)


def test_the_rank_whose_error_is_the_cause_shows_it() -> None:
    lines = "\n  train.py:3 in f: raise"
    cause = state(2, failure=Failure("boom", False, 1.0, (), lines))
    found = report([failed(0, "later", 2.0), cause], reporter=0)
    assert (found.reporter, found.line, found.shown) == (2, "rank 2: boom", f"rank 2: boom{lines}")


def test_a_rank_that_has_ended_well_is_one_sentence() -> None:
    found = report([waiting(0, 1)], silent={1: "has ended after step 3"}, alarm="Rank 0 waits")
    words = "rank 1 has ended after step 3. Rank 0 waits. All ranks must make the same calls"
    assert (found.kind, found.shown, found.exit_code) == ("ended", words, 3)
    lost = report([waiting(0, 1)], silent={1: "is stopped"})
    assert (lost.kind, lost.shown) == ("lost", lost.text)


SGD = "SGD of all parameters of this model, with {{'lr': {}}}; all others are as everywhere else"
DIFFERENCES: list[tuple[dict[int, str], str]] = [
    ({0: "4", 1: "8", 2: "4"}, "4 on ranks [0, 2], 8 on rank 1"),
    ({0: "a\nb\nc", 1: "a\nx\ny"}, "b on rank 0, x on rank 1"),
    ({0: "a\nb", 1: "a"}, "b on rank 0, nothing on rank 1"),
    ({0: "", 1: "a"}, "nothing on rank 0, a on rank 1"),
    (
        {0: SGD.format(0.1), 1: SGD.format(0.2)},
        "... model, with {'lr': 0.1}; ... on rank 0, ... model, with {'lr': 0.2}; ... on rank 1",
    ),
    (
        {rank: str(rank) for rank in range(6)},
        "0 on rank 0, 1 on rank 1, 2 on rank 2, 3 on rank 3, and 2 more values",
    ),
    (
        {rank: "ab"[rank == 9] for rank in range(10)},
        "a on ranks [0, 1, 2, 3, 4, 5, 6, 7] and 1 more, b on rank 9",
    ),
]


@pytest.mark.parametrize(("values", "words"), DIFFERENCES)
def test_what_differs_is_shown_alone(values: dict[int, str], words: str) -> None:
    with pytest.raises(AgreementError) as caught:
        same("it", values)
    assert str(caught.value) == f"ranks disagree on it: {words}; make them the same"


def test_equal_values_are_no_error() -> None:
    same("it", {0: "a", 1: "a"})
