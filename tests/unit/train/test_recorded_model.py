"""Layers that are made alone have the bits of the whole model, and memory for these alone."""

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

from pipegrad.train.recorded_model import NotRecordedError, RecordedModel, lacks_memory
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


def recorded(factory: Factory, seed: int = 3) -> RecordedModel:
    def make() -> nn.Sequential:
        np.random.seed(3)
        random.seed(3)
        return factory()

    return RecordedModel(make, seed)


def loaded(factory: Factory, seed: int = 3) -> Any:
    whole = recorded(factory, seed)
    whole.load([whole.model])
    return whole.model


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    found = dict(chain(layer.named_parameters(), layer.named_buffers()))
    for name, module in layer.named_modules():
        for table in getattr(module, "tables", ()):
            found[f"{name} {len(found)}"] = table
    return found


@pytest.mark.parametrize("name", FACTORIES)
def test_layers_have_the_bits_of_the_whole(name: str) -> None:
    make, state = FACTORIES[name], torch.get_rng_state()
    whole = loaded(make)
    assert not lacks_memory(whole)
    for layer, expected in whole.named_children():
        record = recorded(make)
        part = record.model.get_submodule(layer)
        record.load([part])
        found = tensors_of(part)
        assert [*found] == [*tensors_of(expected)]
        for key, tensor in tensors_of(expected).items():
            assert torch.equal(found[key], tensor), key
            assert found[key].stride() == tensor.stride()
            assert found[key].requires_grad == tensor.requires_grad
        own = {id(p) for p in part.parameters()}
        for other, child in record.model.named_children():
            if other != layer:
                assert all(p.is_meta for p in child.parameters() if id(p) not in own)
    assert torch.equal(torch.get_rng_state(), state)
    loaded_again = tensors_of(loaded(make, seed=4))
    drawn = [key for key, t in tensors_of(whole).items() if not torch.equal(t, loaded_again[key])]
    assert drawn or name == "counting"


@pytest.mark.parametrize("name", FACTORIES)
def test_values_are_distributed_as_the_factory_says(name: str) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = tensors_of(FACTORIES[name]())
    found = tensors_of(loaded(FACTORIES[name]))
    assert [*found] == [*expected]
    for key, tensor in expected.items():
        ours, true = found[key].detach().double(), tensor.detach().double()
        assert found[key].shape == tensor.shape
        assert found[key].dtype == tensor.dtype
        assert type(found[key]) is type(tensor)
        if true.numel() > 60:  # of as many draws the spread is known
            assert ours.std().item() == pytest.approx(true.std().item(), rel=0.5)
            assert ours.mean().item() == pytest.approx(
                true.mean().item(), abs=true.std().item() + 1e-9
            )


def test_tied_layers_share_one_parameter_and_names_give_the_seeds() -> None:
    record = recorded(factories.tied)
    ends: Any = [record.model.get_submodule(name) for name in ("0", "4")]
    record.load(ends)
    assert ends[0].weight is ends[1].weight
    apart = recorded(factories.tied)
    apart.load([apart.model.get_submodule("4")])
    assert torch.equal(apart.model.get_parameter("4.weight"), ends[0].weight)
    layers = [*loaded(FACTORIES["made of draws"]).children()]
    assert not torch.equal(layers[0].weight, layers[1].weight)


def test_marks_and_dtypes_of_the_factory_stay() -> None:
    def make() -> nn.Sequential:
        torch.set_default_dtype(torch.bfloat16)
        layer = nn.Linear(8, 8)
        torch.set_default_dtype(torch.float32)
        vars(layer.weight)["is_mine"] = True
        layer.bias.requires_grad_(False)
        return nn.Sequential(layer, nn.Linear(8, 8).half())

    first, second = loaded(make)
    assert first.weight.is_mine
    assert not first.bias.requires_grad
    assert (first.weight.dtype, second.weight.dtype) == (torch.bfloat16, torch.float16)
    assert torch.get_default_dtype() == torch.float32


def changed(change: Callable[[nn.Linear], object]) -> Factory:
    def make() -> nn.Sequential:
        layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        change(layers[0])
        return nn.Sequential(*layers)

    return make


def noted(layer: nn.Linear, outside: list[Tensor] = []) -> None:  # noqa: B006 - it keeps them
    outside.append(layer.weight)


OUTSIDE = torch.zeros(3)


NOT_RECORDED: dict[str, tuple[Factory, str]] = {
    "values": (factories.reads_its_start, "aten._local_scalar_dense"),
    # It draws again whatever lies outside, so values say how often.
    "trunc_normal_": (changed(lambda layer: nn.init.trunc_normal_(layer.weight)), "aten._local"),
    "an error": (factories.fails, "no such checkpoint"),
    "a cache": (factories.cached, "elsewhere than in the modules"),
    "a list": (changed(noted), "elsewhere than in the modules"),
    "a tuple": (
        changed(lambda layer: setattr(layer, "pair", (torch.ones(2), torch.ones(2)))),
        "elsewhere than in the modules",
    ),
    "a generator": (
        changed(lambda layer: layer.weight.data.normal_(generator=torch.Generator())),
        "it has a Generator of its own",
    ),
    "a graph": (changed(lambda layer: setattr(layer, "twice", 2 * layer.weight)), "has a graph"),
    "a hook": (changed(lambda layer: layer.weight.register_hook(lambda g: g)), "or a hook"),
    "a tensor of before": (
        changed(lambda layer: OUTSIDE.copy_(layer.bias[:3])),
        "a tensor that no operator has made",
    ),
}


@pytest.mark.parametrize("name", NOT_RECORDED)
def test_a_factory_that_cannot_be_recorded_is_refused(name: str) -> None:
    factories.table.cache_clear()
    factory, says = NOT_RECORDED[name]
    with pytest.raises(Exception, match=says) as caught:
        recorded(factory)
    assert isinstance(caught.value, NotRecordedError) or name in (
        "values",
        "trunc_normal_",
        "an error",
    )


def test_a_kept_tensor_without_memory_is_seen_in_the_whole_model() -> None:
    factories.table.cache_clear()
    with pytest.raises(NotRecordedError):
        recorded(factories.cached)
    assert lacks_memory(factories.cached())
    factories.table.cache_clear()
    assert not lacks_memory(factories.cached())


def test_what_numpy_has_is_copied_when_it_is_read() -> None:
    def make() -> nn.Sequential:
        numbers = np.ones((8, 8), dtype=np.float32)
        layer = nn.Linear(8, 8)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(numbers))
        numbers[:] = 2
        return nn.Sequential(layer)

    assert torch.equal(loaded(make)[0].weight, torch.ones(8, 8))
