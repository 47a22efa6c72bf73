"""Stages of one expression each; a `Wiring` hangs them together by names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from pipegrad.schedules import Kind
from tests.support.pipeline.models import TOKENS, WIDTH
from tests.support.pipeline.schedulers import ROWS

Part = tuple[nn.Module, str, str]  # a stage, and its inputs and outputs, separated by spaces
Parts = Callable[[], list[Part]]


class Piece(nn.Module):
    """A stage of one expression, which may use the layer and the parameters."""

    def __init__(self, function: Callable[..., Any], **parameters: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name, shape in parameters.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self._function = function

    def forward(self, *values: Any) -> Any:
        return self._function(self, *values)


class Plain(nn.Module):
    """A stage of one expression, without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *values: Any) -> Any:
        return self._function(*values)


def mean_square(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out.reshape(target.shape), target)


@dataclass(frozen=True)
class Wiring:
    """Stages, where they are, and what they are given."""

    name: str
    parts: Parts
    places: tuple[int, ...]
    first: Kind = "B"
    num_microbatches: int = 6
    given: Callable[[int], dict[str, object]] = lambda rows: {}
    lenient: bool = False
    loss: Callable[[Tensor, Tensor], Tensor] = mean_square
    options: tuple[tuple[str, Any], ...] = ()
    late: int = -1  # as in `greedy`
    recompute: bool = False

    def __str__(self) -> str:
        told = f"{self.name} {self.places}, {self.first} first, {self.num_microbatches}"
        if self.late >= 0:
            told += f", split, {self.late} late"
        if self.recompute:
            told += ", recomputed"
        return told + "".join(f", {name} {value}" for name, value in self.options)

    @property
    def num_ranks(self) -> int:
        return max(self.places) + 1

    def built(self) -> list[Part]:
        """Returns the stages, the same ones each time."""
        torch.manual_seed(11)
        return self.parts()

    def batch(self, step: int) -> tuple[dict[str, Any], Tensor]:
        torch.manual_seed(200 + step)
        rows = ROWS * self.num_microbatches
        x, target = torch.randn(2, rows, TOKENS, WIDTH)
        return {"x": x, **self.given(rows)}, target
