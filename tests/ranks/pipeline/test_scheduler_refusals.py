"""A step that cannot be taken is refused on every rank, and leaves everything in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from pipegrad import Topology
from pipegrad.comm.agreement import Board
from tests.support.gradients.cases import DATA, outcome, rank
from tests.support.pipeline.layers import blamed
from tests.support.pipeline.scales import TOO_LATE, WIDTH, Training, chain, warm

ENDED = timedelta(seconds=60)  # for ranks to end by themselves
X = torch.ones(8, WIDTH)
pytestmark = pytest.mark.ranks(4)


FEW = "tensors of {{{}}} rows cannot be cut into 4 microbatches"
INPUTS: list[tuple[tuple[Any, ...], dict[str, Any], int, str]] = [
    # Given to a step, by position and by name; the rank that says why, -1 for all.
    ((), {"target": X}, 0, "inputs ['x'] are missing, which stages of this rank take"),
    ((X,), {"x": X, "target": X}, -1, "inputs ['x'] are given twice, by position and by name"),
    ((X,), {"z": X, "target": X}, -1, "no stage takes ['z']; from outside they take ['x']"),
    ((X, X), {"target": X}, -1, "2 inputs, expected at most ['x']"),
    ((X[:3],), {"target": X}, 0, FEW.format("'x': 3")),
    ((X,), {"target": X[:3]}, 3, FEW.format("'target': 3")),
    ((X[:0],), {"target": X}, 0, FEW.format("'x': 0")),
    ((X,), {}, 3, "the last stage's rank needs target= and a Scheduler with loss_fn="),
]


@pytest.mark.parametrize("is_first", [True, False])
def test_wrong_inputs_are_refused(is_first: bool) -> None:
    training = chain() if is_first else warm(chain())
    for args, kwargs, source, why in INPUTS:
        said = training.said(lambda: training.scheduler.step(*args, **kwargs))  # noqa: B023
        assert said.startswith(blamed(source, f"StepError: {why}"))
        assert is_first or training.is_right()
    assert training.is_right()


def test_another_batch_size_is_taken() -> None:
    training = chain()
    assert [rows for rows in (8, 12, 5, 8) if not training.is_right(rows=rows)] == []


def test_a_loss_must_be_there_and_have_one_element() -> None:
    missing = "StepError: the last stage's rank needs target= and a Scheduler with loss_fn="
    assert chain(loss_fn=None).step().startswith(blamed(3, missing))
    training = chain()

    def assert_refused(trick: Callable[[Any], object], what: str) -> None:
        training.loss_trick = trick
        why = f"StepError: loss_fn returned {what}"
        assert training.step().startswith(blamed(3, why))
        training.loss_trick = torch.sum

    for trick, what in ((lambda out: out, "tensor("), (lambda _: None, "None")):
        assert_refused(trick, what)
    assert_refused(lambda _: 1.0, "1.0")
    assert training.is_right()
    assert_refused(lambda out: out, "tensor(")
    assert training.is_right()


def test_a_loss_divisor_must_be_a_positive_finite_number() -> None:
    """Wrong on rank 1 alone, in a first step and in later ones."""
    training = chain()
    for _ in range(2):
        for divisor in (0.0, -1.0, float("inf"), float("nan")):
            said = training.step(loss_divisor=divisor if rank() == 1 else 1.0)
            why = f"StepError: loss_divisor is {divisor}, expected a number above 0"
            assert said == blamed(1, why)
        assert training.is_right()


def test_a_parameter_that_changed_is_refused_by_name_one_alike_is_taken() -> None:
    training = warm(chain())
    weight = training.module.weight

    def assert_refused(now: str) -> None:
        said = training.step()
        assert said.startswith(blamed(2, "StepError: '2.weight' was (2,)"))
        assert now in said

    weight.requires_grad_(rank() != 2)
    assert_refused("requires_grad=False")
    weight.requires_grad_()
    assert training.is_right()
    if rank() == 2:
        training.module.weight = nn.Parameter(torch.full((1,), 3.0))
    assert_refused("now it is (1,)")
    training.module.weight = nn.Parameter(weight.detach().clone())  # as good as the one before
    assert training.is_right()


# Two copies of two stages: ranks 0 and 1 have stage 0, ranks 2 and 3 stage 1.


def test_a_step_that_all_ranks_refuse_breaks_nothing() -> None:
    """Nothing is launched, so nothing is out of step."""
    training = warm(Training(Topology.create(pipeline=2), handlers=[DATA]))
    step = training.scheduler.step
    unknown = training.said(lambda: step(X, z=X, target=X))
    assert unknown.startswith("StepError: no stage takes ['z']")
    assert training.step() == "loss: 240.0"
    again = outcome(lambda: step(X, target=X))
    assert again.startswith("StepError: the gradient of ")
    assert "call optimizer.zero_grad()" in again
    assert training.step() == "loss: 240.0"


def freezes(training: Training) -> str:
    training.module.weight.requires_grad_(False)
    said = training.step()
    training.module.weight.requires_grad_()
    return said


@pytest.mark.parametrize(
    ("harm", "pipeline", "why"),
    [
        (freezes, 2, "StepError: '0.weight' was"),
        # No rank of its pipeline can tell the others in its place.
        (freezes, 1, "StepError: '0.weight' was"),
        (lambda training: training.step(rows=3), 2, "StepError: tensors of {'x': 3} rows"),
    ],
    ids=["a parameter", "a parameter without a pipeline", "an input"],
)
def test_a_rank_that_refuses_late_ends_those_that_wait_for_its_bucket(
    harm: Callable[[Training], str], pipeline: int, why: str
) -> None:
    """By itself: not by taking its next step, which it may never do.

    Rank 1 refuses its step when the others have computed theirs, and wait for its bucket.
    """
    training = warm(Training(Topology.create(pipeline=pipeline), handlers=[DATA]))
    board = Board(f"{why} {pipeline}")
    if rank() == 1:
        time.sleep(0.5)
        assert harm(training).startswith(why)
        for other in (0, 2, 3):
            assert board.wait(f"{other}", ENDED) == b"ended"
    else:
        said = training.step()
        board.post(f"{rank()}", b"ended")
        assert said.startswith(TOO_LATE) or f"rank 1: {why}" in said
    assert training.step() == ("loss: 120.0" if pipeline == 1 else "loss: 240.0")
