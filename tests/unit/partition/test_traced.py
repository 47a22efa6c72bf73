"""Stages of a traced model compute what the model computes, one after the other, with gradients."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipegrad.errors import StepError, TopologyError
from pipegrad.partition.part import Part
from pipegrad.partition.traced.model import TracedModel
from tests.support.rounding import rounding

ROWS, WIDTH = 4, 6


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (ROWS, WIDTH)), generator=torch.Generator().manual_seed(7))


def only_x() -> dict[str, object]:
    return {"x": x()}


class Run:
    """One forward of all parts, each with leaves of its own, as on ranks of their own."""

    def __init__(self, parts: Sequence[Part], batch: Mapping[str, object]) -> None:
        self.stages = list[tuple[dict[str, Tensor], dict[str, Tensor]]]()
        sent = dict[str, Tensor]()
        for part in parts:
            leaves = {name: sent[name].detach().clone() for name in part.inputs}
            for name, leaf in leaves.items():
                leaf.requires_grad_(sent[name].requires_grad)
            self.returned = part.module(*leaves.values(), **batch)
            made = dict[str, Tensor]()
            if part is not parts[-1]:
                one = isinstance(self.returned, Tensor)
                values = (self.returned,) if one else self.returned
                made = dict(zip(part.outputs, values, strict=True))
                assert not made.keys() & sent.keys()
            sent |= made
            self.stages.append((leaves, made))

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        gradients = dict[str, Tensor]()
        for leaves, made in reversed(self.stages):
            roots = [name for name in made if name in gradients]
            if roots:
                torch.autograd.backward([made[n] for n in roots], [gradients[n] for n in roots])
            for name, leaf in leaves.items():
                if leaf.grad is not None:
                    known = gradients.get(name)
                    gradients[name] = leaf.grad if known is None else known + leaf.grad


def loss_of(returned: Any) -> Tensor:
    if isinstance(returned, Mapping):
        loss: Tensor = returned["loss"]
        return loss
    first = returned if isinstance(returned, Tensor) else returned[0]
    return first.float().square().mean()


def cut(
    model: nn.Module, batch: Mapping[str, object], layers: Sequence[str], boundaries: Sequence[int]
) -> list[Part]:
    return TracedModel(model, batch, layers).parts(boundaries)


def compare(
    model: nn.Module,
    batch: Mapping[str, object],
    layers: Sequence[str],
    boundaries: Sequence[int],
    *,
    tolerance: float = rounding(ROWS * WIDTH),
) -> list[Part]:
    """Compares the parts with a copy of the uncut model: loss, gradients, buffers, names."""
    whole = copy.deepcopy(model)
    parts = cut(model, batch, layers, boundaries)
    own = dict(model.named_parameters(remove_duplicate=False))
    for part in parts:
        for name, parameter in part.module.named_parameters(remove_duplicate=False):
            assert parameter is own[name]
    assert {n for p in parts for n in p.module.state_dict()} == set(whole.state_dict())

    torch.manual_seed(3)
    loss = loss_of(whole(**copy.deepcopy(dict(batch))))  # it may change its input
    loss.backward()
    torch.manual_seed(3)
    run = Run(parts, batch)
    torch.testing.assert_close(loss_of(run.returned), loss, rtol=tolerance, atol=tolerance)
    run.backward(loss_of(run.returned))
    expected = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    assert {n for n, p in model.named_parameters() if p.grad is not None} == set(expected)
    # Some gradients are zero but for rounding, such as that of the bias of keys.
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(own[name].grad, gradient, rtol=0, atol=tolerance * scale)
    for name, buffer in whole.named_buffers():
        for part in parts:
            if name in dict(part.module.named_buffers()):
                torch.testing.assert_close(part.module.get_buffer(name), buffer)
    return parts


# --- models


class Chain(nn.Sequential):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*(layers or [nn.Linear(WIDTH, WIDTH) for _ in range(4)]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x

    def at(self, number: int, x: Tensor) -> Tensor:
        result: Tensor = self[number](x)
        return result


class UNet(nn.Module):
    """Skips of all lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x).tanh()
            skips.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], dim=-1))
        return x


class EncoderDecoder(nn.Module):
    """Every stage of the decoder reads the encoder's output, and all a tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, WIDTH)
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.decoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.shared.weight
        self.table: Tensor
        self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> dict[str, Any]:
        keep = mask[:, :, None] * self.table[: ids.shape[1], None].cos()
        encoded = self.shared(ids)
        for layer in self.encoder:
            encoded = layer(encoded * keep).tanh()
        x = self.shared(labels.clamp(min=0).roll(1, 1))
        for layer in self.decoder:
            x = layer(x + encoded.mean(1, keepdim=True)).tanh() * keep
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "cache": None, "rest": (encoded, 3)}


def ids_and_labels() -> dict[str, object]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 11, (ROWS, 8), generator=generator)
    labels = ids.clone()
    labels[0, 5:] = -100
    mask = torch.ones(ROWS, 8)
    mask[0, 5:] = 0
    return {"ids": ids, "labels": labels, "mask": mask}


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Chain(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.block(x)
        return self.block(self.other(self.block(first))), first


class Regions(nn.Module):
    """Layers in one region of no_grad, then in one of autocast: boundaries lie inside of both."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.cast = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            for layer in self.frozen:
                x = layer(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.frozen[0](x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.cast:
                x = layer(x)
        return self.head(x.float())


class Writes(nn.Module):
    """Masks, values and inputs that are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        mask = torch.zeros(ROWS, WIDTH)
        mask[:, 1:] = 1
        x += 1
        h = self.layers[0](x)
        mask[0].fill_(2)
        h = self.layers[1](h.relu_())
        h[:, 0] = 0
        h = nn.functional.relu(h * mask, inplace=True)
        return self.layers[2](h) * mask + x


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.steps: Tensor
        self.calls: Tensor
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        h = self.norm(self.a(x)) * self.steps
        self.calls = self.calls + 1
        return self.drop(self.b(h)) * self.steps


class Noise(Chain):
    """Random numbers without a parameter, which two stages read: they are sent."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        first, second = self.at(1, self.at(0, x) + noise).chunk(2)
        return self.at(2, first) * noise[:2] + second


class Unused(nn.Module):
    """Parameters that no operator reads, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.layers[1].register_parameter("extra", nn.Parameter(torch.ones(1)))
        self.scale = torch.linspace(1, 2, WIDTH)

    def forward(self, x: Tensor, tree: dict[str, Any], flag: bool = False) -> Any:
        h = self.layers[0](x if flag else -x) * self.scale + tree["bias"][0]
        return self.layers[1](h) + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


Case = tuple[Callable[[], nn.Module], Callable[[], dict[str, object]], Sequence[str], Sequence[int]]
MODELS: dict[str, Case] = {
    "a chain, 2": (Chain, only_x, "0123", [2]),
    "a chain, 4": (Chain, only_x, "0123", [1, 2, 3]),
    "a U-Net, 2": (UNet, only_x, ["down.0", "down.2", "up.1"], [1]),
    "a U-Net, 4": (UNet, only_x, ["down.1", "down.2", "up.0", "up.2"], [1, 2, 3]),
    "encoder-decoder, 2": (EncoderDecoder, ids_and_labels, ["encoder.1", "decoder.0"], [1]),
    "encoder-decoder, 4": (
        EncoderDecoder,
        ids_and_labels,
        ["shared", "encoder.1", "decoder.0", "decoder.1", "head"],
        [1, 3, 4],
    ),
    "called three times": (Twice, only_x, ["block", "other"], [1, 2, 3]),
    "regions": (Regions, only_x, ["frozen.0", "frozen.1", "cast.0", "cast.1", "head"], [1, 2, 4]),
    "regions, all": (Regions, only_x, ["frozen.1", "cast.0", "cast.1", "head"], [1, 2, 3]),
    "in place": (Writes, only_x, ["layers.0", "layers.1", "layers.2"], [1, 2]),
    "buffers": (Norms, only_x, ["a", "b"], [1]),
    "noise and chunks": (Noise, only_x, "012", [1, 2]),
    "unused parameters": (
        Unused,
        lambda: {"tree": {"bias": (x(), None)}, "x": x(), "flag": True},
        ["layers.0", "layers.1"],
        [1],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_parts_compute_what_the_model_computes(name: str) -> None:
    make, batch, layers, boundaries = MODELS[name]
    torch.manual_seed(0)
    compare(make(), batch(), layers, boundaries)


@pytest.mark.parametrize("name", ["a U-Net, 4", "encoder-decoder, 4"])
def test_parts_are_exact_in_float64(name: str) -> None:
    make, batch, layers, boundaries = MODELS[name]
    torch.manual_seed(0)
    given: dict[str, object] = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in batch().items()
    }
    tolerance = rounding(ROWS * WIDTH, dtype=torch.float64)
    compare(make().double(), given, layers, boundaries, tolerance=tolerance)


def test_edges_have_names_of_layers_and_skip_stages() -> None:
    parts = cut(UNet(), only_x(), ["down.1", "down.2", "up.0", "up.2"], [1, 2, 3])
    assert [(part.inputs, part.outputs) for part in parts] == [
        ((), ("down.0", "down.1")),
        (("down.1",), ("down.2",)),
        (("down.0", "down.1", "down.2"), ("up.1",)),
        (("up.1",), ("output",)),
    ]
    # Masks and tables are computed again, and not sent.
    make, batch, layers, boundaries = MODELS["encoder-decoder, 4"]
    parts = cut(make(), batch(), layers, boundaries)
    inputs = [(), ("encoder.0",), ("encoder.1", "shared"), ("encoder.1", "decoder.0")]
    assert [part.inputs for part in parts] == inputs
    buffers = [[name for name, _ in part.module.named_buffers()] for part in parts]
    assert buffers == [["table"], [], ["table"], ["table"]]
    assert parts[-1].outputs == ("loss", "logits", "rest")


def test_parts_are_made_again_and_copies_have_parameters_of_their_own() -> None:
    torch.manual_seed(0)
    model = Chain()
    traced = TracedModel(model, only_x(), "0123")
    for boundaries in ([], [1], [3], [1, 2, 3]):
        returned = Run(traced.parts(boundaries), only_x()).returned
        torch.testing.assert_close(returned, model(x()), rtol=0, atol=0)
    (part,) = traced.parts([])
    other = copy.deepcopy(part.module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(x=x()).abs().max() == 0
    assert part.module(x=x()).abs().max() > 0


def test_calls_are_in_order_of_first_use() -> None:
    traced = TracedModel(Twice(), only_x(), ["other", "block.0", "block"])
    first, second = ["block", "block.0", "block#1", "block.0#1"], ["block#2", "block.0#2"]
    assert traced.calls == (*first, "other", *second)


def test_evaluation_mode_is_that_of_the_model() -> None:
    torch.manual_seed(0)
    model = Norms()
    parts = cut(model, only_x(), ["a", "b"], [1])
    before = {n: b.clone() for n, b in model.named_buffers()}
    for part in parts:
        part.module.eval()
    returned = Run(parts, only_x()).returned
    torch.testing.assert_close(model.norm.running_mean, before["norm.running_mean"])
    assert model.norm.num_batches_tracked == 0
    for name, buffer in before.items():
        model.get_buffer(name).copy_(buffer)
    torch.testing.assert_close(returned, model.eval()(x()), rtol=0, atol=0)


class OtherInTraining(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * 2 if self.training else x


def test_a_model_that_runs_other_code_in_evaluation_is_refused_there() -> None:
    first, _ = cut(OtherInTraining(), only_x(), "0123", [2])
    first.module.eval()
    with pytest.raises(StepError, match="traced in training mode, and runs other code"):
        first.module(x=x())
    parts = cut(OtherInTraining().eval(), only_x(), "0123", [2])
    assert not parts[0].module.training
    Run(parts, only_x())
    parts[0].module.train()
    with pytest.raises(StepError, match="traced in evaluation mode"):
        Run(parts, only_x())


def test_labels_may_be_the_tensor_of_the_ids() -> None:
    """torch.export takes one tensor under two names for one input, the last of them."""
    batch = ids_and_labels()
    same = batch | {"labels": batch["ids"]}
    traced = TracedModel(EncoderDecoder(), same, ["encoder.1", "decoder.0"])
    model = traced._model
    expected = model(**batch)["loss"]
    torch.testing.assert_close(Run(traced.parts([1]), batch).returned["loss"], expected)


def test_a_model_on_the_meta_device_is_traced_and_then_filled() -> None:
    torch.manual_seed(0)
    whole = Unused()
    with torch.device("meta"):
        model = Unused()
    model.scale = whole.scale
    batch = {"x": x(), "tree": {"bias": [x()]}}
    parts = cut(model, batch, ["layers.0", "layers.1"], [1])
    assert all(p.is_meta for p in model.parameters())
    for part in parts:
        part.module.to_empty(device="cpu")
        part.module.load_state_dict(whole.state_dict(), strict=False)
    torch.testing.assert_close(Run(parts, batch).returned, whole(**batch), rtol=0, atol=0)


# --- what is refused


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": x(8, WIDTH)}, r"'x' is \(8, 6\) torch.float32.* \(4, 6\) torch.float32"),
        ({"x": x().double()}, r"\(4, 6\) torch.float64.*how='structural'"),
        ({}, "'x' is missing"),
        ({"x": None}, r"'x' is None, and in the example .* \(4, 6\)"),
        ({"x": x(), "mask": x()}, "without the input 'mask'"),
    ],
    ids=["more rows", "a dtype", "missing", "None", "unknown"],
)
def test_a_batch_unlike_the_example_is_refused(batch: dict[str, object], message: str) -> None:
    first, _ = cut(Chain(), only_x(), "0123", [2])
    with pytest.raises(StepError, match=message):
        first.module(**batch)


def test_a_constant_of_the_example_stays() -> None:
    example = {"x": x(), "tree": {"bias": [x()]}, "flag": True}
    first, _ = cut(Unused(), example, ["layers.0", "layers.1"], [1])
    first.module(x=x(), tree={"bias": [x()]})
    with pytest.raises(StepError, match=r"'flag' is False, and in the example .* True"):
        first.module(x=x(), tree={"bias": [x()]}, flag=False)


class Rounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def no_grad_in_autocast(self: Chain, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            h = self.at(0, x)
        return self.at(1, x + h)


def hook_on_tensor(self: Chain, x: Tensor) -> Tensor:
    h = self.at(0, x)
    h.register_hook(torch.neg)
    return self.at(1, h)


def inference_mode(self: Chain, x: Tensor) -> Tensor:
    with torch.inference_mode():
        h = self.at(0, x)
    return self.at(1, x + h.clone())


def changes_skip(self: Chain, x: Tensor) -> Tensor:
    first = self.at(0, x)
    view = first[:, :2]
    second = self.at(1, first)
    view += 1
    return self.at(2, second + first) + first


def changes_input(self: Chain, x: Tensor) -> Tensor:
    h = self.at(1, self.at(0, x))
    x += h
    return self.at(2, x)


class HookOnModule(Chain):
    def __init__(self) -> None:
        super().__init__()
        self[1].register_full_backward_hook(lambda module, gradients, _: None)


class NormTwice(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.num_batches_tracked = None  # the statistics alone are enough

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.at(1, self.norm(self.at(0, x))))


class ChangesAttribute(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.scale.add_(1)
        return super().forward(x * self.scale)


def chain(forward: Callable[[Any, Tensor], Any]) -> Callable[[], nn.Module]:
    return type("Odd", (Chain,), {"forward": forward})


run = Chain.forward
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "data decides": (
        chain(lambda self, x: run(self, x if x.sum() > 0 else -x)),
        "torch.export cannot trace Odd: .*how='structural'",
    ),
    "autograd.Function": (
        chain(lambda self, x: Rounds.apply(run(self, x))),  # type: ignore[no-untyped-call]
        "Rounds, an autograd.Function.*loses its backward",
    ),
    "reentrant checkpoint": (
        chain(lambda self, x: checkpoint(partial(run, self), x, use_reentrant=True)),
        "use_reentrant=False",
    ),
    "no_grad in autocast": (chain(no_grad_in_autocast), "no_grad.. inside of torch.autocast"),
    "a hook of a tensor": (
        chain(hook_on_tensor),
        "Tensor.register_hook, and torch.export loses it",
    ),
    "a hook of a module": (HookOnModule, "BackwardHookFunction"),
    "inference mode": (
        chain(inference_mode),
        r"torch.inference_mode\(\), and torch.export loses it",
    ),
    "random numbers of Python": (
        chain(lambda self, x: run(self, x * random.random())),
        "random numbers, and a trace has those of one",
    ),
    "a norm of two stages": (NormTwice, r"changes 'norm.running.*', and stages \[0, 1\] use it"),
    "a skip that changes": (
        chain(changes_skip),
        "stage 1 changes a value of an earlier stage in place",
    ),
    "an input that changes": (chain(changes_input), "changes its input 'x' in place"),
    "an attribute that changes": (ChangesAttribute, "register it as a buffer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_go_wrong_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(TopologyError, match=message):
        cut(make(), only_x(), ["0", "1", "2"], [1, 2] if name.startswith("a skip") else [1])


def test_boundaries_and_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(TopologyError, match=r"Chain has no modules \['4'\]"):
        TracedModel(Chain(), only_x(), ["0", "4"])
    traced = TracedModel(Chain(), only_x(), "0123")
    for boundaries in ([0], [4], [2, 2], [2, 1]):
        with pytest.raises(TopologyError, match="do not cut 4 calls"):
            traced.parts(boundaries)
    nested = TracedModel(Twice(), only_x(), ["block", "block.0"])
    with pytest.raises(TopologyError, match="stage 0 makes nothing that a later stage takes"):
        nested.parts([1])
