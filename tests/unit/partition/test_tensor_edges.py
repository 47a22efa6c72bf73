"""Tensors that are drawn, and tensors of several names: the edges of a cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipegrad.errors import TopologyError
from pipegrad.partition.weights.initial_values import _SeedByName
from pipegrad.partition.weights.pretrained import first_names
from tests.unit.partition import test_structural as structural


class Drawing(structural.Chain):
    """What it returns needs random numbers that a layer of another stage needs, too."""

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        noise = torch.rand((), dtype=torch.float64)
        h = self.embed(tokens) * noise
        for layer in self.layers:
            h = layer(h)
        return self.head(h) + noise  # type: ignore[no-any-return]


def test_random_numbers_that_a_stage_and_the_returned_value_need_are_refused() -> None:
    with pytest.raises(TopologyError, match="draws random numbers outside of its layers"):
        structural.cut(Drawing(), 2, boundaries=["layers.1"])


def test_each_draw_of_a_module_has_numbers_of_its_own_and_the_same_again() -> None:
    def draws() -> list[Tensor]:
        with torch.random.fork_rng(devices=[]), _SeedByName(1, nn.Linear(2, 2)):
            return [torch.rand(3), torch.rand(3)]

    first, second = draws()
    assert not torch.equal(first, second)
    assert torch.equal(torch.stack(draws()), torch.stack([first, second]))


def test_a_buffer_of_two_modules_is_saved_under_its_first_name() -> None:
    model = nn.ModuleDict({"a": nn.Module(), "b": nn.Module()})
    table = torch.ones(2)
    for module in model.values():
        module.register_buffer("table", table)
    assert first_names(model) == {"a.table": "a.table", "b.table": "a.table"}
