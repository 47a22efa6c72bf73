"""Split backward that fails: all ranks tell where, and nobody hangs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.gradients.cases import SHARED, Case, Replies, on, replies
from tests.support.pipeline import scales
from tests.support.pipeline.schedulers import (
    topology,
)

FOUR: list[Case] = []
four = replies(4, FOUR)


class Diagonal(scales.Scale):
    """Multiplies by a matrix, so that the weight's gradient waits; tricks may be on the weight."""

    on_weight = False
    operand: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        trick, microbatch = self.trick, self.calls % scales.NUM_MICROBATCHES
        self.calls += 1
        weight, operand = self.weight, x.clone()
        plays = trick is not None and trick[0] == microbatch
        if plays and self.on_weight:
            weight = trick[1](weight)  # type: ignore[index,assignment]
        out = operand @ torch.diag(weight)
        if plays and not self.on_weight:
            out = trick[1](out)  # type: ignore[index]
        self.operand = operand.detach()
        return out


class Training(scales.Training):
    """One rank of a pipeline of `Diagonal`s."""

    @property
    def diagonal(self) -> Diagonal:
        assert isinstance(self.module, Diagonal)
        return self.module

    def fails(self, stage: int, microbatch: int, trick: Any, *, on_weight: bool) -> str:
        self.diagonal.on_weight = on_weight
        return self.trick(stage, microbatch, trick)


def chain(**options: Any) -> Training:
    with mock.patch.object(scales, "Scale", Diagonal):
        return Training(topology(4), **options)


FAILURES = {
    f"{stage}{kind}{microbatch}": (stage, microbatch, kind == "W")
    for stage in (0, 1, 3)
    for kind in "IW"
    for microbatch in (0, 2)
}


def failures(training: Training, *, recovers: bool) -> Any:
    found = {}
    for action, (stage, microbatch, on_weight) in FAILURES.items():
        said = training.fails(stage, microbatch, scales.fails_in_backward, on_weight=on_weight)
        found[action] = said, not recovers or training.is_right()
    return found


@on(FOUR)
def raise_at_first() -> Any:
    return failures(chain(schedule="zb-h1"), recovers=False)


@on(FOUR)
def raise_later() -> Any:
    training = chain(schedule="zb-h1")
    return [training.is_right(), training.is_right()], failures(training, recovers=True)


@pytest.mark.parametrize("action", FAILURES)
def test_what_a_split_backward_raises_all_tell_with_rank_and_action(
    action: str, four: Replies
) -> None:
    stage = int(action[0])
    why = f"OSError: no space left In {action} on pipeline rank {stage}."
    warm, later = zip(*scales.told(four, "raise_later"), strict=True)
    assert list(warm) == [[True, True]] * 4
    for first in (True, False):
        for place, found in enumerate(scales.told(four, "raise_at_first") if first else later):
            said, right_afterwards = found[action]
            if place == stage:
                assert said == why
            elif said.startswith(scales.TOO_LATE):  # it had ended its step
                assert not first
            else:
                assert said == f"{scales.ELSEWHERE}rank {stage}: {why}"
            assert right_afterwards


@on(FOUR)
def changed_in_place() -> Any:
    """On rank 3 a forward changes what the weight was multiplied with in the one before it."""
    training = chain(schedule="zb-h1")
    assert training.is_right()

    def change(out: Tensor) -> Tensor:
        assert training.diagonal.operand is not None
        training.diagonal.operand.add_(1)
        return out

    return training.fails(3, 1, change, on_weight=False), training.is_right()


def test_an_operand_that_is_changed_before_its_product_is_refused(four: Replies) -> None:
    why = "StepError: what a weight of shape (2,) was multiplied with, of shape (2, 2)"
    for place, (said, right_afterwards) in enumerate(scales.told(four, "changed_in_place")):
        if place == 3:
            assert said.startswith(why)
            assert "changed in place" in said
            assert said.endswith(" In 3W0 on pipeline rank 3.")
        else:
            assert said.startswith((scales.TOO_LATE, f"{scales.ELSEWHERE}rank 3: {why}"))
        assert right_afterwards


@on(FOUR)
def shared_weights_fail() -> Any:
    """The tied head's products are computed ahead of their turn."""
    shared = {"tied": [{0: "weight", 3: "weight"}], "handlers": [SHARED]}
    training = chain(schedule={"name": "zb-h1", "head_w_first": True}, **shared)
    return training.fails(3, 3, scales.fails_in_backward, on_weight=True)


def test_a_tied_head_that_fails_ahead_of_its_turn_says_where(four: Replies) -> None:
    for place, said in enumerate(scales.told(four, "shared_weights_fail")):
        assert "OSError: no space left" in said
        assert "on pipeline rank 3." in said, (place, said)
