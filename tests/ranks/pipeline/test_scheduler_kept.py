"""What a stage keeps of its inputs and outputs, what it may return, and what a step tells."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tests.support.gradients.cases import Case, Replies, on, outcome, rank, replies
from tests.support.pipeline.layers import (
    NUM_MICROBATCHES,
    WIDTH,
    Layer,
    distance,
    make,
    mean_square,
    normal,
    train,
)
from tests.support.pipeline.scales import ELSEWHERE
from tests.support.pipeline.schedulers import MOST

PAIR: list[Case] = []
pair = replies(2, PAIR)
ROWS = 8


def batch(seed: int) -> tuple[Tensor, Tensor]:
    return normal(ROWS, WIDTH, seed=seed), normal(ROWS, WIDTH, seed=seed + 1)


class Remembers(Layer):
    """Adds what it was given for the microbatch before, as Transformer-XL does."""

    memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before, self.memory = self.memory, x.detach()
        out: Tensor = self.linear(x).tanh()
        return out if before is None else out + before


class Returns(Layer):
    """Returns the same memory each time, as a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.empty(ROWS // NUM_MICROBATCHES, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x).tanh()
        return made if torch.is_grad_enabled() and made.requires_grad else self.out.copy_(made)


def one_process(modules: list[nn.Module], x: Tensor, y: Tensor) -> Tensor:
    losses = [
        mean_square(modules[1](modules[0](part)), target)
        for part, target in zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True)
    ]
    return torch.stack(losses).mean()


@on(PAIR)
def memories() -> Any:
    """A second stage that keeps its input, on schedules that use buffers again."""
    found = {}
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        modules: list[nn.Module] = [Layer(), Remembers()]
        twins: list[nn.Module] = [Layer(), Remembers()]
        scheduler = make(*modules, schedule=schedule)
        for step in range(4):
            x, y = batch(step)
            loss = train(scheduler, x, target=y)
            for twin in twins:
                twin.zero_grad()
            true = one_process(twins, x, y)
            true.backward()
            pairs = zip(modules[rank()].parameters(), twins[rank()].parameters(), strict=True)
            errors = [distance(p.grad, q.grad) for p, q in pairs]
            found[f"{schedule} {step}"] = max(abs(loss - float(true)), *errors)
        x, y = batch(9)
        evaluated = float(scheduler.evaluate(x, target=y).loss)
        with torch.no_grad():
            found[f"{schedule} evaluated"] = abs(evaluated - float(one_process(twins, x, y)))
        scheduler.close()
    return found


def test_a_stage_may_keep_what_it_was_given(pair: Replies) -> None:
    """Issue 16, point 10 (runtime 6): the receive buffer was used again: gradients off by 0.74."""
    for reply in pair:
        assert {n: d for n, d in reply["memories"].items() if not d <= MOST} == {}


@on(PAIR)
def collected() -> Any:
    """A hook looks at all inputs after the step; buffers are as few as ever without it."""
    modules, kept = [Layer(), Layer()], list[Tensor]()
    scheduler = make(*modules, num_microbatches=ROWS)
    x, y = batch(0)
    for _ in range(3):
        train(scheduler, x, target=y)
    before = scheduler.receive_buffers
    hook = modules[rank()].register_forward_pre_hook(lambda _, args: kept.append(args[0].detach()))
    train(scheduler, x, target=y)
    hook.remove()
    first = Layer()(x) if rank() else x
    right = sum(distance(k, w) < MOST for k, w in zip(kept, first.split(1), strict=True))
    kept.clear()
    after = scheduler.receive_buffers
    for _ in range(3):
        train(scheduler, x, target=y)
    made_later = scheduler.receive_buffers - after
    scheduler.close()
    return right, before <= max(scheduler.proof.receive_buffers), made_later <= before


def test_a_hook_may_collect_what_a_stage_was_given(pair: Replies) -> None:
    """Issue 16, point 10 (runtime 6): 1 of 8 collected inputs was right on rank 1."""
    for reply in pair:
        assert reply["collected"] == (ROWS, True, True)


@on(PAIR)
def same_memory() -> Any:
    found = {}
    for which in (0, 1):
        modules = [Layer(), Layer()]
        modules[which] = Returns()
        scheduler = make(*modules)
        x, y = batch(0)
        result = [scheduler.evaluate(x, target=y) for _ in range(2)][1]
        with torch.no_grad():
            twins = [Layer(), Layer()]
            true = twins[1](twins[0](x))
        found[f"evaluated {which}"] = abs(float(result.loss) - float(mean_square(true, y)))
        if rank():
            found[f"outputs {which}"] = distance(result.outputs[0], true)
        scheduler.close()
        modules[which].requires_grad_(False)
        frozen = make(*modules, allow_unsynced=["linear.*"])  # equal, and one of them is frozen
        losses = [train(frozen, x, target=y) for _ in range(2)]
        found[f"frozen {which}"] = max(abs(f - float(mean_square(true, y))) for f in losses)
        frozen.close()
    return found


def test_a_stage_may_return_the_same_memory_each_time(pair: Replies) -> None:
    """Issue 16, point 10 (runtime 6): in evaluation the loss was off by 0.064."""
    for reply in pair:
        assert {n: d for n, d in reply["same_memory"].items() if not d <= MOST} == {}


# What cannot be handed on.


def as_dtensor(x: Tensor) -> Tensor:
    mesh = DeviceMesh("cpu", [rank()], _init_backend=False)
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "DTensor": as_dtensor,
    "sparse": lambda x: x.to_sparse(),
    "jagged": lambda x: torch.nested.as_nested_tensor(list(x), layout=torch.jagged),
}


@on(PAIR)
def odd_outputs() -> Any:
    found, (x, y) = {}, batch(0)
    for name, change in ODD.items():
        scheduler = make(Layer(lambda linear, x, c=change: c(linear(x))), Layer())
        found[name] = outcome(partial(train, scheduler, x, target=y))
        scheduler.close()
    return found


ADVICE = {"DTensor": "output.full_tensor()", "sparse": "to_dense()", "jagged": "a torch.Tensor"}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_sent_is_refused_in_words(name: str, pair: Replies) -> None:
    """Issue 16, point 14: a DTensor as an output ended in "invalid python storage"."""
    for place, reply in enumerate(pair):
        said = reply["odd_outputs"][name]
        assert said.startswith(ELSEWHERE if place else "StepError: stage 0 returned 'x' as a ")
        assert f"{ADVICE[name]}" in said


# Divisors, and what a result says of itself.


@on(PAIR)
def divisors() -> Any:
    scheduler = make(Layer(), Layer(), loss_fn=lambda x, target: (x - target).square().sum())
    x, y = batch(0)
    true = float(mean_square(Layer()(Layer()(x)), y)) * x.numel() / 7.0
    given = [{"loss_divisor": 7.0} if who is None or who == rank() else {} for who in (1, None, 1)]
    losses = [train(scheduler, x, target=y, **options) for options in given]
    wrong = outcome(
        lambda: train(scheduler, x, target=y, **({} if rank() else {"loss_divisor": 7.0}))
    )
    scheduler.close()
    return [abs(loss - true) / true for loss in losses], wrong


def test_a_divisor_is_needed_where_the_loss_is(pair: Replies) -> None:
    """Issue 16, point 10 (runtime 12): right gradients, and "gradients are wrong" on all ranks."""
    for reply in pair:
        errors, wrong = reply["divisors"]
        assert max(errors) <= MOST
        assert "loss_divisor differs between the 2 ranks that compute a loss or gave one" in wrong


@on(PAIR)
def divisors_of_half_precision() -> Any:
    found, (x, y) = [], (value.half() for value in batch(0))
    for divisor in (64.0, 3e7, 1e8):
        halves = [Layer().half(), Layer().half()]
        scheduler = make(*halves, loss_fn=lambda x, target: (x - target).square().sum())
        found.append(outcome(partial(train, scheduler, x, target=y, loss_divisor=divisor)))
        scheduler.close()
    return found


def test_a_divisor_that_a_loss_of_half_precision_cannot_take_is_refused(pair: Replies) -> None:
    """Issue 16, point 10 (runtime 12): 3e7 doubled all gradients, 1e8 made them zero."""
    for reply in pair:
        fine, *refused = reply["divisors_of_half_precision"]
        assert "Error" not in fine
        for said, divisor in zip(refused, ("3e+07", "1e+08"), strict=True):
            assert f"the loss is torch.float16, and its gradient, 1 / {divisor}" in said


@on(PAIR)
def results() -> Any:
    scheduler = make(Layer(), Layer())
    x, y = batch(0)
    trained, evaluated = scheduler.step(x, target=y), scheduler.evaluate(x, target=y)
    early = repr(trained) in (
        "StepResult(loss is on its way, outputs [])",
        f"StepResult(loss {trained.loss:g}, outputs [])",
    )
    assert float(evaluated.loss) > 0
    scheduler.close()
    return early, repr(trained), f"{trained.loss:g}", repr(evaluated)


def test_a_result_prints_its_loss_once_it_has_arrived(pair: Replies) -> None:
    """Issue 16, point 10 (runtime): a result printed as an address; printing waits for nothing."""
    for place, reply in enumerate(pair):
        early, trained, loss, evaluated = reply["results"]
        assert early
        assert trained == f"StepResult(loss {loss}, outputs [])"
        assert evaluated.endswith("outputs [(8, 3)])" if place else "outputs [])")
