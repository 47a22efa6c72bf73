"""Code between layers that writes in place: each stage runs it on memory of its own.

CTRL scales the embeddings in place. In a stage without them that was an error of torch: what stands
for an output had the memory of one number. In a stage that sends them it was silently wrong: other
stages scaled them a second time.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegrad
from tests.support.rounding import rounding

WIDTH = 6


class Written(nn.Module):
    """Writes into what its first layer returns; a skip takes the result behind the last one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.first = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.how == "scale":
            hidden *= 3.0
        else:  # into a view: what is written comes from another layer
            hidden[:, :2] = self.side(x)
        begin = hidden
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.last(hidden + begin)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["scale", "view"])
@pytest.mark.parametrize("boundaries", [["blocks.0", "blocks.2"], ["blocks.1", "last"]])
def test_gradients_are_those_of_the_uncut_model(how: str, boundaries: list[str]) -> None:
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    true = Written(how).double()
    expected = true(x)
    expected.sum().backward()
    model: Any = copy.deepcopy(true)
    model.zero_grad()
    cut = pipegrad.cut(model, 3, boundaries=boundaries, example={"x": x[:2]})
    values, made = dict[str, Tensor](), tuple[Tensor, ...]()
    for stage in cut.stages(range(3)):
        *edges, _ = stage.inputs
        made = stage.forward([*(values[name] for name in edges), {"x": x}])
        values |= zip(stage.outputs, made, strict=True)
    assert torch.equal(made[0], expected)
    made[0].sum().backward()
    largest = max(p.grad.abs().max() for p in true.parameters() if p.grad is not None)
    for name, parameter in true.named_parameters():
        found, wanted = model.get_parameter(name).grad, parameter.grad
        assert (found is None) is (wanted is None), name
        if wanted is not None:
            assert (found - wanted).abs().max() <= rounding(4, dtype=torch.float64) * largest, name
