"""What fails on one rank of a pipeline is every rank's error, soon, and names where it was."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from pipegrad import Topology
from pipegrad.comm.agreement import store
from pipegrad.errors import StepError
from pipegrad.testing import run_ranks
from tests.support.gradients.cases import DATA, rank
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

ranks = pytest.mark.ranks(4)


# Values that are not what they were. Shape and dtype may change: see test_shapes.py.

DETACHED = "float32 [2, 2] without gradient, and was float32 [2, 2] with gradient"


@ranks
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


@ranks
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


@ranks
def test_the_loss_raises_where_the_step_had_ended_before_it_failed() -> None:
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


def refuses_zeros(out: Tensor) -> Tensor:
    if not out.any():
        raise ZeroDivisionError("nothing but zeros")
    return out


@ranks
def test_what_a_stage_raises_because_another_rank_failed_is_not_what_is_told() -> None:
    """Stage 3 too raises something: at what it gets for what stage 1 has not computed."""
    training = warm(chain())
    tricks = {1: fails_in_forward, 3: refuses_zeros}
    training.module.trick = (2, tricks[training.stage]) if training.stage in tricks else None
    assert_told(training.step(), "1F2", is_first=True)
    training.module.trick = None
    assert training.is_right()


@ranks
def test_an_evaluation_that_fails_leaves_everything_in_place() -> None:
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


@ranks
def test_a_failure_behind_a_launch_is_an_error_now_and_all_go_on() -> None:
    """Two copies of two stages: ranks 0 and 1 have stage 0, ranks 2 and 3 stage 1. Rank 0 fails in
    the last backward; the bucket of stage 1 has been launched long ago.
    """
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
