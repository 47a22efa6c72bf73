"""Structural cuts of small models: what is a layer, what flows, and what a stage runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.nn.utils.parametrizations import weight_norm

from pipegrad import cut as cut_of
from pipegrad.errors import StepError, TopologyError
from pipegrad.partition.cut_model import Cut
from pipegrad.partition.cutting.calls import Source
from pipegrad.partition.cutting.copies import twin, without_memory
from pipegrad.partition.cutting.flow import flow_of
from pipegrad.partition.cutting.layers import has_state, is_weighty, layers_of
from tests.support.partition.families import FAMILIES

WIDTH = 4


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


class Chain(nn.Module):
    """A list of layers between an embedding and a head, which has the embedding's weight."""

    def __init__(self, number: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(7, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(linear() for _ in range(number))
        self.head = nn.Linear(WIDTH, 7, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def between(self, x: Tensor, tokens: Tensor, scale: float) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x * scale

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Any:
        return self.head(self.between(self.embed(tokens), tokens, scale))


class Skipping(Chain):
    """The first layer's output is read again by each later layer."""

    def between(self, x: Tensor, tokens: Tensor, scale: float) -> Tensor:
        first = x = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            x = layer(x) + scale * first
        return x


class Twice(Chain):
    """Each layer is called twice."""

    def between(self, x: Tensor, tokens: Tensor, scale: float) -> Tensor:
        for layer in [*self.layers, *self.layers]:
            x = F.gelu(layer(x)) * scale
        return x


class Gated(Chain):
    """Code between layers uses a parameter that is in no layer, at the beginning and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def between(self, x: Tensor, tokens: Tensor, scale: float) -> Tensor:
        return super().between(x * self.gate, tokens, scale) * self.gate


class Pair(nn.Module):
    """A layer that also returns a table of no input's shape, which later layers read."""

    def __init__(self, *, makes: bool) -> None:
        super().__init__()
        self.linear = linear()
        self.makes = makes

    def forward(self, x: Tensor, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.makes:
            table = x.mean(-1, keepdim=True) @ x.mean(-1)[:, None]
        assert table is not None
        return self.linear(table @ x), table


class Tables(Chain):
    """Code between layers masks the table, as attention does.

    The sample has as many tokens as the table has columns. The table of another stage was taken for
    one of as many columns in all batches, and could not be masked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair(makes=i == 0) for i in range(3))

    def between(self, x: Tensor, tokens: Tensor, scale: float) -> Tensor:
        x, table = x * scale, None
        for layer in self.layers:
            x, table = layer(x, table)
            table = table + torch.ones(2 * tokens.shape[1:], dtype=x.dtype).tril()
        return x


class Packed(Chain):
    """Texts are padded between LSTMs, which hand on the lengths of a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        options: Any = {"batch_first": True, "dtype": torch.float64}
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, **options) for _ in range(3))

    def between(self, x: Tensor, tokens: Tensor, scale: float) -> Tensor:
        rows, length = tokens.shape
        lengths = torch.arange(rows) % length + 1
        for layer in self.layers:
            packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            x, _ = rnn.pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=length)
        return x * scale


class Helper(nn.Module):
    """It has no forward, but methods that use what is inside, as Funnel's attention has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = linear(), nn.LayerNorm(WIDTH, dtype=torch.float64)

    def projected(self, x: Tensor) -> Tensor:
        projected: Tensor = self.norm(self.linear(x))
        return projected + x.mean()


class Aside(Chain):
    """The forward of a layer is called, and not the layer, as in SqueezeBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper()

    def between(self, x: Tensor, tokens: Tensor, scale: float) -> Tensor:
        x = self.helper.projected(x)
        for layer in self.layers:
            x = F.gelu(layer.forward(x))
        return self.helper.projected(x) * scale


class Noisy(Chain):
    def between(self, x: Tensor, tokens: Tensor, scale: float) -> Tensor:
        noise = torch.rand(WIDTH, dtype=torch.float64)
        for layer in self.layers:
            x = layer(x) + noise
        return x


class Reaching(Chain):
    """Code between layers uses a parameter of a layer."""

    def between(self, x: Tensor, tokens: Tensor, scale: float) -> Tensor:
        return super().between(x, tokens, scale) + self.layers[0].bias  # type: ignore[operator]


class Deep(Chain):
    """Code between layers uses a parameter that is inside of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(linear()) for _ in range(3))

    def between(self, x: Tensor, tokens: Tensor, scale: float) -> Tensor:
        return super().between(x, tokens, scale) + self.layers[0][0].bias  # type: ignore[index,no-any-return]


class Normed(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(weight_norm(linear()) for _ in range(3))


class Sums(NamedTuple):
    total: Tensor
    parts: tuple[Tensor, Tensor]


class Summing(Chain):
    def forward(self, tokens: Tensor, scale: float = 1.0) -> Sums:
        out = super().forward(tokens, scale)
        return Sums(out, (out.sum(), out.mean()))


class Reversed(torch.autograd.Function):
    """Runs layers without a graph, and all of them again in its own backward, as Reformer does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x


class Reversible(Chain):
    def between(self, x: Tensor, tokens: Tensor, scale: float) -> Any:
        return Reversed.apply(x, self.layers)  # type: ignore[no-untyped-call]


TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 0, 1], [2, 2, 6]])


class Seeing(Chain):
    """A tower of two layers sees images, if there are any; dropping skips a layer for no reason."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(linear() for _ in range(2))

    def forward(
        self,
        tokens: Tensor,
        scale: float = 1.0,
        images: Tensor | None = None,
        drop: bool = False,
    ) -> Any:
        x = self.embed(tokens)
        if images is not None and len(images):
            for layer in self.tower:
                images = layer(images)
            x = x + images.sum(0)
        for layer in list(self.layers)[drop:]:
            x = F.gelu(layer(x))
        return self.head(x * scale)


SAMPLE = {"tokens": torch.ones(2, 5, dtype=torch.long)}


def cut(model: nn.Module, num_stages: int = 3, **options: Any) -> Cut:
    return cut_of(model, num_stages, how="structural", example=SAMPLE, **options)


def run(parts: Cut, **batch: Any) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """Returns what stages make of a batch, and the ends of their edges: sent, received."""
    sent, edges = dict[str, Tensor](), list[tuple[Tensor, Tensor]]()
    returned: Any = None
    for part in parts._parts:
        received = []
        for name in part.inputs:
            leaf = sent[name].detach().requires_grad_(sent[name].is_floating_point())
            edges.append((sent[name], leaf))
            received.append(leaf)
        returned = part.module(*received, **batch)
        values = returned if isinstance(returned, tuple) else (returned,)
        sent |= dict(zip(part.outputs, values, strict=False))
    return returned, edges


def backward(loss: Tensor, edges: list[tuple[Tensor, Tensor]]) -> None:
    """Goes back through all stages."""
    loss.backward()
    for sent, received in reversed(edges):
        if received.grad is not None and sent.requires_grad:
            sent.backward(received.grad, retain_graph=True)


@pytest.mark.parametrize(
    "kind", [Chain, Skipping, Twice, Gated, Tables, Aside, Reaching, Normed, Packed]
)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_compute_what_the_model_computes_for_any_shape(
    kind: Callable[[], nn.Module], num_stages: int
) -> None:
    model = kind()
    parts = cut(model, num_stages)
    for tokens in (TOKENS, TOKENS[:1, :2], TOKENS):
        true = model(tokens, scale=0.5)
        true.square().sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        model.zero_grad()
        found, edges = run(parts, tokens=tokens, scale=0.5)
        torch.testing.assert_close(found, true, rtol=0, atol=0)
        backward(found.square().sum(), edges)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-13, atol=1e-13)
        model.zero_grad()


def test_stages_have_the_names_and_tensors_of_the_model() -> None:
    model = Gated()
    parts = cut(model, 4)
    names = [set(part.state_dict()) for part in parts.modules.values()]
    assert set().union(*names) == set(model.state_dict())
    for part in parts.modules.values():
        for name, parameter in part.named_parameters():
            assert parameter is model.get_parameter(name)
    assert parts.tied == [["embed.weight", "head.weight"], ["gate"]]
    assert ["gate" in held for held in names] == [False, True, False, True]
    # A value goes to every later stage that reads it.
    assert [part.inputs for part in cut(Skipping(), 5)._parts] == [
        *((), ("embed",), ("layers.0",), ("layers.0", "layers.1"), ("layers.0", "layers.2")),
    ]
    # A layer that is called twice is on both stages.
    parts = cut(Twice(), 2, boundaries=["layers.0#1"])
    for stage in (0, 1):
        held = parts.modules[stage].state_dict()
        assert {"layers.0.weight", "layers.2.bias"} <= set(held)
    assert ["layers.0.weight"] in parts.tied


def test_the_model_is_as_before_and_can_be_cut_again() -> None:
    model = Chain()
    before, state = [*model.modules()], torch.get_rng_state()
    first, second = cut(model, 2), cut(model, 4)
    assert [*model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    for parts in (first, second):
        torch.testing.assert_close(run(parts, tokens=TOKENS)[0], model(TOKENS), rtol=0, atol=0)
    with torch.device("meta"):
        without = Chain()
    assert cut(without, 3).boundaries == cut(Chain(), 3).boundaries
    # Parts of what a model returns keep their names.
    summing = Summing()
    found, _ = run(cut(summing, 2), tokens=TOKENS)
    assert isinstance(found, Sums)
    torch.testing.assert_close(found, summing(TOKENS), rtol=0, atol=0)


def test_experts_without_memory_are_cut_in_float32() -> None:
    """Fake tensors of float32 were refused by torch's grouped product, and so was the model."""
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = FAMILIES["Mixtral"].build()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert cut_of(model, 2, by="time").num_stages == 2


def test_shapes_that_no_input_tells_are_computed_once_for_each_shape() -> None:
    """A T5 layer was run on fake tensors for each microbatch: a step took ten times as long."""
    parts, sizes = cut(Tables(), 4), list[int]()
    memory = vars(parts.modules[3])["_pipegrad_run"]._shapes
    for tokens in (TOKENS, TOKENS, TOKENS[:2], TOKENS):
        run(parts, tokens=tokens)
        sizes.append(len(memory))
    assert sizes[0] == sizes[1] > 0
    assert sizes[2] == sizes[3] == 2 * sizes[0]


@pytest.mark.parametrize(
    ("kind", "boundaries", "message"),
    [
        (Noisy, [3], "draws random numbers outside of its layers"),
        (Deep, [3], r"uses layers\.0\.0\.bias, which is inside of a layer of another stage"),
        (Chain, [1, 2, 3, 4, 5], "has 5 layers that a stage can begin with, fewer than 6 stages"),
        (
            lambda: torch.compile(Chain(), backend="eager"),
            [3],
            r"wrapped: remove torch\.compile, and cut the model itself\. Compile its stages",
        ),
        (lambda: nn.DataParallel(Chain()), [3], r"remove DataParallel, .* gradients of replicas"),
        # Stages trained none of them, without a word.
        (Reversible, [3], r"^layer 'layers\.0' is called inside of .* Reversed,"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    kind: Callable[[], nn.Module], boundaries: list[int | str], message: str
) -> None:
    original = vars(torch.autograd.Function)["apply"]
    with pytest.raises(TopologyError, match=message):
        cut(kind(), len(boundaries) + 1, boundaries=boundaries)
    assert vars(torch.autograd.Function)["apply"] is original


def test_a_model_that_fails_on_its_sample_says_so_and_where() -> None:
    with pytest.raises(TopologyError, match=r"fails on a sample of \{'tokens': \(2, 5\)\}.*Give"):
        cut_of(Chain(), 2, example=SAMPLE | {"scale": "two"})
    with pytest.raises(TopologyError, match="how is 'traced', expected one of"):
        cut_of(Chain(), 2, how="traced", example=SAMPLE)


def test_random_numbers_of_one_stage_are_drawn_there() -> None:
    model = Noisy()
    parts = cut(model, 2, boundaries=["layers.1"])
    torch.manual_seed(3)
    true = model(TOKENS)
    torch.manual_seed(3)
    edge = parts.modules[0](tokens=TOKENS)
    torch.manual_seed(3)
    torch.testing.assert_close(parts.modules[1](edge, tokens=TOKENS), true, rtol=0, atol=0)


def test_a_step_that_calls_other_layers_is_refused() -> None:
    parts = cut(Seeing(), 2)
    with pytest.raises(StepError, match=r"calls layer 'layers\.1' where it called 'layers\.0'"):
        parts.modules[0](tokens=TOKENS, drop=True)
    with pytest.raises(StepError, match=r"the stage takes .* and was given 0 values"):
        parts.modules[1](tokens=TOKENS)
    # The stage goes on after an error.
    found, _ = run(parts, tokens=TOKENS)
    assert not found.isnan().any()


class Long(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y, table = super().forward(x), {"table": x} if x.shape[1] > 2 else {}
        kinds = {"none": (y, table.get("table")), "short": (y, *table.values())}
        return kinds.get(str(self.kind), {"y": y} | table)


class Asking(Chain):
    """A layer also returns a table if the text is long. Code asks for it, and may read it."""

    def between(self, x: Tensor, tokens: Tensor, scale: float) -> Tensor:
        found = self.layers[0](x)
        x, *tables = found.values() if isinstance(found, dict) else found
        x = self.layers[2](self.layers[1](x))
        if not tables or tables[0] is None:
            return x
        return 2 * x if scale == 1 else x + tables[0]


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize(("sample", "other"), [(1, 3), (5, 1)])
@pytest.mark.parametrize("kind", ["none", "short", "dict"])
def test_what_a_layer_returns_sometimes_is_refused(
    kind: str, sample: int, other: int, scale: float
) -> None:
    """Stages without the layer went on with what the sample had, and the loss was another one."""
    model, tokens = Asking(), torch.ones(2, sample, dtype=torch.long)
    vars(layer := Long(WIDTH, WIDTH, dtype=torch.float64))["kind"] = kind
    model.layers[0] = layer
    parts = cut_of(model, 3, example={"tokens": tokens, "scale": scale})
    run(parts, tokens=tokens, scale=scale)
    with pytest.raises(StepError, match=r"returns .*tensor.*, and returned .* when the model was"):
        run(parts, tokens=TOKENS[:, :other], scale=scale)


@pytest.mark.parametrize("trained", ["all", "layers", "tower"])
@pytest.mark.parametrize("num_stages", [2, 4, 7])
def test_a_microbatch_without_images_skips_their_layers(trained: str, num_stages: int) -> None:
    model = Seeing()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained == "all" or name.startswith(trained))
    images = torch.randn(3, WIDTH, dtype=torch.float64)
    parts = cut_of(model, num_stages, example=SAMPLE | {"images": images})
    kinds = set[tuple[bool, ...]]()
    for batch in ({"images": images}, {}, {"images": images[:0]}):
        true = model(TOKENS, **batch)
        found, edges = run(parts, tokens=TOKENS, **batch)
        torch.testing.assert_close(found, true, rtol=0, atol=0)
        # A value always or never has a gradient.
        kinds.add(tuple(sent.requires_grad for sent, _ in edges))
    assert len(kinds) == 1


def test_what_an_example_lacked_is_in_the_refusal() -> None:
    images = torch.randn(3, WIDTH, dtype=torch.float64)
    with pytest.raises(StepError, match=r"That example had no \['images'\]"):
        run(cut(Seeing(), 2), tokens=TOKENS, images=images)


def test_the_flow_says_which_outputs_each_call_needs() -> None:
    model = Skipping()
    flow = flow_of(model, layers_of(model, 2), [SAMPLE])
    assert [call.name for call in flow.calls] == [
        "embed",
        *(f"layers.{i}" for i in range(3)),
        "head",
    ]
    assert [sorted(call.origin.sources) for call in flow.calls] == [
        [],
        [Source(0, 0)],
        [Source(1, 0)],
        [Source(1, 0), Source(2, 0)],
        [Source(1, 0), Source(3, 0)],
    ]
    assert [call.flops for call in flow.calls[1:4]] == [2 * 2 * 5 * WIDTH * WIDTH] * 3
    assert flow.sample == {"tokens": (2, 5)}


def test_layers_are_the_members_of_lists_and_what_has_state_beside_them() -> None:
    model = Chain()
    assert [*layers_of(model, 3)] == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    nested: Any = nn.Module()
    nested.blocks = nn.ModuleList(nn.Sequential(linear(), nn.ReLU()) for _ in range(2))
    assert [*layers_of(nested, 2)] == ["blocks.0", "blocks.1"]
    nested.blocks[1].append(linear())
    assert [*layers_of(nested, 3)] == [
        *("blocks.0.0", "blocks.0.1"),
        *("blocks.1.0", "blocks.1.1", "blocks.1.2"),
    ]
    assert is_weighty(nn.Sequential(nn.Dropout()))
    assert not has_state(nn.Dropout())
    assert not is_weighty(nn.ReLU())


def test_parametrized_modules_have_twins() -> None:
    """copy.copy refuses them, so models of speech with weight_norm were not cut."""
    model = weight_norm(linear())
    copied = twin(model)
    assert type(copied) is type(model)
    assert dict(copied.named_parameters()) == dict(model.named_parameters())
    described = without_memory(model)
    assert all(parameter.is_meta for parameter in described.parameters())
