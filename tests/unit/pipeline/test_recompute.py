"""A forward that runs again is the one that ran, and leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipegrad.errors import StepError
from pipegrad.pipeline import activation_checkpoint
from pipegrad.pipeline.activation_checkpoint import FirstForward, Recompute, compare

CPU = torch.device("cpu")
WIDTH = 4


class Counts(nn.Module):
    """Makes something of how often it has run; its buffer is another one each time."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x * self.calls


class Sometimes(nn.Module):
    """Changes its buffer if it is given something large."""

    most: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > self.most:
            self.most.copy_(x.max())
        return x / self.most


class Draws(nn.Module):
    """Multiplies by what a function draws."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self._draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.as_tensor(self._draw(), dtype=torch.float64)


def counted() -> Callable[[], int]:
    calls = list[int]()

    def count() -> int:
        calls.append(0)
        return len(calls)

    return count


GLOBAL: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(WIDTH),
    "random": random.random,
    "random, normal": lambda: random.gauss(0, 1),
    "numpy": lambda: np.random.rand(WIDTH),
    "numpy, normal": lambda: np.random.randn(WIDTH),
}
OF_TORCH = torch.Generator()
OWN: dict[str, Callable[[], Any]] = {
    "torch.Generator": lambda: torch.rand(WIDTH, generator=OF_TORCH),
    "numpy.random.Generator": np.random.default_rng(1).random,
    "random.Random": random.Random(2).random,
    "a counter": counted(),
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "dropout": nn.Dropout,
    "counts": Counts,
    "nested": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.BatchNorm1d(WIDTH))),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(5)
    return MODULES[name]()


@pytest.mark.parametrize("name", MODULES)
def test_what_runs_again_is_what_ran_and_counts_once(name: str) -> None:
    """Two forwards, then both again in turn, as in a pipeline; twice, as in two steps."""
    module, plain = built(name), built(name)
    recompute = Recompute(module, CPU)
    for _ in range(2):
        values = [torch.randn(3, WIDTH) for _ in range(2)]
        torch.manual_seed(7)
        expected = [plain(value) for value in values]
        drawn = torch.rand(())
        torch.manual_seed(7)
        firsts = list[FirstForward]()
        for value, wanted in zip(values, expected, strict=True):
            outputs, first = recompute.first([value], lambda value=value: (module(value),))  # type: ignore[misc]
            assert torch.equal(outputs[0], wanted)
            firsts.append(first)
        assert torch.equal(torch.rand(()), drawn)
        state = torch.get_rng_state()
        for value, wanted, first in zip(values, expected, firsts, strict=True):
            with recompute.again(first, [value]):
                assert torch.equal(module(value), wanted)
        assert torch.equal(torch.get_rng_state(), state)
    for (key, mine), theirs in zip(module.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), key


@pytest.mark.parametrize("draw", GLOBAL.values(), ids=GLOBAL)
def test_global_generators_are_put_back_for_the_second_forward_alone(
    draw: Callable[[], Any],
) -> None:
    module, x = Draws(draw), torch.ones(WIDTH, dtype=torch.float64)
    recompute = Recompute(module, CPU)
    draw()
    firsts = [recompute.first([x], lambda: (module(x),)) for _ in range(2)]
    assert not torch.equal(firsts[0][0][0], firsts[1][0][0])
    state = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["pos"],
    )
    for outputs, first in firsts:
        with recompute.again(first, [x]):
            again = (module(x),)
        assert torch.equal(again[0], outputs[0])
        compare(first, again, "stage 0")
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]) == state[1:]


@pytest.mark.parametrize("draw", OWN.values(), ids=OWN)
def test_a_second_forward_that_returns_something_else_is_refused(draw: Callable[[], Any]) -> None:
    module, x = Draws(draw), torch.ones(WIDTH, dtype=torch.float64)
    recompute = Recompute(module, CPU)
    _, first = recompute.first([x], lambda: (x, module(x)))
    words = r"^stage 1: a stage with recompute=True returned something else when .*torch\.Generator"
    with recompute.again(first, [x]):
        again = x, module(x)
    with pytest.raises(StepError, match=words):
        compare(first, again, "stage 1")


def test_one_bit_of_one_output_is_enough() -> None:
    recompute, x = Recompute(nn.Identity(), CPU), torch.randn(100, 100)
    other = x.clone()
    other[99, 99] = torch.nextafter(x[99, 99], torch.tensor(9.0))
    _, first = recompute.first([x], lambda: (x, x))
    with pytest.raises(StepError, match="returned something else"):
        compare(first, (x, other), "stage 0")


def test_on_a_device_different_forwards_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    recompute, x = Recompute(nn.Identity(), CPU), torch.ones(2)
    monkeypatch.setattr(activation_checkpoint, "number_of", lambda outputs: outputs[0].sum())
    differ = list[Any]()
    _, first = recompute.first([x], lambda: (x,))
    for again in (x, x + 1, x + 2):
        differ += [compare(first, (again,), "stage 0")]
    assert [int(one) for one in differ] == [0, 1, 1]


def test_what_a_stage_was_given_may_not_change() -> None:
    recompute, x, mask = Recompute(nn.Identity(), CPU), torch.ones(2), torch.ones(2) > 0
    for values in ([x, "name", mask], [x, {"name": 3, "masks": [mask]}]):
        _, first = recompute.first(values, lambda: (x,))
        mask.logical_not_()
        with pytest.raises(StepError, match="changed in place"), recompute.again(first, values):
            pass


def test_a_buffer_that_only_later_forwards_change_is_refused() -> None:
    module = Sometimes()
    recompute, small, large = Recompute(module, CPU), torch.ones(2), torch.full((2,), 3.0)
    recompute.first([small], lambda: (module(small),))
    with pytest.raises(StepError, match=r"changed the buffers \['most'\]"):
        recompute.first([large], lambda: (module(large),))


def test_buffers_come_back_if_a_forward_fails() -> None:
    module = nn.BatchNorm1d(WIDTH)
    recompute, x = Recompute(module, CPU), torch.randn(3, WIDTH)
    _, first = recompute.first([x], lambda: (module(x),))
    mean, seen = module.running_mean, list[Tensor | None]()

    def fail() -> None:
        with recompute.again(first, [x]):
            seen.append(module.running_mean)
            raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        fail()
    assert module.running_mean is mean
    assert seen[0] is not mean
