"""A model in parts has the bits of the whole one, and memory for these parts alone."""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipegrad.train.models.partial_model import NotInPartsError, PartialModel, lacks_memory
from tests.support.train import factories

Factory = Callable[[], nn.Sequential]
tied_gpt = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "tied_gpt.py"))["tied_gpt"]


def initialised_behind() -> nn.Sequential:
    """As GPT-2 does it: all layers are made, and then all of them get other values."""
    layers = [nn.Embedding(40, 8, 0), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 40)]

    def init(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=0.02)

    return nn.Sequential(*layers).apply(init)


def odd_inits() -> nn.Sequential:
    layers = [nn.Linear(8, 8) for _ in range(8)]
    nn.init.orthogonal_(layers[0].weight)
    nn.init.kaiming_normal_(layers[1].weight)
    nn.init.xavier_normal_(layers[2].weight)
    nn.init.uniform_(layers[3].weight.view(8, 2, 4), 1, 2)
    nn.init.eye_(layers[4].weight)
    with torch.no_grad():
        layers[5].weight.bernoulli_(0.3).mul_(2)
        layers[6].weight.t().normal_()
        layers[7].weight.copy_(torch.from_numpy(np.random.rand(8, 8)))
        layers[7].bias.fill_(random.random())
    return nn.Sequential(*layers)


def convolutions() -> nn.Sequential:
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    return nn.Sequential(
        nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.LSTM(8, 8), spectral, nn.Linear(8, 8)
    )


class Rotary(nn.Module):
    """Has tensors that are neither parameters nor buffers, and one of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [torch.arange(8.0).cos(), torch.randn(8)]
        self.register_buffer("scale", torch.tensor([1.0, 2.0]).repeat(4))
        self.register_buffer("mask", torch.ones(8, 8).tril().expand(2, 8, 8), persistent=False)


def plain_tensors() -> nn.Sequential:
    return nn.Sequential(Rotary(), nn.Linear(8, 8), Rotary())


def copies() -> nn.Sequential:
    """The last layer begins as a function of the first, which others need not keep."""
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight.data.copy_(first.weight.data * 2)
    last.bias = first.bias
    return nn.Sequential(first, nn.Linear(8, 8), last)


def made_of_draws() -> nn.Sequential:
    layers = [nn.Linear(300, 300) for _ in range(3)]
    for layer in layers:
        layer.weight = nn.Parameter(torch.randn(300, 300) * 0.02 + torch.randperm(300))
    return nn.Sequential(*layers)


FACTORIES: dict[str, Factory] = {
    "tied gpt": lambda: tied_gpt(layers=2, width=16),
    "initialised behind": initialised_behind,
    "odd inits": odd_inits,
    "convolutions": convolutions,
    "plain tensors": plain_tensors,
    "copies": copies,
    "made of draws": made_of_draws,
    "tied": factories.tied,
    "averaging": factories.averaging,
    "counting": factories.counting,
}


def seeded(factory: Factory) -> Factory:
    def make() -> nn.Sequential:
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        return factory()

    return make


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    found = dict(chain(layer.named_parameters(), layer.named_buffers()))
    for name, module in layer.named_modules():
        for table in getattr(module, "tables", ()):
            found[f"{name} {len(found)}"] = table
    return found


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


@pytest.mark.parametrize("name", FACTORIES)
def test_parts_have_the_bits_of_the_whole(name: str) -> None:
    make = seeded(FACTORIES[name])
    whole, drawn = make(), states()
    for layer, expected in whole.named_children():
        part = PartialModel(make).made([layer])
        assert states() == drawn  # the next number of every generator is the same
        found = tensors_of(part.get_submodule(layer))
        assert [*found] == [*tensors_of(expected)]
        for key, tensor in tensors_of(expected).items():
            assert torch.equal(found[key], tensor), key
            assert found[key].stride() == tensor.stride()
        if (name, layer) == ("tied", "4"):
            assert part[4].weight is part[0].weight
            assert not part[0].weight.is_meta
        kept = {id(p) for p in part.get_submodule(layer).parameters()}
        if name == "copies" and layer == "2":
            continue  # it is made of the first layer, which then has memory too
        for other, child in part.named_children():
            if other != layer:
                assert all(p.is_meta for p in child.parameters() if id(p) not in kept)


def changed(change: Callable[[Tensor], object]) -> Factory:
    def make() -> nn.Sequential:
        layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        change(layers[0].weight.data)
        return nn.Sequential(*layers)

    return make


@pytest.mark.parametrize(
    "factory",
    [
        factories.reads_its_start,
        changed(lambda weight: weight.copy_(torch.poisson(torch.full((8, 8), 3.0)))),
        # Draws again whatever lies outside, so values say how often.
        changed(nn.init.trunc_normal_),
        factories.fails,
    ],
)
def test_a_factory_that_needs_values_is_refused(factory: Factory) -> None:
    with pytest.raises((RuntimeError, NotInPartsError)):
        PartialModel(seeded(factory))


def test_a_factory_that_does_something_else_is_refused() -> None:
    calls: list[int] = []

    def make() -> nn.Sequential:
        calls.append(0)
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(len(calls) + 1)))

    with pytest.raises(NotInPartsError):
        PartialModel(make).made(["0"])
    # Torch calls other operators for an element where a tensor has no memory.
    factory = seeded(changed(lambda weight: weight.__setitem__((3, 4), 0.0)))
    with pytest.raises(NotInPartsError, match=r"it calls .* in the place of"):
        PartialModel(factory).made(["0"])


def test_a_factory_that_keeps_a_tensor_is_refused_and_its_whole_model_is_known() -> None:
    """The tensor has no memory, and no operator makes it in a second call."""
    factories.table.cache_clear()
    part = PartialModel(seeded(factories.cached))
    with pytest.raises(NotInPartsError, match=r"it calls no aten\.arange"):
        part.made(["2"])
    assert lacks_memory(factories.cached())
    factories.table.cache_clear()
    assert not lacks_memory(factories.cached())
