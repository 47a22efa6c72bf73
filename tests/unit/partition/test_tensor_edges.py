"""Where tensors go that are unread, tied, or drawn: the edges of a cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipegrad.errors import TopologyError
from pipegrad.partition.traced.model import TracedModel
from pipegrad.partition.weights.initial_values import _SeedByName
from pipegrad.partition.weights.pretrained import first_names
from tests.unit.partition import test_structural as structural
from tests.unit.partition.test_traced import WIDTH, Chain, Unused, compare, only_x, x


class Tied(nn.Module):
    """The head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(tokens))
        return out


class Remembering(Chain):
    """Writes a value of its own into a buffer of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.at(0, x)
        self.get_buffer("last").copy_(h.detach().mean(0))
        return self.at(3, self.at(2, self.at(1, h)))


class Drawing(structural.Chain):
    """What it returns needs random numbers that a layer of another stage needs, too."""

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        noise = torch.rand((), dtype=torch.float64)
        h = self.embed(tokens) * noise
        for layer in self.layers:
            h = layer(h)
        return self.head(h) + noise  # type: ignore[no-any-return]


def test_a_tensor_that_no_operator_reads_is_where_its_module_runs() -> None:
    batch = {"tree": {"bias": (x(), None)}, "x": x(), "flag": True}
    parts = TracedModel(Unused(), batch, ["layers.0", "layers.1"]).parts([1])
    assert "layers.1.extra" in parts[1].module.state_dict()


def test_a_stage_holds_a_tied_tensor_by_the_name_that_its_own_modules_use() -> None:
    parts = TracedModel(Tied(), {"tokens": torch.arange(4)}, ["embed", "head"]).parts([1])
    assert [list(part.module.state_dict()) for part in parts] == [["embed.weight"], ["head.weight"]]


def test_a_buffer_has_what_the_forward_copies_into_it() -> None:
    compare(Remembering(), only_x(), "0123", [2])


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
