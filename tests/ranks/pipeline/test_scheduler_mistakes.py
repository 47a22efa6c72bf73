"""What users do by mistake, and modules do by habit: right numbers, or an error on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology
from tests.support.gradients.cases import outcome, rank

ROWS, LARGE = 4, 200_000
pytestmark = pytest.mark.ranks(2)


class Scale(nn.Module):
    """A stage of one weight; returns what a function makes of its product."""

    def __init__(self, function: Callable[..., Any] = lambda x: x, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), start or 2.0 + rank()))
        self.function = function

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        return self.function(x * self.weight, *more)


def loss(out: Tensor, target: Tensor) -> Tensor:
    return (out * target).sum()


def make(module: nn.Module | None = None, *, pipeline: int = 2, **options: Any) -> Scheduler:
    names = {key: options.pop(key) for key in ("inputs", "outputs") if key in options}
    options = {"loss_fn": loss, "handlers": ["noop"], **options}
    return Scheduler(
        [Stage(module or Scale(), rank() if pipeline == 2 else 0, **names)],
        Topology.create(pipeline=pipeline),
        schedule="gpipe",
        num_microbatches=2,
        **options,
    )


def batch(rows: int = ROWS) -> Tensor:
    return torch.ones(rows, 2)


def train(scheduler: Scheduler, rows: int = ROWS, **options: Any) -> str:
    """Takes a step from gradients of None; returns the loss, or the error."""
    for record in scheduler.sync.records():
        scheduler.sync.parameter(record).grad = None
    options = {"target": batch(rows), **options}
    return outcome(lambda: float(scheduler.step(batch(rows), **options).loss))


class Counts(nn.Module):
    """Returns a buffer that it changes in place, while what it returned is still to be sent."""

    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("n", torch.zeros(2, LARGE))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.n += 1
        return x * self.weight, self.n


class Uses(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return x * n[:, :2]


def test_a_buffer_is_handed_on_as_it_was() -> None:
    module = Uses() if rank() else Counts()
    names: Any = {"inputs" if rank() else "outputs": ("x", "n")}
    scheduler = make(module, **names)
    # Microbatches of two rows and columns, counted 1 and 2, then 3 and 4.
    assert [train(scheduler, loss_divisor=1.0) for _ in range(2)] == ["12.0", "28.0"]
    scheduler.close()
    scheduler.close()


def test_a_loss_without_a_graph_is_refused_on_all_ranks() -> None:
    says = "the loss does not depend on anything that requires a gradient"
    with closing(make(loss_fn=lambda out, target: loss(out.detach(), target))) as detached:
        assert says in train(detached)
    with closing(make()) as plain, torch.no_grad():
        assert says in train(plain)


def test_what_differs_between_ranks_is_told_to_all() -> None:
    divisor: Any = {"loss_divisor": 1.0 + rank()}
    mean: Any = lambda out, target: (out.mean() - target).square().sum()  # noqa: E731
    with closing(make(loss_fn=mean)) as scheduler:
        said = train(scheduler, target=batch(2))
        assert "ranks disagree on how many rows their tensors have" in said
    with closing(make()) as scheduler:
        assert "ranks disagree on loss_divisor" in train(scheduler, **divisor)
    with closing(make()) as scheduler:
        assert train(scheduler) == "24.0"
        assert "loss_divisor differs between the 2 ranks" in train(scheduler, **divisor)
    with closing(make()) as scheduler:
        said = train(scheduler, loss_divisor="x" if rank() else 1.0)
        assert "could not convert string to float: 'x'" in said


def test_losses_may_have_any_shape_of_one_element() -> None:
    shapes = [(), (1,), (1, 1), ()]

    def shaped(out: Tensor, target: Tensor) -> Tensor:
        return loss(out, target).reshape(shapes.pop(0))

    with closing(make(loss_fn=shaped)) as scheduler:
        assert [train(scheduler) for _ in range(2)] == ["24.0", "24.0"]


def test_empty_tensors_cross() -> None:
    def ignores(x: Tensor, nothing: Tensor) -> Tensor:
        assert nothing.numel() == 0
        return x

    module = Scale(ignores) if rank() else Scale(lambda x: (x, torch.empty(0)), 1.0)
    names: Any = {"inputs" if rank() else "outputs": ("x", "nothing")}
    with closing(make(module, **names)) as scheduler:
        assert [train(scheduler) for _ in range(3)] == ["12.0"] * 3


def test_evaluation_in_inference_mode_spoils_no_step() -> None:
    with closing(make()) as scheduler:
        for _ in range(2):
            with torch.inference_mode():
                assert float(scheduler.evaluate(batch(), target=batch()).loss) == 24.0
            assert train(scheduler) == "24.0"


def test_a_refusal_behind_an_accumulated_step_is_told() -> None:
    """Rank 1 is refused alone, while rank 0 waits for its bucket: no rank of its pipeline helps."""
    scheduler = make(pipeline=1, handlers=["data-parallel"])
    with scheduler.sync.accumulate():
        assert train(scheduler) == "8.0"
    time.sleep(0.5 * rank())
    said = train(scheduler, 1 if rank() else ROWS)
    if rank():
        assert said.startswith("StepError: tensors of")
    else:
        assert "rank 1: StepError: tensors of" in said
    scheduler.close()
