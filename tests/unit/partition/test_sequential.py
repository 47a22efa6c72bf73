"""cut of an nn.Sequential: names are kept, and nothing is copied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipegrad import cut as cut_of
from pipegrad import find_tied
from pipegrad.errors import TopologyError


class Scaled(nn.Sequential):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(given)  # type: ignore[no-any-return, no-untyped-call]


class Built(nn.Sequential):
    """Its constructor takes no layers; of everything else it is a Sequential."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))


class Looped(nn.Module):
    """Layers in a list, and a loop over them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def with_own() -> nn.Sequential:
    model = layers(1, 2)
    model.register_buffer("scale", torch.ones(1))
    return model


def layers(*sizes: int) -> nn.Sequential:
    """A Sequential of layers with so many parameters."""
    modules = []
    for size in sizes:
        module = nn.Module()
        if size:
            module.weight = nn.Parameter(torch.zeros(size))
        modules.append(module)
    return nn.Sequential(*modules)


def held(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_stages_have_the_names_of_their_layers_and_recompute_on_request() -> None:
    cut = cut_of(layers(1, 2, 3, 4), 2, boundaries=[1])
    assert [cut.layers_of(stage) for stage in (0, 1)] == [["0"], ["1", "2", "3"]]
    assert [stage.recompute for stage in cut.stages([0, 1], recompute=True)] == [True, True]
    assert not cut.stages([0])[0].recompute
    structural = cut_of(Looped(), 2, example={"x": torch.ones(1, 2)})
    assert structural.layers_of(1) == ["layers.1"]
    assert [stage.recompute for stage in structural.stages([0, 1], recompute=True)] == [True, True]


def test_stages_hold_the_models_own_layers_under_their_own_names() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 5, False))
    model[3].weight = model[0].weight
    cut = cut_of(model, 2)
    assert cut.boundaries == (1,)
    names = [name for stage in cut.modules.values() for name, _ in stage.named_parameters()]
    assert names == ["0.weight", "1.weight", "1.bias", "3.weight"]
    assert cut.modules[1][0] is model[1]  # type: ignore[index]
    assert cut.tied == find_tied(model) == [["0.weight", "3.weight"]]
    tokens = torch.arange(5)
    torch.testing.assert_close(cut.modules[1](cut.modules[0](tokens)), model(tokens))


def test_a_layer_that_is_there_twice_is_in_both_stages_and_modes_are_kept() -> None:
    twice = nn.Linear(3, 3)
    cut = cut_of(nn.Sequential(twice, nn.GELU(), twice), 3)
    assert cut.modules[0][0] is cut.modules[2][0] is twice  # type: ignore[index]
    assert cut.tied == [["0.weight", "2.weight"], ["0.bias", "2.bias"]]
    cut = cut_of(nn.Sequential(nn.Dropout().eval(), nn.Dropout()), 2)
    assert [module[0].training for module in cut.modules.values()] == [False, True]  # type: ignore[index]
    built = Built()
    cut = cut_of(built, 2)
    assert [type(module) for module in cut.modules.values()] == [nn.Sequential] * 2
    assert cut.modules[1][0] is built[1]  # type: ignore[index]


def test_a_parameter_counts_once_in_a_stage_and_equal_layers_are_spread_evenly() -> None:
    model = layers(10, 4, 4, 4)
    for at in (1, 2):
        model[at].weight = model[0].weight
    assert cut_of(model, 2).boundaries == (3,)  # 10 once, against 4; not 10 + 10 + 10
    assert cut_of(layers(10, 4, 4, 4), 2).boundaries == (1,)
    assert cut_of(layers(*[3] * 8), 4).boundaries == (2, 4, 6)
    assert sorted(map(held, cut_of(layers(*[3] * 6), 4).modules.values())) == [3, 3, 6, 6]
    assert len(cut_of(layers(*[3] * 300), 16).modules) == 16  # which takes no time


@pytest.mark.parametrize(
    ("model", "num_stages", "message"),
    [
        (Scaled(nn.Linear(2, 2)), 1, "nobody knows what Scaled takes"),
        (with_own(), 2, r"holds \['scale'\] beside its layers"),
        (layers(1, 2), 0, "cannot be cut into 0 stages"),
        (nn.Sequential(layers(1, 2)), 2, "a model of 1 layers.*Sequential inside of another one"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: nn.Module, num_stages: int, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        cut_of(model, num_stages)
