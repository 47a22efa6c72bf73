"""What fails on one rank of a pipeline is every rank's error, soon, and names where it was."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from pipegrad import Topology
from pipegrad.errors import StepError
from pipegrad.testing import run_ranks
from tests.support.gradients.cases import DATA, Case, Replies, on, rank, replies
from tests.support.pipeline.scales import (
    ELSEWHERE,
    NUM_STAGES,
    SECONDS,
    TOO_LATE,
    WIDTH,
    FailsInBackward,
    Training,
    Trick,
    chain,
    fails_in_backward,
    fails_in_forward,
    told,
    warm,
)

PIPELINE: list[Case] = []
pipeline = replies(4, PIPELINE)


# Values that are not what they were. Shape and dtype may change: see test_shapes.py.

CHANGES: dict[str, Trick] = {
    "requires_grad": torch.Tensor.detach,
    "width": lambda out: torch.cat((out, out), 1)[:, :3],
}
DETACHED = "float32 [2, 2] without gradient, and was float32 [2, 2] with gradient"
NOW = {
    "requires_grad": (1, f"StepError: stage 1, microbatch 2: 'x' is {DETACHED}"),
    "width": (2, "RuntimeError: The size of tensor a (3) must match"),
}


@on(PIPELINE)
def changes_at_first() -> Any:
    """No step ends well before the last, so each is the first, in which shapes are learned."""
    training = chain()
    said = {name: training.trick(1, 2, change) for name, change in CHANGES.items()}
    right_afterwards = training.is_right()
    return {name: (words, right_afterwards) for name, words in said.items()}


@on(PIPELINE)
def changes_later() -> Any:
    training = warm(chain())
    return {
        name: (training.trick(1, 2, change), training.is_right())
        for name, change in CHANGES.items()
    }


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("case", ["changes_at_first", "changes_later"])
def test_a_value_that_a_stage_cannot_take_is_refused_by_name_on_all_ranks(
    case: str, change: str, pipeline: Replies
) -> None:
    stage, why = NOW[change]
    for place, answers in enumerate(told(pipeline, case)):
        said, right_afterwards = answers[change]
        assert said.startswith(why if place == stage else f"{ELSEWHERE}rank {stage}: {why}")
        assert said.endswith(f"In {stage}F2 on pipeline rank {stage}.")
        assert right_afterwards


# Stages that raise.


FAILURES = {
    f"{stage}{kind}{microbatch}": (stage, microbatch, trick)
    for stage in (0, 2, 3)
    for kind, microbatch, trick in (
        ("F", 0, fails_in_forward),
        ("F", 2, fails_in_forward),
        ("B", 1, fails_in_backward),
        ("B", 3, fails_in_backward),
    )
}


def bad_loss(_out: Tensor) -> object:
    raise OSError("no space left")


def failures(training: Training, *, recovers: bool) -> dict[str, tuple[str, bool]]:
    found = {}
    for action, (stage, microbatch, trick) in FAILURES.items():
        said = training.trick(stage, microbatch, trick)
        found[action] = said, not recovers or training.is_right()
    training.loss_trick = bad_loss
    said = training.step()
    training.loss_trick = torch.sum
    found["loss"] = said, training.is_right()
    return found


@on(PIPELINE)
def raise_at_first() -> Any:
    return failures(chain(), recovers=False)


@on(PIPELINE)
def raise_later() -> Any:
    return failures(warm(chain()), recovers=True)


@pytest.mark.parametrize("action", [*FAILURES, "loss"])
@pytest.mark.parametrize("case", ["raise_at_first", "raise_later"])
def test_what_a_stage_raises_the_others_tell_with_rank_and_action(
    case: str, action: str, pipeline: Replies
) -> None:
    stage = 3 if action == "loss" else int(action[0])
    place = "3F0" if action == "loss" else action
    why = f"OSError: no space left In {place} on pipeline rank {stage}."
    for here, found in enumerate(told(pipeline, case)):
        said, right_afterwards = found[action]
        if here == stage:
            assert said == why
        elif said.startswith(TOO_LATE):  # may have ended before a backward of a stage before it
            assert case == "raise_later"  # nobody ends a first step before all have
            assert "B" in action
            assert here > stage
        else:
            assert said == f"{ELSEWHERE}rank {stage}: {why}"
        assert right_afterwards


@on(PIPELINE)
def ended_before() -> Any:
    """Stage 0 is slow to fail in its last backward: all others have ended their step by then."""
    training = warm(chain())
    last = training.trick(0, 3, SlowToFail.apply)
    return last, training.is_right()


class SlowToFail(FailsInBackward):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(2.0)
        raise OSError("no space left")


def test_the_loss_raises_where_the_step_had_ended_before_it_failed(
    pipeline: Replies,
) -> None:
    answers = told(pipeline, "ended_before")
    own = "OSError: no space left In 0B3 on pipeline rank 0."
    late = f"{TOO_LATE}the step failed on another rank after this one had ended it: rank 0: {own}"
    assert answers == [(own, True), (late, True), (late, True), (late, True)]


@on(PIPELINE)
def raises_at_zeros() -> Any:
    """Stage 3 too raises something: at what it gets for what stage 1 has not computed."""
    training = warm(chain())
    tricks = {1: fails_in_forward, 3: refuses_zeros}
    training.module.trick = (2, tricks[training.stage]) if training.stage in tricks else None
    said = training.step()
    training.module.trick = None
    return said, training.is_right()


def refuses_zeros(out: Tensor) -> Tensor:
    if not out.any():
        raise ZeroDivisionError("nothing but zeros")
    return out


def test_what_a_stage_raises_because_another_rank_failed_is_not_what_is_told(
    pipeline: Replies,
) -> None:
    why = "OSError: no space left In 1F2 on pipeline rank 1."
    for place, answer in enumerate(told(pipeline, "raises_at_zeros")):
        assert answer == (why if place == 1 else f"{ELSEWHERE}rank 1: {why}", True)


# Evaluations.


@on(PIPELINE)
def evaluations() -> Any:
    """Wrong in the first evaluation and in a later one; steps in between are right."""
    training = chain()
    evaluate, x = training.scheduler.evaluate, torch.ones(4, WIDTH)
    answers: list[Any] = [training.is_right()]
    for _ in range(2):
        if training.stage == 2:
            training.module.trick = 3, fails_in_forward
        answers += [training.said(lambda: evaluate(x, target=x))]
        training.module.trick = None
        answers += [training.said(lambda: evaluate(target=x))]
        answers += [training.said(lambda: evaluate(x, target=x, loss_divisor=1.0))]
        answers += [training.module.training, training.is_right()]
    return answers


def test_an_evaluation_that_fails_leaves_everything_in_place(
    pipeline: Replies,
) -> None:
    for place, answers in enumerate(told(pipeline, "evaluations")):
        assert answers.pop(0)
        for raised, missing, *ends in (answers[:5], answers[5:]):
            why = "OSError: no space left In 2F3 on pipeline rank 2."
            if place == 2:
                assert raised == why
            else:  # nobody sends back: those before it may have ended by then
                assert raised == f"{ELSEWHERE}rank 2: {why}" or (
                    place < 2 and raised.startswith(TOO_LATE)
                )
            why = "StepError: inputs ['x'] are missing"
            assert missing.startswith(why if place == 0 else f"{ELSEWHERE}rank 0: {why}")
            assert ends == ["loss: 192.0", True, True]


# Two copies of two stages: ranks 0 and 1 have stage 0, ranks 2 and 3 stage 1.


@on(PIPELINE)
def after_a_launch() -> Any:
    """Rank 0 fails in the last backward; the bucket of stage 1 has been launched long ago."""
    training = warm(Training(Topology.create(pipeline=2), handlers=[DATA]))
    if rank() == 0:
        training.module.trick = 3, fails_in_backward
    failed = training.step()
    training.module.trick = None
    return failed, training.is_right(), training.is_right()


def test_a_failure_behind_a_launch_is_an_error_now_and_all_go_on(
    pipeline: Replies,
) -> None:
    """Issue 16, point 10: such a failure was final, on some ranks by a time-out."""
    why = "OSError: no space left In 0B3 on pipeline rank 0."
    for place, (failed, *afterwards) in enumerate(told(pipeline, "after_a_launch")):
        if place == 0:
            assert failed == why
        elif failed.startswith(TOO_LATE):
            assert place in (2, 3)
            assert failed.endswith(f"rank 0: {why}")
        else:
            assert failed == f"{ELSEWHERE}rank 0: {why}"
        assert afterwards == [True, True]


# A rank that is gone.


def one_is_killed() -> None:
    """The others raise, or the test fails: they would be killed by and by."""
    training = warm(chain())
    raise StepError(training.trick(1, 2, lambda out: os._exit(9)))


def test_a_rank_that_is_killed_ends_the_others() -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 ended without a result: exit code 9") as caught:
        run_ranks(one_is_killed, NUM_STAGES)
    notes = "\n".join(caught.value.__notes__)
    assert time.monotonic() - began < SECONDS
    assert [r for r in (0, 2, 3) if f"Then on rank {r}: " not in notes] == []
    assert "Killed" not in notes
    assert "loss: " not in notes
