"""Batches that do not fit, and ranks that disagree: one error on all ranks, soon, and no harm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from pipegrad.comm.agreement import agree_keeping
from pipegrad.pipeline import wiring
from pipegrad.schedules import build, lower
from tests.support.gradients.cases import outcome, rank
from tests.support.pipeline.layers import NUM_MICROBATCHES as OWN
from tests.support.pipeline.layers import (
    WIDTH,
    Layer,
    Pipeline,
    batch,
    blamed,
    make,
    train,
)
from tests.support.pipeline.scales import ELSEWHERE

ALONE = 0.5  # seconds that a rank waits for others that do not come
RIGHT = ["True"] * 3
pytestmark = pytest.mark.ranks(2)


def disagree(
    pipeline: Pipeline, call: Callable[..., str], number: object, *, meet: bool = False
) -> str:
    """Takes a step with a number that others do not have; they may come to its meeting."""
    seconds = 60.0 if meet else ALONE
    with mock.patch.object(pipeline.scheduler._programs, "_timeout_seconds", seconds):
        return call(8, num_microbatches=number)


def test_any_number_of_rows_and_microbatches_is_taken() -> None:
    """In a first step, in later ones, and in an evaluation."""
    with closing(Pipeline()) as few:
        for call, rows, is_right in (
            *((few.step, OWN - 1, False), (few.step, OWN, True), (few.step, OWN - 1, False)),
            *((few.step, 0, False), (few.step, 7, True), (few.evaluate, OWN - 1, False)),
            *((few.evaluate, 5, True), (few.evaluate, OWN - 1, False), (few.step, 5, True)),
        ):
            name = "target" if rank() else "x"  # each rank refuses what it has
            why = f"StepError: tensors of {{'{name}': {rows}}} rows cannot be cut into 4"
            assert call(rows).startswith("True" if is_right else why)
        assert few.step(OWN - 1, num_microbatches=OWN - 1) == few.step(OWN) == "True"
    # The number of microbatches may change from step to step. Programs are made once a number, and
    # steps of the Scheduler's own number do not meet.
    patch = mock.patch
    with (
        patch("pipegrad.pipeline.programs.schedule_of", wraps=wiring.schedule_of) as generated,
        patch("pipegrad.pipeline.programs.lower", wraps=lower) as lowered,
        patch("pipegrad.pipeline.programs.agree_keeping", wraps=agree_keeping) as met,
        closing(Pipeline(schedule="zb-h1")) as pipeline,
    ):
        step, evaluate = pipeline.step, pipeline.evaluate
        assert [step(8), step(8, num_microbatches=OWN), evaluate(8)] == RIGHT
        assert evaluate(8) == "True"
        assert met.call_count == 0
        for rows, number in ((6, 2), (9, 3), (8, 2), (8, OWN), (7, 5), (3, 3), (1, 1)):
            assert step(rows, num_microbatches=number) == "True"
        assert [evaluate(rows, num_microbatches=2) for rows in (2, 5)] == ["True"] * 2
        generated.reset_mock()
        lowered.reset_mock()
        for number in (1, 2, 3, 5, OWN):
            assert step(9, num_microbatches=number) == "True"
        assert evaluate(9, num_microbatches=2) == "True"
        assert met.call_count == 13
        assert (generated.call_count, lowered.call_count) == (0, 0)


def test_the_program_is_that_of_the_next_step_whichever_number_came_first() -> None:
    """Another number had shown that no gradient comes back, and the Program still sent one."""
    x = torch.ones(2 * OWN, WIDTH, dtype=torch.float64)
    cut_off = Layer(lambda linear, x: linear(x).detach())
    with closing(make(cut_off, Layer())) as scheduler:
        assert [channel.kind for channel in scheduler.program.channels] == ["F", "B"]
        train(scheduler, x, target=x, num_microbatches=2)
        train(scheduler, x, target=x)
        assert [channel.kind for channel in scheduler.program.channels] == ["F"]
        assert scheduler.program.schedule is scheduler.schedule


WRONG = {
    0: "ScheduleError: a schedule has at least 1 rank and 1 microbatch, not 2 and 0",
    "three": "StepError: num_microbatches is 'three', expected a whole number",
    2.5: "StepError: num_microbatches is 2.5, expected a whole number",
}


def assert_told(said: str, own: Any, other: Any) -> None:
    """Asserts what is raised on a rank with a number of its own, or with none."""
    what = "AgreementError: num_microbatches of a step, which every rank is given alike"
    if own is None:
        # In a step of the Scheduler's own number, which the other rank fails. A rank that has
        # ended its part of an evaluation learns it from the loss.
        assert said.startswith((ELSEWHERE, "StepError: the step failed on another rank"))
        assert f"rank {1 - rank()}: {WRONG.get(other, what)}" in said
    elif own in WRONG:
        assert said.startswith(WRONG[own])
    elif 5 in (own, other):
        assert said.startswith("AgreementError: ranks disagree on num_microbatches of a step")
    else:
        assert said.startswith(what)
        assert f"nothing heard from ranks [{1 - rank()}] within {ALONE} s" in said


@pytest.mark.parametrize(
    "given",
    [(3, None), (None, 3), (3, 5), (3, 0), ("three", None), (None, 2.5)],
    ids=["the first has its own", "the last", "both", "one has none", "a word", "a fraction"],
)
def test_ranks_that_disagree_all_raise_soon_and_go_on(given: tuple[Any, Any]) -> None:
    """In the first step, in a later one, and in an evaluation."""
    own, other = given[rank()], given[1 - rank()]
    meet = None not in given and 0 not in given
    with closing(Pipeline()) as pipeline:
        step = pipeline.step
        for _ in range(2):
            assert_told(disagree(pipeline, step, own, meet=meet), own, other)
            assert [step(6, num_microbatches=3), step(8), step(6, num_microbatches=3)] == RIGHT
    with closing(Pipeline(schedule="gpipe")) as pipeline:
        evaluate = pipeline.evaluate
        assert [evaluate(8), evaluate(6, num_microbatches=3)] == ["True"] * 2
        assert_told(disagree(pipeline, evaluate, own, meet=meet), own, other)
        assert [evaluate(8), evaluate(6, num_microbatches=3), pipeline.step(8)] == RIGHT


NO_NUMBER = "StepError: num_microbatches is {}, expected a whole number"


@pytest.mark.parametrize(
    ("schedule", "number", "words"),
    [
        # A Schedule knows one number, and some generators not all of them.
        (
            build("1f1b", num_ranks=2, num_microbatches=OWN),
            3,
            "ScheduleError: schedule '1f1b' is of 2 ranks and 4 microbatches, asked for are",
        ),
        ("gpipe", -1, WRONG[0].replace("and 0", "and -1")),
        ("1f1b", True, NO_NUMBER.format("True")),
        ("1f1b", np.int64(3), "True"),
        ("1f1b", torch.tensor(3), NO_NUMBER.format("tensor(3)")),
    ],
)
def test_a_number_without_a_schedule_is_refused(schedule: Any, number: Any, words: str) -> None:
    options: Any = {} if isinstance(schedule, str) else {"num_microbatches": None}
    with closing(Pipeline(schedule=schedule, **options)) as pipeline:
        for _ in range(2):
            assert pipeline.step(8, num_microbatches=number).startswith(words)
        assert pipeline.step(8) == "True"


@pytest.mark.parametrize("given", ["by all", "by who needs it", "with a number"])
def test_ready_microbatches_are_those_of_a_batch(given: str) -> None:
    """As many as the Scheduler's, and others."""
    with closing(Pipeline()) as pipeline:
        for number in (OWN, 3, OWN, 1):
            x, y = batch(2 * number)
            parts = list(zip(x.chunk(number), y.chunk(number), strict=True))
            options: dict[str, Any] = {
                "microbatches": [{"target": b} if rank() else {"x": a} for a, b in parts]
            }
            if given == "by all":
                options["microbatches"] = [{"x": a, "target": b} for a, b in parts]
            if given == "with a number":
                options["num_microbatches"] = number
            train(pipeline.scheduler, **options)
            ready = [p.grad for p in pipeline.own.parameters()]
            train(pipeline.scheduler, x, target=y, num_microbatches=number)
            cut = [p.grad for p in pipeline.own.parameters()]
            assert all(map(torch.equal, ready, cut))  # type: ignore[arg-type]


X, Y = batch(2)
GOOD, PART = {"x": X, "target": Y}, "StepError: microbatch"


@pytest.mark.parametrize(
    ("given", "source", "why"),
    [
        ([GOOD, {"target": Y}, GOOD, GOOD], 0, f"{PART} 1: inputs ['x'] are missing"),
        ([GOOD, GOOD, {"x": X}, GOOD], 1, f"{PART} 2: the last stage's rank needs target="),
        ([GOOD, GOOD, GOOD, {"x": X[:, :1], "target": Y}], 0, "RuntimeError: "),
    ],
    ids=["an input is missing", "a target", "a stage cannot take it"],
)
def test_a_wrong_ready_microbatch_is_one_error(given: Any, source: int, why: str) -> None:
    with closing(Pipeline()) as pipeline:
        said = outcome(partial(train, pipeline.scheduler, microbatches=given))
        assert said.startswith(blamed(source, why))
        if why == "RuntimeError: " and rank():
            assert said.endswith("In 0F3 on pipeline rank 0.")
        assert pipeline.step(8) == "True"


def test_an_interrupt_behind_a_meeting_is_no_hang() -> None:
    """Ctrl-C on rank 1 behind a meeting, when rank 0 goes on with the number."""
    with closing(Pipeline()) as pipeline:
        assert pipeline.step(8, num_microbatches=2) == "True"
        target = "pipegrad.pipeline.programs.same"
        interrupt = mock.patch(target, side_effect=KeyboardInterrupt)
        with interrupt if rank() else contextlib.nullcontext():
            if rank():
                with pytest.raises(KeyboardInterrupt):
                    pipeline.step(8, num_microbatches=2)
            else:
                said = pipeline.step(8, num_microbatches=2)
                assert said.startswith(f"{ELSEWHERE}rank 1: KeyboardInterrupt")
        # What crossed the edges is unknown, so they are closed for good.
        for _ in range(2):
            assert "Error: " in pipeline.step(8)
