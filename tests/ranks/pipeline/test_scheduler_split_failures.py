"""Split backward that fails: all ranks tell where, and nobody hangs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.gradients.cases import SHARED, rank
from tests.support.pipeline import scales
from tests.support.pipeline.layers import blamed
from tests.support.pipeline.schedulers import topology

pytestmark = pytest.mark.ranks(4)


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

    def __init__(self, **options: Any) -> None:
        with mock.patch.object(scales, "Scale", Diagonal):
            super().__init__(topology(4), **{"schedule": "zb-h1", **options})

    @property
    def diagonal(self) -> Diagonal:
        assert isinstance(self.module, Diagonal)
        return self.module

    def fails(
        self, stage: int, microbatch: int, trick: Any = scales.fails_in_backward, *, on_weight: bool
    ) -> str:
        self.diagonal.on_weight = on_weight
        return self.trick(stage, microbatch, trick)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_split_backward_raises_all_tell_with_rank_and_action(is_first: bool) -> None:
    training = Training()
    if not is_first:
        scales.warm(training)
    for stage in (0, 1, 3):
        for kind in "IW":
            for microbatch in (0, 2):
                said = training.fails(stage, microbatch, on_weight=kind == "W")
                where = f"{stage}{kind}{microbatch} on pipeline rank {stage}."
                if said.startswith(scales.TOO_LATE):  # it had ended its step
                    assert not is_first
                    assert rank() != stage
                else:
                    assert said == blamed(stage, f"OSError: no space left In {where}")
                assert is_first or training.is_right()


def test_an_operand_that_is_changed_before_its_product_is_refused() -> None:
    """On rank 3 a forward changes what the weight was multiplied with in the one before it."""
    training = Training()
    assert training.is_right()

    def change(out: Tensor) -> Tensor:
        assert training.diagonal.operand is not None
        training.diagonal.operand.add_(1)
        return out

    said = training.fails(3, 1, change, on_weight=False)
    why = "StepError: what a weight of shape (2,) was multiplied with, of shape (2, 2)"
    if rank() == 3:
        assert said.startswith(why)
        assert "changed in place" in said
        assert said.endswith(" In 3W0 on pipeline rank 3.")
    else:
        assert said.startswith((scales.TOO_LATE, blamed(3, why)))
    assert training.is_right()


def test_a_tied_head_that_fails_ahead_of_its_turn_says_where() -> None:
    """Its products are computed ahead of their turn."""
    schedule = {"name": "zb-h1", "head_w_first": True}
    tie = [{0: "weight", 3: "weight"}]
    said = Training(schedule=schedule, tied=tie, handlers=[SHARED]).fails(3, 3, on_weight=True)
    assert "OSError: no space left" in said
    assert "on pipeline rank 3." in said
