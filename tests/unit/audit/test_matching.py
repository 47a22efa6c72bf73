"""Parameters of a stage get the names that they have in the uncut model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pipegrad.audit.matching import match
from pipegrad.errors import PlanError


class Tied(nn.Module):
    """An embedding and a head with one weight, and a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(x)))  # type: ignore[no-any-return]


def uncut() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), *(nn.Linear(4, 4) for _ in range(3)))


def wrapped(module: nn.Module, name: str) -> nn.Module:
    outer = nn.Module()
    outer.add_module(name, module)
    return outer


def test_equal_names_are_taken() -> None:
    model = uncut()
    stage = copy.deepcopy(model)[2:]
    found = match([stage], model)
    assert list(found.parameters) == ["2.weight", "2.bias", "3.weight", "3.bias"]
    assert found.parameters["3.bias"] is stage.get_parameter("3.bias")
    assert found.of_modules == {name: name for name in found.parameters}


def test_equal_names_are_taken_with_other_values() -> None:
    model = uncut()
    stage = copy.deepcopy(model)[2:]
    nn.init.zeros_(stage.get_parameter("2.weight"))
    assert match([stage], model).parameters["2.weight"] is stage.get_parameter("2.weight")


@pytest.mark.parametrize("name", ["module", "_orig_mod", "_checkpoint_wrapped_module"])
def test_names_of_wrappers_are_left_out(name: str) -> None:
    model = uncut()
    stage = wrapped(copy.deepcopy(model)[2:], name)
    nn.init.zeros_(stage.get_parameter(f"{name}.2.weight"))  # so values do not say the names
    found = match([stage], model)
    assert list(found.parameters) == ["2.weight", "2.bias", "3.weight", "3.bias"]
    assert found.of_modules[f"{name}.3.bias"] == "3.bias"


def test_wrappers_inside_of_wrappers_are_left_out() -> None:
    model = uncut()
    inner = nn.Sequential()
    inner.add_module("2", wrapped(copy.deepcopy(model[2]), "_checkpoint_wrapped_module"))
    assert list(match([wrapped(inner, "module")], model).parameters) == ["2.weight", "2.bias"]


def test_a_slice_with_other_numbers_is_found_by_its_values() -> None:
    model = wrapped(nn.ModuleList(copy.deepcopy(uncut())), "layers")
    stage = nn.Sequential(*list(copy.deepcopy(uncut()))[2:])
    found = match([stage], model)
    assert list(found.parameters) == [
        "layers.2.weight", "layers.2.bias", "layers.3.weight", "layers.3.bias"
    ]  # fmt: skip
    assert found.of_modules["0.weight"] == "layers.2.weight"
    assert found.parameters["layers.2.weight"] is stage.get_parameter("0.weight")


def test_a_slice_that_begins_again_at_0_is_found_by_its_values() -> None:
    """Its names and shapes are those of the first layers, too."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    stage = nn.Sequential(*list(copy.deepcopy(model))[2:])
    assert list(match([stage], model).parameters) == ["2.weight", "2.bias", "3.weight", "3.bias"]


def test_a_slice_is_found_by_values_of_another_dtype() -> None:
    model = wrapped(uncut(), "layers")
    stage = nn.Sequential(*list(copy.deepcopy(uncut()))[2:]).bfloat16()
    assert match([stage], model).of_modules["1.bias"] == "layers.3.bias"


def test_several_modules_of_a_rank_are_matched_each() -> None:
    model = uncut()
    whole = copy.deepcopy(model)
    found = match([whole[:1], whole[2:3]], model)
    assert list(found.parameters) == ["0.weight", "2.weight", "2.bias"]


def test_a_module_without_parameters_has_no_names() -> None:
    found = match([nn.Tanh()], uncut())
    assert (found.parameters, found.buffers, found.uses) == ({}, {}, {})


def test_values_that_no_run_has_are_refused() -> None:
    stage = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(PlanError, match=r"^module 0: no runs .*'0\.weight', '0\.bias'.*`names`"):
        match([stage], uncut())


def test_shapes_that_no_run_has_are_refused() -> None:
    with pytest.raises(PlanError, match="no runs"):
        match([nn.Sequential(nn.Linear(4, 3))], uncut())


def test_a_buffer_is_no_parameter_of_its_shape() -> None:
    stage, inner = nn.Linear(4, 4), nn.Linear(4, 4)
    stage.load_state_dict(inner.state_dict())
    assert match([stage], wrapped(inner, "inner")).of_modules["bias"] == "inner.bias"
    del stage.bias
    stage.register_buffer("bias", inner.bias.detach())
    with pytest.raises(PlanError, match="no runs"):
        match([stage], wrapped(inner, "inner"))


def test_values_that_two_runs_have_are_refused() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(nn.Embedding(7, 4), layer, copy.deepcopy(layer))
    with pytest.raises(PlanError, match="2 runs"):
        match([nn.Sequential(copy.deepcopy(layer))], model)


def test_the_module_that_does_not_match_is_named_by_its_index() -> None:
    model = uncut()
    with pytest.raises(PlanError, match=r"^module 1: "):
        match([copy.deepcopy(model)[:1], nn.Linear(9, 9)], model)


def test_names_that_are_given_are_taken() -> None:
    layer = nn.Linear(4, 4)
    found = match([layer], uncut(), {"weight": "3.weight", "bias": "3.bias"})
    assert found.parameters["3.weight"] is layer.weight
    assert found.of_modules == {"weight": "3.weight", "bias": "3.bias"}


def test_names_that_are_given_may_be_those_of_all_modules() -> None:
    stages = [wrapped(nn.Linear(4, 4), "a"), wrapped(nn.Linear(4, 4), "b")]
    known = {"a.weight": "1.weight", "a.bias": "1.bias", "b.weight": "2.weight", "b.bias": "2.bias"}
    assert list(match(stages, uncut(), known).parameters) == list(known.values())


def test_names_that_are_incomplete_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^module 0: `names` is wrong: it lacks \['bias'\]"):
        match([nn.Linear(4, 4)], uncut(), {"weight": "3.weight"})


def test_names_that_the_uncut_model_does_not_have_are_refused() -> None:
    with pytest.raises(PlanError, match=r"has no \['9\.bias'\], but \['0\.weight'"):
        match([nn.Linear(4, 4)], uncut(), {"weight": "3.weight", "bias": "9.bias"})


def test_a_tie_inside_of_a_module_has_all_its_names() -> None:
    model = Tied()
    stage = copy.deepcopy(model)
    found = match([stage], model)
    both = ("embedding.weight", "head.weight")
    assert found.uses == dict.fromkeys(both, both) | {
        name: (name,) for name in ("norm.weight", "norm.bias")
    }
    assert found.parameters["embedding.weight"] is found.parameters["head.weight"]


def test_a_tie_between_modules_of_a_rank_has_all_its_names() -> None:
    model = Tied()
    stage = copy.deepcopy(model)
    parts = [nn.ModuleDict({name: stage.get_submodule(name)}) for name in ("embedding", "head")]
    assert match(parts, model).uses["head.weight"] == ("embedding.weight", "head.weight")


def test_a_tie_of_two_ranks_has_one_name_on_each() -> None:
    model = Tied()
    stage = nn.ModuleDict({"head": copy.deepcopy(model.head)})
    assert match([stage], model).uses == {"head.weight": ("head.weight",)}


def test_a_tie_is_found_by_values_too() -> None:
    model = wrapped(Tied(), "inner")
    stage = copy.deepcopy(model.get_submodule("inner"))
    found = match([stage], model)
    assert found.of_modules["head.weight"] == "inner.head.weight"
    assert found.uses["inner.head.weight"] == ("inner.embedding.weight", "inner.head.weight")


def test_buffers_have_names_too() -> None:
    model = Tied()
    stage = copy.deepcopy(model)
    found = match([stage], model)
    names = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert list(found.buffers) == names
    assert found.buffers["norm.running_mean"] is stage.get_buffer("norm.running_mean")


def test_buffers_may_have_other_values_if_parameters_are_found_by_values() -> None:
    model = wrapped(Tied(), "inner")
    stage = copy.deepcopy(model.get_submodule("inner"))
    stage.get_buffer("norm.running_mean").add_(1)
    assert "inner.norm.running_mean" in match([stage], model).buffers


def test_a_buffer_that_the_uncut_model_does_not_have_is_left_out() -> None:
    model = uncut()
    stage = copy.deepcopy(model)[2:]
    stage.register_buffer("mask", torch.zeros(2))
    found = match([stage], model)
    assert found.buffers == {}
    assert len(found.parameters) == 4


def test_modules_have_the_names_of_the_uncut_model() -> None:
    model = wrapped(uncut(), "layers")
    stage = nn.Sequential(*list(copy.deepcopy(uncut()))[2:])
    modules = match([stage], model).modules
    assert modules["layers.2"] is stage[0]
    assert modules["layers.3"] is stage[1]


def test_modules_without_parameters_have_names_if_they_are_equal() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    stage = wrapped(copy.deepcopy(model), "module")
    assert match([stage], model).modules["1"] is stage.get_submodule("module.1")
