"""Batches that do not fit, and ranks that disagree: one error on all ranks, soon, and no harm."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from pipegrad import Scheduler, Stage, Topology
from pipegrad.comm.agreement import agree
from pipegrad.pipeline import wiring
from pipegrad.schedules import build, lower
from tests.support.gradients.cases import Case, Replies, on, outcome, rank, replies
from tests.support.pipeline.layers import NUM_MICROBATCHES as OWN
from tests.support.pipeline.layers import WIDTH, Layer, distance, make, mean_square, normal, train
from tests.support.pipeline.scales import ELSEWHERE

PAIR: list[Case] = []
pair = replies(2, PAIR)
FOUR: list[Case] = []
four = replies(4, FOUR)

MOST = 1e-12  # float64; sums of some ten terms in another order
SECONDS = 2.0  # how long a meeting waits
SOON = 20.0  # for everything that a disagreement costs; far less than any other time-out


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return normal(rows, WIDTH, seed=seed), normal(rows, WIDTH, seed=seed + 1)


class Pipeline:
    """A layer a rank, and a copy of all of them in one process."""

    def __init__(self, num_stages: int = 2, **options: Any) -> None:
        self.layers = [Layer() for _ in range(num_stages)]
        self.true = [Layer() for _ in range(num_stages)]
        options = {"agree_seconds": SECONDS, **options}
        if num_stages == 2:
            self.scheduler = make(*self.layers, **options)
            return
        self.scheduler = Scheduler(
            [Stage(self.layers[rank()], rank())],
            Topology.create(pipeline=num_stages),
            num_microbatches=OWN,
            loss_fn=mean_square,
            handlers=["noop"],
            **{"schedule": "1f1b", **options},
        )

    def said(self, rows: int, **options: Any) -> str:
        """Takes a step; returns what it raised, or that it was right."""
        x, y = batch(rows)
        return outcome(lambda: self.error_of(x, y, **options) < MOST or "wrong")

    def error_of(self, x: Tensor, y: Tensor, **options: Any) -> float:
        train(self.scheduler, x, target=y, **options)
        number = options.get("num_microbatches") or OWN
        for module in self.true:
            module.zero_grad()
        for part, target in zip(x.tensor_split(number), y.tensor_split(number), strict=True):
            out = part
            for module in self.true:
                out = module(out)
            (mean_square(out, target) / number).backward()
        pairs = zip(self.layers[rank()].parameters(), self.true[rank()].parameters(), strict=True)
        return max(distance(p.grad, q.grad) for p, q in pairs)

    def evaluated(self, rows: int, **options: Any) -> str:
        x, y = batch(rows)
        return outcome(lambda: float(self.scheduler.evaluate(x, target=y, **options).loss) > 0)


def timed(call: Callable[..., str], *args: Any, **options: Any) -> str:
    began = time.monotonic()
    said = call(*args, **options)
    seconds = time.monotonic() - began
    return said if seconds < SOON else f"{seconds:.0f} s: {said}"


# Rows.


@on(PAIR)
def rows() -> Any:
    """Too few for the microbatches, in a first step, in later ones, and in an evaluation."""
    few = Pipeline()
    found = [few.said(OWN - 1), few.said(OWN), few.said(OWN - 1), few.said(0), few.said(7)]
    found += [few.evaluated(OWN - 1), few.evaluated(5), few.evaluated(OWN - 1), few.said(5)]
    found += [few.said(OWN - 1, num_microbatches=OWN - 1), few.said(OWN)]
    few.scheduler.close()
    return found


FEW = {0: 3, 2: 3, 3: 0, 5: 3, 7: 3}  # steps of too few rows


def test_fewer_rows_than_microbatches_are_refused_on_all_ranks_and_any_others_taken(
    pair: Replies,
) -> None:
    for place, reply in enumerate(pair):
        for number, said in enumerate(reply["rows"]):
            name = "target" if place else "x"  # each rank refuses what it has
            why = f"StepError: tensors of {{'{name}': {FEW.get(number)}}} rows cannot be cut into 4"
            assert said.startswith(why if number in FEW else "True"), (number, said)


# Numbers of microbatches.


@on(PAIR)
def changing_numbers() -> Any:
    """Programs are made once a number, and steps of the Scheduler's own number do not meet."""
    own_generate = mock.patch(
        "pipegrad.pipeline.other_numbers.schedule_of", wraps=wiring.schedule_of
    )
    own_lower = mock.patch("pipegrad.pipeline.step.lower", wraps=lower)
    own_agree = mock.patch("pipegrad.pipeline.other_numbers.agree", wraps=agree)
    with own_generate as generated, own_lower as lowered, own_agree as met:
        pipeline = Pipeline(schedule="zb-h1")
        own = [pipeline.said(8), pipeline.said(8, num_microbatches=OWN), pipeline.evaluated(8)]
        own += [pipeline.evaluated(8)]
        met_for_own = met.call_count
        others = [
            pipeline.said(rows, num_microbatches=number)
            for rows, number in ((6, 2), (9, 3), (8, 2), (8, OWN), (7, 5), (3, 3), (1, 1))
        ]
        others += [pipeline.evaluated(rows, num_microbatches=2) for rows in (2, 5)]
        generated.reset_mock()
        lowered.reset_mock()
        again = [pipeline.said(9, num_microbatches=number) for number in (1, 2, 3, 5, OWN)]
        again += [pipeline.evaluated(9, num_microbatches=2)]
        found = met_for_own, met.call_count, lowered.call_count + generated.call_count
    pipeline.scheduler.close()
    return {*own, *others, *again}, found


def test_the_number_of_microbatches_may_change_from_step_to_step(pair: Replies) -> None:
    for reply in pair:
        said, (met_for_own, met, made_again) = reply["changing_numbers"]
        assert said == {"True"}
        assert (met_for_own, met, made_again) == (0, 13, 0)


DISAGREE: dict[str, tuple[Any, Any]] = {
    "the first rank has its own": (3, None),
    "the last rank has its own": (None, 3),
    "both have their own": (3, 5),
    "one has none": (3, 0),
    "a word": ("three", None),
    "a fraction": (None, 2.5),
}
WRONG = {
    0: "ScheduleError: a schedule has at least 1 rank and 1 microbatch, not 2 and 0",
    "three": "StepError: num_microbatches is 'three', expected a whole number",
    2.5: "StepError: num_microbatches is 2.5, expected a whole number",
}


def disagreements(pipeline: Pipeline, take: str) -> dict[str, tuple[str, str]]:
    """Returns what each disagreement raises, and a step of each number that follows it."""
    found = {}
    for name, given in DISAGREE.items():
        call = getattr(pipeline, take)
        said = timed(call, 8, num_microbatches=given[rank()])
        right = [call(8), call(6, num_microbatches=3), pipeline.said(8)]
        found[name] = said, f"{set(right)}"
    return found


@on(PAIR)
def disagree_at_first() -> Any:
    """Each is the first step of a Scheduler."""
    found = {}
    for name, given in DISAGREE.items():
        pipeline = Pipeline()
        said = timed(pipeline.said, 8, num_microbatches=given[rank()])
        right = [pipeline.said(6, num_microbatches=3), pipeline.said(8)]
        found[name] = said, f"{set(right)}"
        pipeline.scheduler.close()
    return found


@on(PAIR)
def disagree_later() -> Any:
    pipeline = Pipeline()
    assert [pipeline.said(8), pipeline.said(6, num_microbatches=3)] == ["True", "True"]
    found = disagreements(pipeline, "said")
    pipeline.scheduler.close()
    return found


@on(PAIR)
def disagree_in_evaluation() -> Any:
    pipeline = Pipeline(schedule="gpipe")
    assert [pipeline.evaluated(8), pipeline.evaluated(6, num_microbatches=3)] == ["True", "True"]
    found = disagreements(pipeline, "evaluated")
    pipeline.scheduler.close()
    return found


@pytest.mark.parametrize("case", ["disagree_at_first", "disagree_later", "disagree_in_evaluation"])
@pytest.mark.parametrize("name", DISAGREE)
def test_ranks_that_disagree_all_raise_soon_and_go_on(name: str, case: str, pair: Replies) -> None:
    for place, reply in enumerate(pair):
        said, right = reply[case][name]
        own, other = DISAGREE[name][place], DISAGREE[name][1 - place]
        what = "AgreementError: num_microbatches of a step, which every rank is given alike"
        if own is None:
            # In a step of the Scheduler's own number, which the other rank fails. A rank that has
            # ended its part of an evaluation learns it from the loss.
            assert said.startswith((ELSEWHERE, "StepError: the step failed on another rank"))
            assert f"rank {1 - place}: {WRONG.get(other, what)}" in said
        elif own in WRONG:
            assert said.startswith(WRONG[own])
        elif other == 5 or own == 5:
            assert said.startswith("AgreementError: ranks disagree on num_microbatches of a step")
        else:
            assert said.startswith(what)
            assert f"nothing heard from ranks [{1 - place}] within 2 s" in said
        assert right == "{'True'}"


@on(FOUR)
def one_of_four() -> Any:
    """One rank in the middle, or all but one, have another number; also without a number."""
    found = {}
    for name, others in {"one": [2], "three": [0, 1, 3]}.items():
        for schedule in ("1f1b", "zb-h1"):
            pipeline = Pipeline(4, schedule=schedule)
            said = []
            for _ in range(2):  # first, and later
                given = 6 if rank() in others else None
                said += [timed(pipeline.said, 8, num_microbatches=given)]
                said += [pipeline.said(8), pipeline.said(12, num_microbatches=6)]
            found[name, schedule] = said
            pipeline.scheduler.close()
    return found


def test_any_rank_of_four_may_disagree(four: Replies) -> None:
    for place, reply in enumerate(four):
        for (name, _), said in reply["one_of_four"].items():
            others = [2] if name == "one" else [0, 1, 3]
            start = "AgreementError: " if place in others else ELSEWHERE
            assert [text.startswith(start) for text in said[::3]] == [True, True], said
            assert set(said[1::3]) == set(said[2::3]) == {"True"}


@on(PAIR)
def numbers_without_a_schedule() -> Any:
    """A Schedule knows one number, and some generators not all of them."""
    found = {}
    given: dict[str, tuple[Any, Any]] = {
        "a Schedule": (build("1f1b", num_ranks=2, num_microbatches=OWN), 3),
        "zero": ("1f1b", 0),
        "negative": ("gpipe", -1),
        "True": ("1f1b", True),
        "numpy": ("1f1b", np.int64(3)),
        "a tensor": ("1f1b", torch.tensor(3)),
        "tensors": ("1f1b", torch.tensor([3, 4])),
        "a word": ("1f1b", "3"),
    }
    for name, (schedule, number) in given.items():
        options: dict[str, Any] = {"num_microbatches": None} if name == "a Schedule" else {}
        pipeline = Pipeline(schedule=schedule, **options)
        said = [timed(pipeline.said, 8, num_microbatches=number) for _ in range(2)]
        found[name] = said, pipeline.said(8)
        pipeline.scheduler.close()
    return found


NOT_THERE = {
    "a Schedule": "ScheduleError: schedule '1f1b' is of 2 ranks and 4 microbatches, asked for are",
    "zero": "ScheduleError: a schedule has at least 1 rank and 1 microbatch, not 2 and 0",
    "negative": "ScheduleError: a schedule has at least 1 rank and 1 microbatch, not 2 and -1",
    "True": "StepError: num_microbatches is True, expected a whole number",
    "numpy": "True",
    "a tensor": "StepError: num_microbatches is tensor(3), expected a whole number",
    "tensors": "RuntimeError: Boolean value of Tensor with more than one value is ambiguous",
    "a word": "StepError: num_microbatches is '3', expected a whole number",
}


@pytest.mark.parametrize("name", NOT_THERE)
def test_a_number_without_a_schedule_is_refused_on_all_ranks(name: str, pair: Replies) -> None:
    for reply in pair:
        said, right = reply["numbers_without_a_schedule"][name]
        assert [text.startswith(NOT_THERE[name]) for text in said] == [True, True], said
        assert right == "True"


@on(PAIR)
def interrupted() -> Any:
    """Ctrl-C on rank 1 behind a meeting, when rank 0 goes on with the number."""
    pipeline = Pipeline()
    said = [pipeline.said(8, num_microbatches=2)]
    interrupt = mock.patch("pipegrad.pipeline.other_numbers.same", side_effect=KeyboardInterrupt)
    with interrupt if rank() else contextlib.nullcontext():
        said += [timed(ended, pipeline.said, 8, num_microbatches=2)]
    said += [timed(ended, pipeline.said, 8), timed(ended, pipeline.said, 8)]
    pipeline.scheduler.close()
    return said


def ended(call: Callable[..., str], *args: Any, **options: Any) -> str:
    try:
        return call(*args, **options)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"


def test_an_interrupt_behind_a_meeting_is_no_hang(pair: Replies) -> None:
    for place, reply in enumerate(pair):
        right, said, *later = reply["interrupted"]
        assert right == "True"
        wanted = "KeyboardInterrupt" if place else f"{ELSEWHERE}rank 1: KeyboardInterrupt"
        assert said.startswith(wanted)
        # What crossed the edges is unknown, so they are closed for good.
        assert all("Error: " in text and not text[0].isdigit() for text in later)


# Ready microbatches.


@on(PAIR)
def ready() -> Any:
    """As many as the Scheduler's, and others; given by all ranks, or by those that need them."""
    found = {}
    for name in ("all", "needed", "a number"):
        pipeline = Pipeline()
        said = []
        for number in (OWN, 3, OWN, 1):
            x, y = batch(2 * number)
            parts = list(zip(x.chunk(number), y.chunk(number), strict=True))
            needed = [{"target": b} if rank() else {"x": a} for a, b in parts]
            every = [{"x": a, "target": b} for a, b in parts]
            options = {"microbatches": every if name == "all" else needed}
            if name == "a number":
                options["num_microbatches"] = number  # type: ignore[assignment]
            train(pipeline.scheduler, **options)
            own = [p.grad for p in pipeline.layers[rank()].parameters()]
            train(pipeline.scheduler, x, target=y, num_microbatches=number)
            same = [p.grad for p in pipeline.layers[rank()].parameters()]
            said += [max(distance(p, q) for p, q in zip(own, same, strict=True))]
        found[name] = said
        pipeline.scheduler.close()
    return found


def test_ready_microbatches_are_those_of_a_batch(pair: Replies) -> None:
    for reply in pair:
        for name, errors in reply["ready"].items():
            assert errors == [0.0] * 4, name


@on(PAIR)
def wrong_ready() -> Any:
    pipeline = Pipeline()
    x, y = batch(2)
    good = {"x": x, "target": y}
    given: dict[str, Any] = {
        "an input is missing": [good, {"target": y}, good, good],
        "a target is missing": [good, good, {"x": x}, good],
        "none at all": [],
        "an iterator": iter([good] * OWN),
        "a stage cannot take it": [good, good, good, {"x": x[:, :1], "target": y}],
    }
    found = {}
    for name, microbatches in given.items():
        call = partial(train, pipeline.scheduler, microbatches=microbatches)
        said = timed(outcome, call)
        found[name] = said, pipeline.said(8)
    pipeline.scheduler.close()
    return found


WRONG_READY = {
    "an input is missing": (0, "StepError: microbatch 1: inputs ['x'] are missing"),
    "a target is missing": (1, "StepError: microbatch 2: the last stage's rank needs target="),
    "none at all": (-1, "ScheduleError: a schedule has at least 1 rank and 1 microbatch"),
    "an iterator": (-1, "StepError: microbatches is a list_iterator, expected a list"),
    "a stage cannot take it": (0, "RuntimeError: "),
}


@pytest.mark.parametrize("name", WRONG_READY)
def test_a_wrong_ready_microbatch_is_one_error_on_all_ranks(name: str, pair: Replies) -> None:
    source, why = WRONG_READY[name]
    for place, reply in enumerate(pair):
        said, right = reply["wrong_ready"][name]
        own = source in (-1, place)
        assert said.startswith(why if own else f"{ELSEWHERE}rank {source}: {why}")
        if name == "a stage cannot take it" and not own:
            assert said.endswith("In 0F3 on pipeline rank 0.")
        assert right == "True"


# What stages return.


@on(PAIR)
def returned() -> Any:
    """A stage returns a dict, and in one microbatch no tensor where a later stage names one."""
    modules = [Layer(lambda linear, x: {"x": linear(x), "cache": None, "n": 3}), Layer()]
    scheduler = make(*modules)
    found = [outcome(lambda: train(scheduler, batch(8)[0], target=batch(8)[1]) > 0)]
    calls: list[int] = []

    def forgets(linear: Any, x: Tensor) -> dict[str, Any]:
        calls.append(len(calls))
        return {"x": linear(x) if len(calls) != 3 else None, "n": 3}

    modules[0]._function = forgets
    found += [outcome(lambda: train(scheduler, batch(8)[0], target=batch(8)[1]))]
    found += [outcome(lambda: train(scheduler, batch(8)[0], target=batch(8)[1]) > 0)]
    scheduler.close()
    return found


def test_a_named_output_that_is_missing_names_stage_and_microbatch(pair: Replies) -> None:
    why = "StepError: stage 0 returned {'x': 'NoneType', 'n': 'int'}, expected a tensor for each"
    for place, reply in enumerate(pair):
        first, said, right = reply["returned"]
        assert (first, right) == ("True", "True")
        assert said.startswith(f"{ELSEWHERE}rank 0: {why}" if place else why)
        if place:
            assert said.endswith("In 0F2 on pipeline rank 0.")
