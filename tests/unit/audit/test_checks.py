"""Parameters of a stage get the names that they have in the uncut model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pipegrad.audit.checks import match
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


LAST_TWO = ["2.weight", "2.bias", "3.weight", "3.bias"]


def test_equal_names_are_taken_with_any_values() -> None:
    model, whole = uncut(), uncut()
    stage = whole[2:]
    nn.init.zeros_(stage.get_parameter("2.weight"))
    stage.register_buffer("mask", torch.zeros(2))  # the uncut model does not have it
    found = match([stage], model)
    assert list(found.parameters) == LAST_TWO
    assert all(found.parameters[name] is stage.get_parameter(name) for name in LAST_TWO)
    assert found.of_modules == {name: name for name in LAST_TWO}
    assert found.buffers == {}
    # Each module of a rank has its own; one without parameters has none.
    found = match([whole[:1], whole[2:3]], model)
    assert list(found.parameters) == ["0.weight", "2.weight", "2.bias"]
    found = match([nn.Tanh()], model)
    assert (found.parameters, found.buffers, found.uses) == ({}, {}, {})


@pytest.mark.parametrize("name", ["module", "_orig_mod", "_checkpoint_wrapped_module"])
def test_names_of_wrappers_are_left_out(name: str) -> None:
    model = uncut()
    stage = wrapped(copy.deepcopy(model)[2:], name)
    nn.init.zeros_(stage.get_parameter(f"{name}.2.weight"))  # so values do not say the names
    found = match([stage], model)
    assert list(found.parameters) == LAST_TWO
    assert found.of_modules[f"{name}.3.bias"] == "3.bias"
    # Also wrappers inside of wrappers.
    inner = nn.Sequential()
    inner.add_module("2", wrapped(copy.deepcopy(model[2]), name))
    assert list(match([wrapped(inner, "module")], model).parameters) == ["2.weight", "2.bias"]


def test_a_slice_with_other_numbers_is_found_by_its_values() -> None:
    model = wrapped(nn.ModuleList(copy.deepcopy(uncut())), "layers")
    stage = nn.Sequential(*list(copy.deepcopy(uncut()))[2:])
    found = match([stage], model)
    assert list(found.parameters) == [f"layers.{name}" for name in LAST_TWO]
    assert found.of_modules["0.weight"] == "layers.2.weight"
    assert found.parameters["layers.2.weight"] is stage.get_parameter("0.weight")
    assert match([stage.bfloat16()], model).of_modules["1.bias"] == "layers.3.bias"
    # Its names and shapes are those of the first layers, too.
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    stage = nn.Sequential(*list(copy.deepcopy(model))[2:])
    assert list(match([stage], model).parameters) == LAST_TWO


LAYER = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("stages", "names", "words"),
    [
        ([nn.Sequential(nn.Linear(4, 4))], None, r"0: no runs .*'0\.weight', '0\.bias'.*`names`"),
        ([nn.Sequential(nn.Linear(4, 3))], None, "0: no runs"),
        ([nn.Sequential(LAYER)], None, "0: 2 runs"),
        ([uncut()[:1], nn.Linear(9, 9)], None, "1: "),
        ([LAYER], {"weight": "3.weight"}, r"0: `names` is wrong: it lacks \['bias'\]"),
        (
            [LAYER],
            {"weight": "3.weight", "bias": "9.bias"},
            r"0: .*has no \['9\.bias'\], but \['0\.weight'",
        ),
        (
            [nn.Linear(4, 3)],  # a shard that is no DTensor
            {"weight": "3.weight", "bias": "3.bias"},
            r"0: weight is \(3, 4\), and 3\.weight of the uncut model is \(4, 4\)",
        ),
    ],
)
def test_what_is_not_once_in_the_uncut_model_is_refused(
    stages: list[nn.Module], names: dict[str, str] | None, words: str
) -> None:
    model = uncut().extend([copy.deepcopy(LAYER), copy.deepcopy(LAYER)])
    with pytest.raises(PlanError, match=f"^module {words}"):
        match(copy.deepcopy(stages), model, names)


def test_a_buffer_is_no_parameter_of_its_shape() -> None:
    stage, inner = nn.Linear(4, 4), nn.Linear(4, 4)
    stage.load_state_dict(inner.state_dict())
    assert match([stage], wrapped(inner, "inner")).of_modules["bias"] == "inner.bias"
    del stage.bias
    stage.register_buffer("bias", inner.bias.detach())
    with pytest.raises(PlanError, match="no runs"):
        match([stage], wrapped(inner, "inner"))


def test_names_that_are_given_are_taken() -> None:
    stages = [wrapped(nn.Linear(4, 4), "a"), wrapped(nn.Linear(4, 4), "b")]
    known = {"a.weight": "1.weight", "a.bias": "1.bias", "b.weight": "2.weight", "b.bias": "2.bias"}
    found = match(stages, uncut(), known)
    assert list(found.parameters) == list(known.values())
    assert found.parameters["2.weight"] is stages[1].get_parameter("b.weight")
    assert found.of_modules == known


def test_a_tie_has_all_its_names_on_a_rank() -> None:
    model = Tied()
    stage = copy.deepcopy(model)
    found = match([stage], model)
    both = ("embedding.weight", "head.weight")
    assert found.uses == dict.fromkeys(both, both) | {
        name: (name,) for name in ("norm.weight", "norm.bias")
    }
    assert found.parameters["embedding.weight"] is found.parameters["head.weight"]
    # Between modules of a rank, on one of two ranks, and found by values.
    parts = [nn.ModuleDict({name: stage.get_submodule(name)}) for name in ("embedding", "head")]
    assert match(parts, model).uses["head.weight"] == both
    assert match(parts[1:], model).uses == {"head.weight": ("head.weight",)}
    found = match([stage], wrapped(model, "inner"))
    assert found.of_modules["head.weight"] == "inner.head.weight"
    assert found.uses["inner.head.weight"] == ("inner.embedding.weight", "inner.head.weight")


def test_buffers_have_names_too() -> None:
    model = Tied()
    stage = copy.deepcopy(model)
    found = match([stage], model)
    names = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert list(found.buffers) == names
    assert found.buffers["norm.running_mean"] is stage.get_buffer("norm.running_mean")
    # They may have other values where parameters are found by values.
    stage.get_buffer("norm.running_mean").add_(1)
    assert "inner.norm.running_mean" in match([stage], wrapped(model, "inner")).buffers
