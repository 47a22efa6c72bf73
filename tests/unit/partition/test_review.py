"""What models do between their layers: the cut model is right, or the cut is refused in words.

Each of these was silently wrong, broke the uncut model, or was refused with a riddle.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

import pipegrad
from pipegrad.errors import TopologyError
from tests.support.rounding import rounding

WIDTH = 6
LINEAR = partial(nn.Linear, WIDTH, WIDTH)


class Glue(nn.Module):
    """A first layer, blocks and a last layer; a test says what stands between them."""

    def __init__(
        self,
        between: Callable[[Any, Tensor], Tensor],
        block: Callable[[], nn.Module] = LINEAR,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.between = between
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Any:
        return self.between(self, x)


def chained(cut: Any, x: Tensor) -> Tensor:
    """Returns what the last stage returns. Stages have no memory in common, as on other ranks."""
    values, made = dict[str, Tensor](), tuple[Tensor, ...]()
    for stage in cut.stages(range(cut.num_stages)):
        *edges, _ = stage.inputs
        made = stage.forward([*(values[name].clone() for name in edges), {"x": x}])
        values |= zip(stage.outputs, made, strict=True)
    return made[0]


def check(true: nn.Module, way: int | list[str]) -> None:
    """Compares outputs and gradients with the uncut model's, on more rows than the sample has.

    Args:
        true: The uncut model.
        way: How many stages, or with which layers they begin.
    """
    true = true.double()
    model: Any = copy.deepcopy(true)
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    number, boundaries = (way, None) if isinstance(way, int) else (len(way) + 1, way)
    cut = pipegrad.cut(model, number, boundaries=boundaries, example={"x": x[:2]})
    expected, found = true(x.clone()), chained(cut, x.clone())
    bound = rounding(16, dtype=torch.float64)
    assert torch.equal(found, expected)
    expected.sum().backward()
    found.sum().backward()
    largest = max(p.grad.abs().max() for p in true.parameters() if p.grad is not None)
    for name, parameter in true.named_parameters():
        grad = model.get_parameter(name).grad
        assert (grad is None) is (parameter.grad is None), name
        if grad is not None and parameter.grad is not None:
            assert (grad - parameter.grad).abs().max() <= bound * largest, name


def through(model: Any, hidden: Tensor) -> Tensor:
    for block in model.blocks:
        hidden = torch.tanh(block(hidden))
    return hidden


def plain(model: Any, x: Tensor) -> Tensor:
    return model.last(through(model, model.first(x)))  # type: ignore[no-any-return]


def branch(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x)
    is_positive = bool((hidden > 0).any())
    hidden = through(model, hidden)
    return model.last(hidden * 3 if is_positive else hidden)  # type: ignore[no-any-return]


def scale(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x)
    largest = hidden.detach().abs().max().item()
    return model.last(through(model, hidden) * largest)  # type: ignore[no-any-return]


def unet(model: Any, x: Tensor) -> Tensor:
    skips = [x]
    for block in model.blocks[:2]:
        skips.append(torch.tanh(block(skips[-1])))
    hidden = model.first(skips.pop())
    for block in model.blocks[2:]:
        hidden = torch.tanh(block(hidden)) + skips.pop()
    return model.last(hidden)  # type: ignore[no-any-return]


def without_gradients(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        for block in model.blocks[:2]:
            x = block(x)
    return model.last(model.blocks[3](model.blocks[2](model.first(x))))  # type: ignore[no-any-return]


def overwritten_input(model: Any, x: Tensor) -> Tensor:
    x += 1.0
    hidden = through(model, model.first(x * 0.5))
    x[0] = 2.0
    return model.last(hidden + x)  # type: ignore[no-any-return]


def written(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x)
    hidden *= 3.0
    return model.last(through(model, hidden) + hidden)  # type: ignore[no-any-return]


def written_by_another(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x)
    hidden[:, :2] = model.blocks[0](x)[:, :2]  # into a view
    later = hidden
    for block in model.blocks[1:]:
        later = torch.tanh(block(later))
    return model.last(later + hidden)  # type: ignore[no-any-return]


class Sized(nn.Module):
    """Returns a size of the batch beside its output, as the layers of Swin do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, int, None, dict[str, list[Tensor]]]:
        return self.linear(x), len(x), None, {"skips": [x, x]}


def by_sizes(model: Any, x: Tensor) -> Tensor:
    hidden, rows, _, more = model.blocks[0](model.first(x))
    for block in model.blocks[1:]:
        hidden = torch.tanh(block(hidden)[0]) / rows + more["skips"][1]
    return model.last(hidden)  # type: ignore[no-any-return]


class Cache(nn.Module):
    """Keeps what it made, in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kept: Tensor | None = None
        self.by_width: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[1]
        if self.kept is None:
            self.kept = torch.full((width,), 2.0, dtype=x.dtype)
        if width not in self.by_width:
            self.by_width[width] = torch.full((width,), 3.0, dtype=x.dtype)
        return self.linear(x * self.kept) * self.by_width[width]  # type: ignore[no-any-return]


def test_a_cache_does_not_keep_what_the_cut_made() -> None:
    """The model kept a fake tensor, and failed, cut or uncut."""
    model = Glue(plain, Cache)
    check(model, 2)
    pipegrad.cut(model, 2, example={"x": torch.randn(2, WIDTH, dtype=torch.float64)})
    kept: Any = model.blocks[0]
    assert kept.kept is not None  # by check, which ran the model
    other: Any = Glue(plain, Cache)
    pipegrad.cut(other, 2, example={"x": torch.randn(2, WIDTH)})
    assert all(block.kept is None and not block.by_width for block in other.blocks)


def activated(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x)
    for block in model.blocks:
        hidden = block(hidden)
    return model.last(hidden)  # type: ignore[no-any-return]


def test_layers_may_work_in_place() -> None:
    """Activations with inplace=True are layers of ResNets; the run of the cut refused them."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))

    check(Glue(activated, block), 3)
    model: Any = Glue(activated)
    model.blocks = nn.ModuleList(
        layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))
    )
    check(model, ["blocks.0", "blocks.4"])


class Halving(nn.Module):
    """Halves the length of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)  # type: ignore[no-any-return]


def by_length(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x).t().unsqueeze(0)  # its length is the number of rows
    hidden = model.blocks[0](hidden)
    length = hidden.shape[2]
    for block in model.blocks[1:]:
        hidden = torch.tanh(block(hidden)) * length
    return model.last(hidden.mean(2))  # type: ignore[no-any-return]


EDGES = (["blocks.0", "blocks.2"], ["blocks.1", "last"])
Between = Callable[[Any, Tensor], Tensor]
RIGHT: dict[str, tuple[Between, Callable[[], nn.Module], list[int | list[str]]]] = {
    # A stage without the first layer decided by nan: it took the other branch.
    "a decision": (branch, LINEAR, [2, 4]),
    "a number that is read": (scale, LINEAR, [2, 4]),
    "skips": (unet, LINEAR, [2, 4]),
    "no gradient": (without_gradients, LINEAR, [2, 4]),
    # Stages of one rank have one batch: each of them added 1 to it.
    "input that is overwritten": (overwritten_input, LINEAR, [2, 4]),
    # Each stage runs it on memory of its own. CTRL scales the embeddings in place. In a stage
    # without them that was an error of torch: what stands for an output had the memory of one
    # number. In a stage that sends them it was silently wrong: others scaled them a second time.
    "hidden states that are overwritten": (written, LINEAR, [*EDGES]),
    "a view that is overwritten": (written_by_another, LINEAR, [*EDGES]),
    # Other stages had the number of the sample.
    "a number that a layer returns": (by_sizes, Sized, [2, 4]),
    # The last dimension of what a convolution returns was taken from the sample.
    "the length of another stage": (by_length, Halving, [3]),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_cut_computes_what_the_model_does(kind: str) -> None:
    between, block, ways = RIGHT[kind]
    for way in ways:
        check(Glue(between, block), way)


def test_what_a_layer_elsewhere_has_is_converted_with_the_stage() -> None:
    def between(model: Any, x: Tensor) -> Tensor:
        hidden = through(model, model.first(x))
        return model.last(hidden + torch.ones(WIDTH).to(model.first.weight.dtype))  # type: ignore[no-any-return]

    cut = pipegrad.cut(Glue(between), 3, example={"x": torch.randn(2, WIDTH)})
    for module in cut.modules.values():
        module.to(torch.bfloat16)
    assert chained(cut, torch.randn(3, WIDTH, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_what_code_between_layers_uses_is_converted_with_its_stage() -> None:
    """It kept the dtype and the device of the cut."""

    def between(model: Any, x: Tensor) -> Tensor:
        return model.last(through(model, model.first(x)) @ model.first.weight)  # type: ignore[no-any-return]

    cut = pipegrad.cut(Glue(between), 3, example={"x": torch.randn(2, WIDTH)})
    last = cut.modules[2].to(torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in last.named_parameters()}
    assert "first.weight" in dtypes
    assert {*dtypes.values()} == {torch.bfloat16}


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        x.mul_(2.0)
        return result


@dataclass
class Record:
    hidden: Tensor
    depth: int


class Recording(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Record:
        return Record(torch.tanh(self.linear(x)), 1)


def over_skip(model: Any, x: Tensor) -> Tensor:
    begin = model.first(x) * 1.0
    return model.last(through(model, begin) + begin)  # type: ignore[no-any-return]


def counted(model: Any, x: Tensor) -> Tensor:
    model.count += 1
    return model.last(through(model, model.first(x)) * model.count)  # type: ignore[no-any-return]


def recorded(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x)
    for block in model.blocks:
        hidden = block(hidden).hidden
    return model.last(hidden)  # type: ignore[no-any-return]


def dropped(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x)
    mask = F.dropout(torch.ones_like(hidden), 0.5, model.training)
    for block in model.blocks:
        hidden = block(hidden) * mask
    return model.last(hidden)  # type: ignore[no-any-return]


class Scaled(nn.Linear):
    """Has a buffer that code outside of it uses."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(()))


def scaled(model: Any, x: Tensor) -> Tensor:
    hidden = through(model, model.first(x)) * model.blocks[0].scale
    return model.last(hidden)  # type: ignore[no-any-return]


REFUSED = {
    "an input that a layer overwrites": (over_skip, Overwriting, "change a tensor in place"),
    "a counter in a buffer": (counted, Recording, "'count'"),
    "a dataclass": (recorded, Recording, "returns a Record"),
    "a buffer of a layer elsewhere": (scaled, Scaled, "uses buffer blocks.0.scale"),
    "dropout that is off now": (dropped, Recording, "random numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_stages_would_have_differently_is_refused(case: str) -> None:
    between, block, words = REFUSED[case]
    is_plain = between in (counted, dropped)
    model = Glue(between) if is_plain else Glue(between, block)
    model.register_buffer("count", torch.zeros(()))
    # A model that was loaded is in eval mode, and is trained later.
    with pytest.raises(TopologyError, match=words):
        pipegrad.cut(model.eval(), 2, example={"x": torch.randn(2, WIDTH)})


def test_hooks_of_layers_run_once_in_a_step_and_not_behind_the_cut() -> None:
    model: Any = Glue(plain)
    ran = list[int]()
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, number=number: ran.append(number))
    cut = pipegrad.cut(model, 4, example={"x": torch.randn(2, WIDTH)})
    ran.clear()
    chained(cut, torch.randn(3, WIDTH))
    assert ran == [0, 1, 2, 3]
    # A forward hook of the model itself changed what every stage sends.
    true: Any = Glue(plain)
    true.register_forward_hook(lambda _, inputs, output: output * 2)
    check(true, 3)


def test_a_module_dict_is_no_layer() -> None:
    """It has no forward, so nobody calls it."""

    def between(model: Any, x: Tensor) -> Tensor:
        hidden = model.more["a"](model.first(x))
        return model.last(through(model, model.more["b"](hidden)))  # type: ignore[no-any-return]

    model = Glue(between)
    model.more = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "ab"})
    check(model, ["more.b", "blocks.1"])


def test_layers_that_are_called_from_a_plain_list_are_layers() -> None:
    def between(model: Any, x: Tensor) -> Tensor:
        for layer in model.order:
            x = torch.tanh(layer(x))
        return x

    model: Any = Glue(between)
    model.order = [model.first, *model.blocks, model.last]
    check(model, 3)


def test_a_stage_does_not_keep_the_weights_of_others() -> None:
    """The own loss of a cut held the cut, and so all its stages, on the last stage's rank."""
    pytest.importorskip("transformers")
    from tests.support.partition.families import FAMILIES

    family = FAMILIES["Llama 3.2"]
    model = family.build()
    weights = {name: weakref.ref(p) for name, p in model.named_parameters()}
    cut = pipegrad.cut(model, 4)
    stages, loss_fn = cut.stages([0], own_loss=True), cut.loss_fn
    own = {name for name, _ in stages[0].module.named_parameters()}
    del cut, model
    gc.collect()
    assert {name for name, weight in weights.items() if weight() is not None} == own
    assert loss_fn is not None


def test_a_loss_that_was_given_to_the_model_is_not_taken_for_a_mean() -> None:
    """A sum was multiplied by the number of labels."""
    transformers = pytest.importorskip("transformers")
    from tests.support.partition.families import FAMILIES

    model: Any = FAMILIES["Llama 3.2"].build()
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert pipegrad.cut(model, 2).labels == ("labels",)
    model.loss_function = lambda logits, labels, **_: (logits.sum(), labels)[0]
    cut = pipegrad.cut(model, 2)
    assert cut.labels == ()
    assert cut.loss_fn is None
