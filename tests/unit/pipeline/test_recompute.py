"""A forward that runs again is the one that ran, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipegrad.errors import StepError
from pipegrad.pipeline.activation_checkpoint import Recompute

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
        for at, value in enumerate(values):
            first = recompute.first(at, [value], lambda value=value: (module(value),))  # type: ignore[misc]
            assert torch.equal(first[0], expected[at])
        assert torch.equal(torch.rand(()), drawn)
        state = torch.get_rng_state()
        for at, value in enumerate(values):
            with recompute.again(at, [value]):
                assert torch.equal(module(value), expected[at])
        assert torch.equal(torch.get_rng_state(), state)
    for (key, mine), theirs in zip(module.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), key


def test_what_a_stage_was_given_may_not_change() -> None:
    recompute, x, mask = Recompute(nn.Identity(), CPU), torch.ones(2), torch.ones(2) > 0
    for values in ([x, "name", mask], [x, {"name": 3, "masks": [mask]}]):
        recompute.first(0, values, lambda: (x,))
        mask.logical_not_()
        with pytest.raises(StepError, match="changed in place"), recompute.again(0, values):
            pass


def test_a_buffer_that_only_later_forwards_change_is_refused() -> None:
    module = Sometimes()
    recompute, small, large = Recompute(module, CPU), torch.ones(2), torch.full((2,), 3.0)
    recompute.first(0, [small], lambda: (module(small),))
    with pytest.raises(StepError, match=r"changed the buffers \['most'\]"):
        recompute.first(1, [large], lambda: (module(large),))


def test_buffers_come_back_if_a_forward_fails() -> None:
    module = nn.BatchNorm1d(WIDTH)
    recompute, x = Recompute(module, CPU), torch.randn(3, WIDTH)
    recompute.first(0, [x], lambda: (module(x),))
    mean, seen = module.running_mean, list[Tensor | None]()

    def fail() -> None:
        with recompute.again(0, [x]):
            seen.append(module.running_mean)
            raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        fail()
    assert module.running_mean is mean
    assert seen[0] is not mean
