"""What an evaluation, an input or a changed parameter does wrong is one error on all ranks, soon.

What stages, losses, codecs, hooks and transfers raise: test_scheduler_recovery.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Topology
from pipegrad.comm.store import store
from tests.support.gradients.cases import DATA, outcome, rank
from tests.support.pipeline.layers import blamed
from tests.support.pipeline.scales import (
    TOO_LATE,
    WIDTH,
    FailsInBackward,
    Training,
    chain,
    fails_in_forward,
    warm,
)


class FailsBehindOthers(FailsInBackward):
    """Fails when all other ranks have returned from the step."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        store().wait([f"returned {other}" for other in (1, 2, 3)], timedelta(seconds=60))
        raise OSError("no space left")


@pytest.mark.ranks(4)
def test_the_first_cause_is_told_also_when_others_had_ended_or_fail_too() -> None:
    training, x = warm(chain()), torch.ones(8, WIDTH)

    def step() -> Any:
        result = training.scheduler.step(x, target=x)
        store().set(f"returned {rank()}", "")
        return result

    training.module.trick = (3, FailsBehindOthers.apply) if rank() == 0 else None
    said = training.said(step)
    training.module.trick = None
    own = "OSError: no space left In 0B3 on pipeline rank 0."
    late = f"{TOO_LATE}the step failed on another rank after this one had ended it: rank 0: {own}"
    assert said == (late if rank() else own)
    assert training.is_right()
    # What a stage raises because another rank failed is not what is told. Stage 3 too raises
    # something: at what it gets for what stage 1 has not computed.
    training = warm(chain())
    tricks = {1: fails_in_forward, 3: refuses_zeros}
    training.module.trick = (2, tricks[training.stage]) if training.stage in tricks else None
    assert training.step() == blamed(1, "OSError: no space left In 1F2 on pipeline rank 1.")
    training.module.trick = None
    assert training.is_right()


def refuses_zeros(out: Tensor) -> Tensor:
    if not out.any():
        raise ZeroDivisionError("nothing but zeros")
    return out


@pytest.mark.ranks(4)
def test_failures_in_an_evaluation_leave_all_in_place() -> None:
    """Wrong in the first evaluation and in a later one; steps in between are right."""
    training = chain()
    evaluate, x = training.scheduler.evaluate, torch.ones(4, WIDTH)
    assert training.is_right()
    for _ in range(2):
        training.module.trick = (3, fails_in_forward) if rank() == 2 else None
        raised = training.said(lambda: evaluate(x, target=x))
        training.module.trick = None
        # Nobody sends back: those before it may have ended by then.
        why = blamed(2, "OSError: no space left In 2F3 on pipeline rank 2.")
        assert raised == why or (rank() < 2 and raised.startswith(TOO_LATE))
        missing = training.said(lambda: evaluate(target=x))
        assert missing.startswith(blamed(0, "StepError: inputs ['x'] are missing"))
        fine = training.said(lambda: evaluate(x, target=x, loss_divisor=1.0))
        assert fine == "loss: 192.0"
        assert training.module.training
        assert training.is_right()


# A step that cannot be taken is refused on every rank, and leaves everything in place.


ENDED = timedelta(seconds=60)  # for ranks to end by themselves
X = torch.ones(8, WIDTH)


INPUTS: list[tuple[tuple[Any, ...], dict[str, Any], int, str]] = [
    # Given to a step, by position and by name; the rank that says why, -1 for all.
    ((), {"target": X}, 0, "inputs ['x'] are missing, which stages of this rank take"),
    ((X,), {"x": X, "target": X}, -1, "inputs ['x'] are given twice, by position and by name"),
    ((X,), {"target": X[:3]}, 3, "tensors of {'target': 3} rows cannot be cut into 4"),
    ((X,), {}, 3, "the last stage's rank needs target=, which loss_fn compares"),
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("is_first", [True, False])
def test_wrong_inputs_are_refused(is_first: bool) -> None:
    training = chain() if is_first else warm(chain())
    for args, kwargs, source, why in INPUTS:
        said = training.said(lambda: training.scheduler.step(*args, **kwargs))  # noqa: B023
        assert said.startswith(blamed(source, f"StepError: {why}"))
        assert is_first or training.is_right()
    assert training.is_right()


@pytest.mark.ranks(4)
def test_a_loss_and_a_divisor_that_are_none_are_refused() -> None:
    """A divisor is a positive finite number. It is wrong on rank 1 alone, at first and later."""
    missing = "StepError: the last stage's rank needs a Scheduler with loss_fn="
    assert chain(loss_fn=None).step().startswith(blamed(3, missing))
    training = chain()
    for _ in range(2):
        for divisor in (0.0, -1.0, float("inf"), float("nan")):
            said = training.step(loss_divisor=divisor if rank() == 1 else 1.0)
            why = f"StepError: loss_divisor is {divisor}, expected a number above 0"
            assert said == blamed(1, why)
        assert training.is_right()


@pytest.mark.ranks(4)
def test_a_parameter_that_changed_is_refused_by_name() -> None:
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
    training.module.weight = weight
    assert training.is_right()
    # A step that all ranks refuse breaks nothing. Nothing is launched, so nothing is out of step.
    training = warm(Training(Topology.create(pipeline=2), handlers=[DATA]))
    step = training.scheduler.step
    unknown = training.said(lambda: step(X, z=X, target=X))
    assert unknown.startswith("StepError: no stage takes ['z']")
    assert training.step() == "loss: 240.0"
    again = outcome(lambda: step(X, target=X))
    assert again.startswith("StepError: the gradient of ")
    assert "call optimizer.zero_grad()" in again
    assert training.step() == "loss: 240.0"


# Two copies of two stages: ranks 0 and 1 have stage 0, ranks 2 and 3 stage 1.


def freezes(training: Training) -> str:
    training.module.weight.requires_grad_(False)
    said = training.step()
    training.module.weight.requires_grad_()
    return said


@pytest.mark.ranks(4)
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
    key = f"{why} {pipeline}"
    if rank() == 1:
        time.sleep(0.5)
        assert harm(training).startswith(why)
        store().wait([f"{key} {other}" for other in (0, 2, 3)], ENDED)
    else:
        said = training.step()
        store().set(f"{key} {rank()}", b"ended")
        assert said.startswith(TOO_LATE) or f"rank 1: {why}" in said
    assert training.step() == ("loss: 120.0" if pipeline == 1 else "loss: 240.0")
