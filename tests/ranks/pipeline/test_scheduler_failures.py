"""What fails on one rank of a pipeline is every rank's error, soon, and names where it was."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Topology
from pipegrad.comm.agreement import Board, store
from pipegrad.errors import StepError
from pipegrad.testing import run_ranks
from tests.support.gradients.cases import DATA, outcome, rank
from tests.support.pipeline.layers import blamed
from tests.support.pipeline.scales import (
    ELSEWHERE,
    NUM_STAGES,
    TOO_LATE,
    WIDTH,
    FailsInBackward,
    Training,
    Trick,
    chain,
    fails_in_backward,
    fails_in_forward,
    warm,
)

# Values that are not what they were. Shape and dtype may change: see test_shapes.py.

DETACHED = "float32 [2, 2] without gradient, and was float32 [2, 2] with gradient"


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("change", "stage", "why"),
    [
        (torch.Tensor.detach, 1, f"StepError: stage 1, microbatch 2: 'x' is {DETACHED}"),
        (
            lambda out: torch.cat((out, out), 1)[:, :3],
            2,
            "RuntimeError: The size of tensor a (3) must match",
        ),
    ],
    ids=["requires_grad", "width"],
)
def test_a_value_that_a_stage_cannot_take_is_refused_by_name_on_all_ranks(
    change: Trick, stage: int, why: str
) -> None:
    """In the first step, in which shapes are learned, and later."""
    training = chain()
    for _ in range(2):
        said = training.trick(1, 2, change)
        assert said.startswith(blamed(stage, why))
        assert said.endswith(f"In {stage}F2 on pipeline rank {stage}.")
        warm(training)


def assert_told(said: str, action: str, *, is_first: bool) -> None:
    """Asserts what is raised if an action has failed."""
    stage = int(action[0])
    why = f"OSError: no space left In {action} on pipeline rank {stage}."
    if said.startswith(TOO_LATE):  # may have ended before a backward of a stage before it
        assert not is_first  # nobody ends a first step before all have
        assert "B" in action
        assert rank() > stage
    else:
        assert said == blamed(stage, why)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_stage_raises_the_others_tell_with_rank_and_action(is_first: bool) -> None:
    training = chain() if is_first else warm(chain())
    for stage in (0, 2, 3):
        for kind, microbatch, trick in (
            ("F", 0, fails_in_forward),
            ("F", 2, fails_in_forward),
            ("B", 1, fails_in_backward),
            ("B", 3, fails_in_backward),
        ):
            said = training.trick(stage, microbatch, trick)
            assert_told(said, f"{stage}{kind}{microbatch}", is_first=is_first)
            assert is_first or training.is_right()

    def bad_loss(_out: Tensor) -> object:
        raise OSError("no space left")

    training.loss_trick = bad_loss
    assert_told(training.step(), "3F0", is_first=is_first)
    training.loss_trick = torch.sum
    assert training.is_right()


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
    assert_told(training.step(), "1F2", is_first=True)
    training.module.trick = None
    assert training.is_right()


def refuses_zeros(out: Tensor) -> Tensor:
    if not out.any():
        raise ZeroDivisionError("nothing but zeros")
    return out


@pytest.mark.ranks(4)
def test_failures_in_an_evaluation_or_behind_a_launch_leave_all_in_place() -> None:
    """Wrong in the first evaluation and in a later one; steps in between are right."""
    training = chain()
    evaluate, x = training.scheduler.evaluate, torch.ones(4, WIDTH)
    assert training.is_right()
    for _ in range(2):
        training.module.trick = (3, fails_in_forward) if rank() == 2 else None
        raised = training.said(lambda: evaluate(x, target=x))
        training.module.trick = None
        # Nobody sends back: those before it may have ended by then.
        if rank() >= 2 or not raised.startswith(TOO_LATE):
            assert_told(raised, "2F3", is_first=True)
        missing = training.said(lambda: evaluate(target=x))
        assert missing.startswith(blamed(0, "StepError: inputs ['x'] are missing"))
        fine = training.said(lambda: evaluate(x, target=x, loss_divisor=1.0))
        assert fine == "loss: 192.0"
        assert training.module.training
        assert training.is_right()
    # A failure behind a launch is an error now and all go on. Two copies of two stages: ranks 0 and
    # 1 have stage 0, ranks 2 and 3 stage 1. Rank 0 fails in the last backward; the bucket of stage
    # 1 has been launched long ago.
    training = warm(Training(Topology.create(pipeline=2), handlers=[DATA]))
    if rank() == 0:
        training.module.trick = 3, fails_in_backward
    failed = training.step()
    training.module.trick = None
    why = "OSError: no space left In 0B3 on pipeline rank 0."
    if failed.startswith(TOO_LATE):
        assert rank() in (2, 3)
        assert failed.endswith(f"rank 0: {why}")
    else:
        assert failed == (f"{ELSEWHERE}rank 0: {why}" if rank() else why)
    warm(training)


def one_is_killed() -> None:
    """The others raise by themselves: else the run ends by its time-out, and says who was late."""
    training = warm(chain())
    raise StepError(training.trick(1, 2, lambda out: os._exit(9)))


def test_a_rank_that_is_killed_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipegrad.testing.ranks.GRACE_SECONDS", 60.0)
    with pytest.raises(RuntimeError, match="rank 1 ended without a result: exit code 9") as caught:
        run_ranks(one_is_killed, NUM_STAGES)
    notes = "\n".join(caught.value.__notes__)
    assert [r for r in (0, 2, 3) if f"Then on rank {r}: " not in notes] == []
    assert "Killed" not in notes
    assert "loss: " not in notes


# A step that cannot be taken is refused on every rank, and leaves everything in place.


ENDED = timedelta(seconds=60)  # for ranks to end by themselves
X = torch.ones(8, WIDTH)


FEW = "tensors of {{{}}} rows cannot be cut into 4 microbatches"
INPUTS: list[tuple[tuple[Any, ...], dict[str, Any], int, str]] = [
    # Given to a step, by position and by name; the rank that says why, -1 for all.
    ((), {"target": X}, 0, "inputs ['x'] are missing, which stages of this rank take"),
    ((X,), {"x": X, "target": X}, -1, "inputs ['x'] are given twice, by position and by name"),
    ((X,), {"z": X, "target": X}, -1, "no stage takes ['z']; from outside they take ['x']"),
    ((X, X), {"target": X}, -1, "2 inputs, expected at most ['x']"),
    ((X,), {"target": X[:3]}, 3, FEW.format("'target': 3")),
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
def test_losses_divisors_and_batches_are_taken_or_refused() -> None:
    training = chain()
    assert [rows for rows in (8, 12, 5, 8) if not training.is_right(rows=rows)] == []
    # A loss must be there and have one element.
    missing = "StepError: the last stage's rank needs a Scheduler with loss_fn="
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
    # A loss divisor must be a positive finite number. Wrong on rank 1 alone, in a first step and in
    # later ones.
    training = chain()
    for _ in range(2):
        for divisor in (0.0, -1.0, float("inf"), float("nan")):
            said = training.step(loss_divisor=divisor if rank() == 1 else 1.0)
            why = f"StepError: loss_divisor is {divisor}, expected a number above 0"
            assert said == blamed(1, why)
        assert training.is_right()


@pytest.mark.ranks(4)
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
