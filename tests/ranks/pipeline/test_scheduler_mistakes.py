"""What users do by mistake, and modules do by habit: right numbers, or an error on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology
from pipegrad.errors import PipegradError
from tests.support.gradients.cases import Case, Replies, on, rank, replies

TWO: list[Case] = []
two = replies(2, TWO)
ROWS, LARGE = 4, 200_000


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 2.0 + rank()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def loss(out: Tensor, target: Tensor) -> Tensor:
    return (out * target).sum()


def make(
    module: nn.Module | None = None, loss_fn: Callable[..., Any] = loss, **names: Any
) -> Scheduler:
    return Scheduler(
        [Stage(module or Scale(), rank(), **names)],
        Topology.create(pipeline=2),
        schedule="gpipe",
        num_microbatches=2,
        loss_fn=loss_fn,
        handlers=["noop"],
    )


def batch(rows: int = ROWS) -> Tensor:
    return torch.ones(rows, 2)


def said(function: Callable[[], object]) -> str:
    """Returns what a step says of itself, or raises."""
    try:
        return f"fine: {function()}"
    except (PipegradError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def train(scheduler: Scheduler, *args: Any, **kwargs: Any) -> str:
    for record in scheduler.sync.records():
        scheduler.sync.parameter(record).grad = None
    return said(lambda: float(scheduler.step(*args, **kwargs).loss))


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


@on(TWO)
def buffers_that_are_handed_on() -> Any:
    module = Uses() if rank() else Counts()
    names: dict[str, Any] = {"inputs" if rank() else "outputs": ("x", "n")}
    scheduler = make(module, **names)
    found = [train(scheduler, batch(), target=batch(), loss_divisor=1.0) for _ in range(2)]
    scheduler.close()
    scheduler.close()
    return found


def test_a_buffer_is_handed_on_as_it_was(two: Replies) -> None:
    for reply in two:  # microbatches of two rows and columns, counted 1 and 2, then 3 and 4
        assert reply["buffers_that_are_handed_on"] == ["fine: 12.0", "fine: 28.0"]


@on(TWO)
def losses_without_a_graph() -> Any:
    detached = make(loss_fn=lambda out, target: loss(out.detach(), target))
    plain = make()
    found = [train(detached, batch(), target=batch())]
    with torch.no_grad():
        found.append(train(plain, batch(), target=batch()))
    detached.close()
    plain.close()
    return found


def test_a_loss_without_a_graph_is_refused_on_all_ranks(two: Replies) -> None:
    for reply in two:
        for text in reply["losses_without_a_graph"]:
            assert "the loss does not depend on anything that requires a gradient" in text


@on(TWO)
def numbers_that_differ_between_ranks() -> Any:
    rows = make(loss_fn=lambda out, target: (out.mean() - target).square().sum())
    first = make()
    later = make()
    words = make()
    divisor = 1.0 + rank()
    found = {
        "rows": train(rows, batch(4), target=batch(2)),
        "first divisor": train(first, batch(), target=batch(), loss_divisor=divisor),
        "good": train(later, batch(), target=batch()),
        "later divisor": train(later, batch(), target=batch(), loss_divisor=divisor),
        "a word": train(words, batch(), target=batch(), loss_divisor="x" if rank() else 1.0),
    }
    for scheduler in (rows, first, later, words):
        scheduler.close()
    return found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("rows", "ranks disagree on how many rows their tensors have"),
        ("first divisor", "ranks disagree on loss_divisor"),
        ("good", "fine: 24.0"),
        ("later divisor", "loss_divisor differs between the 2 ranks"),
        ("a word", "could not convert string to float: 'x'"),
    ],
)
def test_what_differs_between_ranks_is_told_to_all(name: str, says: str, two: Replies) -> None:
    for reply in two:
        assert says in reply["numbers_that_differ_between_ranks"][name]


@on(TWO)
def losses_of_changing_shape() -> Any:
    shapes = [(), (1,), (1, 1), ()]
    scheduler = make(loss_fn=lambda out, target: loss(out, target).reshape(shapes.pop(0)))
    found = [train(scheduler, batch(), target=batch()) for _ in range(2)]
    scheduler.close()
    return found


def test_losses_may_have_any_shape_of_one_element(two: Replies) -> None:
    for reply in two:
        assert reply["losses_of_changing_shape"] == ["fine: 24.0", "fine: 24.0"]


class Empty(nn.Module):
    """Hands on an empty tensor beside the value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.weight, torch.empty(0)


class Ignores(Scale):
    def forward(self, x: Tensor, nothing: Tensor) -> Tensor:  # type: ignore[override]
        assert nothing.numel() == 0
        return x * self.weight


@on(TWO)
def empty_tensors() -> Any:
    module = Ignores() if rank() else Empty()
    names: dict[str, Any] = {"inputs" if rank() else "outputs": ("x", "nothing")}
    scheduler = make(module, **names)
    found = [train(scheduler, batch(), target=batch()) for _ in range(3)]
    scheduler.close()
    return found


def test_empty_tensors_cross(two: Replies) -> None:
    for reply in two:
        assert reply["empty_tensors"] == ["fine: 12.0"] * 3


@on(TWO)
def evaluation_in_inference_mode() -> Any:
    scheduler = make()
    found = []
    for _ in range(2):
        with torch.inference_mode():
            found.append(said(lambda: float(scheduler.evaluate(batch(), target=batch()).loss)))
        found.append(train(scheduler, batch(), target=batch()))
    scheduler.close()
    return found


def test_evaluation_in_inference_mode_spoils_no_step(two: Replies) -> None:
    for reply in two:
        assert reply["evaluation_in_inference_mode"] == ["fine: 24.0"] * 4


@on(TWO)
def a_refusal_behind_an_accumulated_step() -> Any:
    """Rank 1 is refused alone, while rank 0 waits for its bucket: no rank of its pipeline helps."""
    scheduler = Scheduler(
        [Stage(Scale(), 0)],
        Topology.create(pipeline=1),
        schedule="gpipe",
        num_microbatches=2,
        loss_fn=loss,
        handlers=["data-parallel"],
    )
    with scheduler.sync.accumulate():
        found = [train(scheduler, batch(), target=batch())]
    rows = 1 if rank() else ROWS
    time.sleep(0.5 * rank())
    found.append(train(scheduler, batch(rows), target=batch(rows)))
    scheduler.close()
    return found


def test_a_refusal_behind_an_accumulated_step_is_told(two: Replies) -> None:
    waited, refused = (reply["a_refusal_behind_an_accumulated_step"] for reply in two)
    assert waited[0] == refused[0] == "fine: 8.0"
    assert refused[1].startswith("StepError: tensors of")
    assert "rank 1: StepError: tensors of" in waited[1]
