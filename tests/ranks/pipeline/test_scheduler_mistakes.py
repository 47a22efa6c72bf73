"""What users do by mistake, and modules do by habit: right numbers, or an error on all ranks."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.gradients.cases import outcome, rank
from tests.support.pipeline.layers import WIDTH, Layer, make, mean_square, train

ROWS, LARGE = 4, 200_000
ONES = torch.ones(ROWS, WIDTH, dtype=torch.float64)
pytestmark = pytest.mark.ranks(2)


class Counts(nn.Module):
    """Returns a buffer that it changes in place, while what it returned is still to be sent."""

    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.register_buffer("n", torch.zeros(1, LARGE))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.n += 1
        return x * self.weight, self.n


class Uses(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return x * n[:, :WIDTH]


def test_a_buffer_is_handed_on_as_it_was() -> None:
    names = {0: (["x"], ["x", "n"]), 1: (["x", "n"], ["x"])}
    options: Any = {"schedule": "gpipe", "loss_fn": lambda out, target: (out * target).sum()}
    scheduler = make(Counts(), Uses(), names=names, **options)
    # Microbatches of a row of three, counted 1 to 4, then 5 to 8.
    losses = [train(scheduler, ONES, target=ONES, loss_divisor=1.0) for _ in range(2)]
    assert losses == [30.0, 78.0]
    scheduler.close()
    scheduler.close()


def test_a_loss_without_a_graph_is_refused_on_all_ranks() -> None:
    says = "the loss does not depend on anything that requires a gradient"
    detached: Any = lambda out, target: mean_square(out.detach(), target)  # noqa: E731
    with closing(make(Layer(), Layer(), loss_fn=detached)) as scheduler:
        assert says in outcome(partial(train, scheduler, ONES, target=ONES))
    with closing(make(Layer(), Layer())) as scheduler, torch.no_grad():
        assert says in outcome(partial(train, scheduler, ONES, target=ONES))


def test_what_differs_between_ranks_is_told_to_all() -> None:
    step, divisor = partial(train, target=ONES), {"loss_divisor": 1.0 + rank()}
    mean: Any = lambda out, target: (out.mean() - target).square().sum()  # noqa: E731
    with closing(make(Layer(), Layer(), loss_fn=mean)) as scheduler:
        said = outcome(partial(step, scheduler, torch.cat([ONES, ONES])))
        assert "ranks disagree on how many rows their tensors have" in said
    with closing(make(Layer(), Layer())) as scheduler:
        said = outcome(partial(step, scheduler, ONES, **divisor))
        assert "ranks disagree on loss_divisor" in said
    with closing(make(Layer(), Layer())) as scheduler:
        assert step(scheduler, ONES) > 0
        said = outcome(partial(step, scheduler, ONES, **divisor))
        assert "loss_divisor differs between the 2 ranks" in said
    with closing(make(Layer(), Layer())) as scheduler:
        said = outcome(partial(step, scheduler, ONES, loss_divisor="x" if rank() else 1.0))
        assert "could not convert string to float: 'x'" in said


def test_losses_may_have_any_shape_of_one_element() -> None:
    shapes = [(), (1,), (1, 1), ()] * 2
    shaped: Any = lambda *given: mean_square(*given).reshape(shapes.pop(0))  # noqa: E731
    found = []
    for loss_fn in (mean_square, shaped):
        with closing(make(Layer(), Layer(), loss_fn=loss_fn)) as scheduler:
            found.append([train(scheduler, ONES, target=ONES) for _ in range(2)])
    assert found[0] == found[1]


def test_empty_tensors_cross() -> None:
    def take(linear: nn.Module, x: Tensor, nothing: Tensor) -> Any:
        assert nothing.numel() == 0
        return linear(x).tanh()

    give: Any = lambda linear, x: (linear(x).tanh(), torch.empty(0))  # noqa: E731
    names = {0: (["x"], ["x", "nothing"]), 1: (["x", "nothing"], ["x"])}
    loss = float(mean_square(Layer()(Layer()(ONES)), ONES))
    with closing(make(Layer(give), Layer(take), names=names)) as scheduler:
        for _ in range(3):
            assert abs(train(scheduler, ONES, target=ONES) - loss) < 1e-6  # it is float32


def test_evaluation_in_inference_mode_spoils_no_step() -> None:
    with closing(make(Layer(), Layer())) as scheduler:
        for _ in range(2):
            with torch.inference_mode():
                evaluated = float(scheduler.evaluate(ONES, target=ONES).loss)
            assert train(scheduler, ONES, target=ONES) == evaluated > 0


def test_a_refusal_behind_an_accumulated_step_is_told() -> None:
    """Rank 1 is refused alone, while rank 0 waits for its bucket: no rank of its pipeline helps."""
    with closing(make(Layer())) as scheduler:
        with scheduler.sync.accumulate():
            assert train(scheduler, ONES, target=ONES) > 0
        time.sleep(0.5 * rank())
        given = ONES[:1] if rank() else ONES
        said = outcome(partial(train, scheduler, given, target=given))
        assert said.startswith("StepError: tensors of") or rank() == 0
        assert "StepError: tensors of" in said
        assert "rank 1: " in said or rank() == 1
