"""A step that cannot be taken is refused on every rank, and leaves everything in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from pipegrad import Topology
from pipegrad.comm.agreement import Board
from tests.support.gradients.cases import DATA, Case, Replies, on, outcome, rank, replies
from tests.support.pipeline.scales import ELSEWHERE, TOO_LATE, WIDTH, Training, chain, told, warm

ENDED = timedelta(seconds=8)  # for ranks to end by themselves

PIPELINE: list[Case] = []
pipeline = replies(4, PIPELINE)

# What a step is given.


def inputs(training: Training, *, recovers: bool) -> dict[str, tuple[str, bool]]:
    step, x = training.scheduler.step, torch.ones(8, WIDTH)
    calls = {
        "missing": lambda: step(target=x),
        "doubled": lambda: step(x, x=x, target=x),
        "unknown": lambda: step(x, z=x, target=x),
        "too many": lambda: step(x, x, target=x),
        "few": lambda: step(x[:3], target=x),
        "few target": lambda: step(x, target=x[:3]),
        "empty": lambda: step(x[:0], target=x),
        "no target": lambda: step(x),
    }
    return {
        name: (training.said(call), not recovers or training.is_right())
        for name, call in calls.items()
    }


@on(PIPELINE)
def inputs_at_first() -> Any:
    training = chain()
    return inputs(training, recovers=False), training.is_right()


@on(PIPELINE)
def inputs_later() -> Any:
    return inputs(warm(chain()), recovers=True)


INPUTS = {  # the rank that says so, -1 for all
    "missing": (0, "inputs ['x'] are missing, which stages of this rank take"),
    "doubled": (-1, "inputs ['x'] are given twice, by position and by name"),
    "unknown": (-1, "no stage takes ['z']; from outside they take ['x']"),
    "too many": (-1, "2 inputs, expected at most ['x']"),
    "few": (0, "tensors of {'x': 3} rows cannot be cut into 4 microbatches"),
    "few target": (3, "tensors of {'target': 3} rows cannot be cut into 4 microbatches"),
    "empty": (0, "tensors of {'x': 0} rows cannot be cut into 4 microbatches"),
    "no target": (3, "the last stage's rank needs target= and a Scheduler with loss_fn="),
}


def assert_refused(name: str, answers: Sequence[dict[str, tuple[str, bool]]]) -> None:
    source, why = INPUTS[name]
    for place, found in enumerate(answers):
        said, right_afterwards = found[name]
        own = source < 0 or place == source
        start = f"StepError: {why}" if own else f"{ELSEWHERE}rank {source}: StepError: {why}"
        assert said.startswith(start)
        assert right_afterwards


@pytest.mark.parametrize("name", INPUTS)
def test_wrong_inputs_of_a_first_step(name: str, pipeline: Replies) -> None:
    assert_refused(name, [found for found, _ in told(pipeline, "inputs_at_first")])
    assert [right for _, right in told(pipeline, "inputs_at_first")] == [True] * 4


@pytest.mark.parametrize("name", INPUTS)
def test_wrong_inputs_of_a_later_step(name: str, pipeline: Replies) -> None:
    assert_refused(name, told(pipeline, "inputs_later"))


@on(PIPELINE)
def another_batch_size() -> Any:
    training = chain()
    return [training.is_right(rows=rows) for rows in (8, 12, 5, 8)]


def test_another_batch_size_is_taken(pipeline: Replies) -> None:
    for right in told(pipeline, "another_batch_size"):
        assert right == [True] * 4


# Losses.


@on(PIPELINE)
def losses() -> Any:
    without, training = chain(loss_fn=None), chain()
    said = [without.step()]
    for trick in (lambda out: out, lambda out: None, lambda out: 1.0):
        training.loss_trick = trick
        said.append(training.step())
    training.loss_trick = torch.sum
    right = training.is_right()
    training.loss_trick = lambda out: out
    later = training.step()
    training.loss_trick = torch.sum
    return said, right, later, training.is_right()


def test_a_loss_must_be_there_and_have_one_element(pipeline: Replies) -> None:
    found = [
        "the last stage's rank needs target= and a Scheduler with loss_fn=",
        *(f"loss_fn returned {what}" for what in ("tensor(", "None", "1.0", "tensor(")),
    ]
    for place, (said, right, later, right_afterwards) in enumerate(told(pipeline, "losses")):
        start = "StepError: " if place == 3 else f"{ELSEWHERE}rank 3: StepError: "
        for text, why in zip([*said, later], found, strict=True):
            assert text.startswith(f"{start}{why}")
        assert (right, right_afterwards) == (True, True)


DIVISORS = (0.0, -1.0, float("inf"), float("nan"))


@on(PIPELINE)
def divisors() -> Any:
    """Wrong on rank 1 alone, in a first step and in later ones."""
    training = chain()
    said = [training.step(loss_divisor=d if rank() == 1 else 1.0) for d in DIVISORS]
    right = training.is_right()
    said += [training.step(loss_divisor=d if rank() == 1 else 1.0) for d in DIVISORS]
    return said, right, training.is_right()


def test_a_loss_divisor_must_be_a_positive_finite_number(pipeline: Replies) -> None:
    for place, (said, *right) in enumerate(told(pipeline, "divisors")):
        start = "StepError: " if place == 1 else f"{ELSEWHERE}rank 1: StepError: "
        whys = [f"{start}loss_divisor is {d}, expected a number above 0" for d in DIVISORS]
        assert said == [*whys, *whys]
        assert right == [True, True]


# Parameters that are not what they were.


@on(PIPELINE)
def parameters() -> Any:
    training = warm(chain())
    weight = training.module.weight
    weight.requires_grad_(rank() != 2)
    answers: list[Any] = [training.step()]
    weight.requires_grad_()
    answers += [training.is_right()]
    if rank() == 2:
        training.module.weight = nn.Parameter(torch.full((1,), 3.0))
    answers += [training.step()]
    training.module.weight = nn.Parameter(weight.detach().clone())  # as good as the one before
    return [*answers, training.is_right()]


def test_a_parameter_that_changed_is_refused_by_name_one_alike_is_taken(
    pipeline: Replies,
) -> None:
    for place, answers in enumerate(told(pipeline, "parameters")):
        frozen, thawed, other, alike = answers
        assert (thawed, alike) == (True, True)
        for said, now in ((frozen, "requires_grad=False"), (other, "now it is (1,)")):
            why = "StepError: '2.weight' was (2,)"
            assert said.startswith(why if place == 2 else f"{ELSEWHERE}rank 2: {why}")
            assert now in said


# Two copies of two stages: ranks 0 and 1 have stage 0, ranks 2 and 3 stage 1.


@on(PIPELINE)
def refused_everywhere() -> Any:
    """All ranks refuse two steps; nothing is launched, so nothing is out of step."""
    training = warm(Training(Topology.create(pipeline=2), handlers=[DATA]))
    x = torch.ones(8, WIDTH)
    unknown = training.said(lambda: training.scheduler.step(x, z=x, target=x))
    after_unknown = training.step()
    again = outcome(lambda: training.scheduler.step(x, target=x))
    return unknown, after_unknown, again, training.step()


def test_a_step_that_all_ranks_refuse_breaks_nothing(pipeline: Replies) -> None:
    for unknown, after_unknown, again, after_again in told(pipeline, "refused_everywhere"):
        assert unknown.startswith("StepError: no stage takes ['z']")
        assert after_unknown == "loss: 240.0"
        assert again.startswith("StepError: the gradient of ")
        assert "call optimizer.zero_grad()" in again
        assert after_again == "loss: 240.0"


def refused_late(
    harm: Callable[[Training], str], *, pipeline: int = 2
) -> tuple[str, list[str], str]:
    """Rank 1 refuses its step when the others have computed theirs, and wait for its bucket."""
    training = warm(Training(Topology.create(pipeline=pipeline), handlers=[DATA]))
    board = Board(f"{harm.__name__} {pipeline}")
    if rank() == 1:
        time.sleep(0.5)
        said = harm(training)
        ended = [outcome(lambda r=r: board.wait(f"{r}", ENDED)) for r in (0, 2, 3)]  # type: ignore[misc]
    else:
        said, ended = training.step(), []
        board.post(f"{rank()}", b"ended")
    return said, ended, training.step()


def freezes(training: Training) -> str:
    training.module.weight.requires_grad_(False)
    said = training.step()
    training.module.weight.requires_grad_()
    return said


def cuts_badly(training: Training) -> str:
    return training.step(rows=3)


@on(PIPELINE)
def parameter_late() -> Any:
    return refused_late(freezes)


@on(PIPELINE)
def input_late() -> Any:
    return refused_late(cuts_badly)


@on(PIPELINE)
def parameter_late_without_pipeline() -> Any:
    """No rank of its pipeline can tell the others in its place."""
    return refused_late(freezes, pipeline=1)


REFUSED_LATE = {
    "parameter_late": "StepError: '0.weight' was",
    "parameter_late_without_pipeline": "StepError: '0.weight' was",
    "input_late": "StepError: tensors of {'x': 3} rows",
}


@pytest.mark.parametrize("case", REFUSED_LATE)
def test_a_rank_that_refuses_late_ends_those_that_wait_for_its_bucket(
    case: str, pipeline: Replies
) -> None:
    """By itself: not by taking its next step, which it may never do."""
    for place, (said, ended, again) in enumerate(told(pipeline, case)):
        if place == 1:
            assert said.startswith(REFUSED_LATE[case])
            assert ended == [repr(b"ended")] * 3
        else:
            assert said.startswith(TOO_LATE) or f"rank 1: {REFUSED_LATE[case]}" in said
        assert again == ("loss: 120.0" if case.endswith("without_pipeline") else "loss: 240.0")
