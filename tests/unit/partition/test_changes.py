"""What layers hand on beside what they return: followed across stages, or refused in words."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegrad
from pipegrad.errors import PipegradError, StepError, TopologyError
from pipegrad.partition.cut_model import Cut
from pipegrad.partition.cutting.calls import Watch
from pipegrad.partition.cutting.flow import flow_of
from pipegrad.partition.cutting.layers import layers_of
from tests.support.partition.families import GROUPED, ROUTED
from tests.unit.partition.test_structural import TOKENS, WIDTH, backward, cut, linear, run

Hand = Callable[[Any, Tensor, Any], object]  # a layer, its balance loss, what it was given
EVERYWHERE = list[Tensor]()


class Expert(nn.Module):
    """A module inside of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3, dtype=torch.float64)
        self.l_aux: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        self.l_aux = share.mean((0, 1)).square().sum()
        out: Tensor = x * share.amax(-1, keepdim=True)
        return out


class Block(nn.Module):
    def __init__(self, number: int, hand: Hand) -> None:
        super().__init__()
        self.number, self.hand = number, hand
        self.linear, self.expert = linear(), Expert()
        self.history: list[Tensor] = []
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, box: Any) -> Tensor:
        x = self.expert(x)
        self.hand(self, self.expert.l_aux * (self.number + 1), box)
        return torch.tanh(self.linear(x))


class Balanced(nn.Module):
    """A model whose code adds up what its layers hand on."""

    def __init__(
        self, make: Callable[[], Any], hand: Hand, total: Callable[[Any, Any], Any]
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.make, self.total = make, total
        self.embed = nn.Embedding(7, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(Block(i, hand) for i in range(4))
        self.head = linear()
        self.experts = [m for m in self.modules() if isinstance(m, Expert)]

    def forward(self, tokens: Tensor) -> Any:
        x, box = self.embed(tokens), self.make()
        for layer in self.layers:
            x = layer(x, box)
        return self.head(x) + self.total(self, box)


@dataclass
class Losses:
    total: Any = 0.0
    parts: list[Tensor] = field(default_factory=list)


def set_item(layer: Any, loss: Tensor, box: Any) -> None:
    box[layer.number] = loss


def both(_: Any, loss: Tensor, box: Any) -> None:
    box.total = box.total + loss
    box.parts.append(loss)


def add_up(_: Any, loss: Tensor, box: Any) -> None:
    box[0] = box[0] + loss


def remembered(name: str, value: Callable[[Any, Tensor], Any]) -> Hand:
    return lambda layer, loss, _: setattr(layer, name, value(layer, loss))


def append(_: Any, loss: Tensor, box: Any) -> None:
    box.append(loss)


def appended(layer: Any, loss: Tensor, _: Any) -> None:
    layer.history.append(loss)


def taken(model: Any, _: Any) -> Any:
    total = sum(loss for layer in model.layers for loss in layer.history)
    for layer in model.layers:
        layer.history.clear()
    return total


def none() -> None:
    return None


def no_total(*_: Any) -> float:
    return 0.0


def of_items(_: Any, box: Any) -> Any:
    return sum(box.values())


def of_parts(_: Any, box: Any) -> Any:
    return box.total + 2 * sum(box.parts)


def nested(_: Any, box: Any) -> Any:
    return sum(number * losses[0] for number, losses in (entry["aux"] for entry in box))


# What is handed on: to what, how, and how it is read.
FOLLOWED: dict[str, tuple[Callable[[], Any], Hand, Callable[[Any, Any], Any]]] = {
    "list": (list, append, lambda _, box: sum(box)),
    "first of a list": (
        list,
        lambda layer, loss, box: box.insert(0, loss),
        lambda _, box: box[0] + 2 * box[3],
    ),
    "sum in a list": (lambda: [torch.zeros(())], add_up, lambda _, box: box[0]),
    "containers in a list": (
        list,
        lambda layer, loss, box: box.append({"aux": (layer.number, [loss]), "none": None}),
        nested,
    ),
    "set": (set, lambda layer, loss, box: box.add(loss), lambda _, box: sum(box)),
    "deque": (lambda: deque(maxlen=2), append, lambda _, box: sum(box)),
    "dict": (dict, set_item, of_items),
    "UserDict": (UserDict, set_item, of_items),
    "dataclass": (Losses, both, of_parts),
    "attribute": (
        none,
        remembered("aux", lambda _, loss: loss),
        lambda model, _: sum(layer.aux for layer in model.layers),
    ),
    "buffer": (
        none,
        remembered("mean", lambda _, loss: loss),
        lambda model, _: sum(layer.mean for layer in model.layers),
    ),
    "list of the layer": (none, appended, taken),
    "attribute of a module inside": (
        none,
        lambda *_: None,
        lambda model, _: sum(m.l_aux for m in model.modules() if hasattr(m, "l_aux")),
    ),
    "the same, from a plain list of modules": (
        none,
        lambda *_: None,
        lambda model, _: sum(m.l_aux for m in model.experts),
    ),
    "counter that nobody else reads": (
        none,
        remembered("calls", lambda layer, _: vars(layer).get("calls", 0) + 1),
        no_total,
    ),
    "moving mean that nobody else reads": (
        none,
        remembered("mean", lambda layer, loss: 0.9 * layer.mean + 0.1 * loss.detach()),
        no_total,
    ),
}


def check(model: nn.Module, parts: Cut, true: nn.Module) -> None:
    """Compares two microbatches with those of another model in one process."""
    for _ in range(2):
        expected = true(TOKENS)
        backward(expected.square().sum(), [])
        found, edges = run(parts, tokens=TOKENS)
        backward(found.square().sum(), edges)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    gradients = {name: parameter.grad for name, parameter in true.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("kind", FOLLOWED)
def test_what_layers_hand_on_is_that_of_one_process(kind: str, num_stages: int) -> None:
    model = Balanced(*FOLLOWED[kind])
    check(model, cut(model, num_stages), Balanced(*FOLLOWED[kind]))


def test_what_is_handed_on_in_training_alone_is_followed_by_a_cut_in_eval_mode() -> None:
    def hand(layer: Any, loss: Tensor, box: Any) -> None:
        if layer.training:
            box.append(loss)

    made = list, hand, lambda _, box: sum(box)
    model = Balanced(*made)
    parts = cut(model.eval(), 3)
    for part in parts.modules.values():
        part.train()
    check(model, parts, Balanced(*made))


def test_what_only_the_end_reads_goes_to_the_end_alone() -> None:
    parts = cut(Balanced(*FOLLOWED["list"]), 4, boundaries=["layers.1", "layers.2", "layers.3"])
    assert [part.inputs for part in parts._parts] == [
        (),
        ("layers.0",),
        ("layers.1",),
        ("layers.0:1", "layers.1:1", "layers.2", "layers.2:1"),
    ]


def shared(model: Balanced, attribute: str) -> Balanced:
    """Gives all layers the same dict."""
    box: dict[str, Tensor] = {}
    for part in (model, *model.layers):
        setattr(part, attribute, box)
    return model


def test_later_layers_read_what_earlier_ones_wrote_into_a_shared_dict() -> None:
    def hand(layer: Any, loss: Tensor, _: Any) -> None:
        if layer.number == 0:
            layer.memory["key"] = loss
        else:
            layer.seen = layer.memory["key"] * loss

    made = none, hand, lambda model, _: sum(layer.seen for layer in list(model.layers)[1:])
    model = shared(Balanced(*made), "memory")
    check(model, cut(model, 4), shared(Balanced(*made), "memory"))


@pytest.mark.parametrize("inside", [True, False])
def test_hooks_that_collect_run_on_layers_of_other_stages(inside: bool) -> None:
    """transformers collects hidden states so, for vision-language models, and router logits.

    Hooks hear a mask, too: BERT has one at the cut, and none in a microbatch without padding.
    """
    is_masked = [True]

    def hooked() -> Balanced:
        def make() -> Tensor | None:
            if not model.hooked:
                model.hooked = True
                for part in model.modules():
                    if isinstance(part, Expert if inside else Block):
                        part.register_forward_hook(lambda *a: collected.append((a[1][0], a[2])))
            collected.clear()
            return torch.ones(3) if is_masked else None

        collected = list[tuple[Tensor, Tensor]]()
        made = make, lambda *_: None, lambda *_: collected[1][0] * 2 + collected[2][1]
        model: Any = Balanced(*made)
        model.hooked = False
        return model  # type: ignore[no-any-return]

    model = hooked()
    # A closure is not copied with its model: the module that it asks is the uncut one.
    model.make()
    parts = cut(model, 3)
    is_masked.clear()
    check(model, parts, hooked())


REFUSED: dict[str, tuple[Callable[[], Any], Hand, Callable[[Any, Any], Any], str]] = {
    "a global": (
        EVERYWHERE.clear,
        lambda layer, loss, _: EVERYWHERE.append(loss),
        lambda *_: sum(EVERYWHERE),
        r"'layers\.0' hands a tensor to code outside of layers by a way that no stage can follow",
    ),
    "in place": (
        lambda: torch.zeros((), dtype=torch.float64),
        lambda layer, loss, box: box.add_(loss),
        lambda _, box: box,
        "change a tensor in place that they are given",
    ),
    "an object of no known kind": (
        list,
        lambda layer, loss, box: box.append(Losses(loss)),
        lambda _, box: sum(entry.total for entry in box),
        "'layers.0' hands on a Losses, and torch does not see the tensors inside",
    ),
    "a counter": (
        none,
        remembered("calls", lambda layer, _: vars(layer).get("calls", 0) + 1),
        lambda model, _: model.layers[0].calls,
        "'layers.0' changes its attribute 'calls', which is no tensor",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_followed_is_refused(kind: str) -> None:
    make, hand, total, words = REFUSED[kind]
    with pytest.raises(PipegradError, match=words):
        run(cut(Balanced(make, hand, total), 2), tokens=TOKENS)


def test_a_hook_that_hands_on_to_the_model_itself_is_refused() -> None:
    model: Any = Balanced(none, lambda *_: None, lambda model, _: model.seen)
    model.seen = torch.zeros(())
    handle = model.layers[0].register_forward_hook(lambda *a: setattr(model, "seen", a[2].mean()))
    with pytest.raises(TopologyError, match="by a reference to the model"):
        cut(model, 2)
    assert model.seen == 0  # it is put back
    handle.remove()
    assert cut(model, 2).num_stages == 2


def test_a_number_that_depends_on_values_is_nan_on_other_stages_and_no_wrong_number() -> None:
    made: Any = list, lambda _, loss, box: box.append(loss.item()), lambda _, box: sum(box)
    found, _ = run(cut(Balanced(*made), 2), tokens=TOKENS)
    assert found.isnan().all()
    unread = Balanced(made[0], made[1], no_total)
    found, _ = run(cut(unread, 2), tokens=TOKENS)
    torch.testing.assert_close(found, unread(TOKENS), rtol=0, atol=0)


class Asking(Balanced):
    """Code between layers asks layers, and what is inside of them."""

    def forward(self, tokens: Tensor) -> Any:
        out = super().forward(tokens)
        first: Any = self.layers[0]
        assert isinstance(first, Block)
        assert first.number + first.linear.in_features == WIDTH
        asked = [next(first.parameters()), first.linear.weight, first.get_buffer("mean")]
        assert {(x.device.type, x.dtype) for x in asked} == {("cpu", out.dtype)}
        names = [name for name, _ in self.named_parameters()]
        return out * len(names) + sum(p.numel() for p in self.parameters())


def test_layers_of_other_stages_answer_for_what_is_inside_of_them() -> None:
    model = Asking(none, lambda *_: None, no_total)
    parts = cut(model, 3)
    check(model, parts, Asking(none, lambda *_: None, no_total))
    # Outside of a forward a stage has its own alone.
    assert "layers.0.linear.weight" not in dict(parts.modules[2].named_parameters())
    for part in parts.modules.values():
        part.float()
    edge = parts.modules[0](tokens=TOKENS)
    assert edge.dtype == torch.float32
    last: Any = parts.modules[2]
    with pytest.raises(StepError, match="is on another stage, is called outside"):
        last.layers[0].expert(edge)


def test_what_a_recording_writes_is_taken_back() -> None:
    model = Balanced(*FOLLOWED["list of the layer"])
    watch = Watch(model, (), {})
    calls = flow_of(model, layers_of(model, 2), [{"tokens": TOKENS}]).calls
    assert watch.changes() == []
    assert [str(change) for change in calls[1].changes] == [
        "history of itself",
        "expert.l_aux of itself",
    ]


def test_hooks_that_a_forward_installs_are_there_once_however_often_the_model_is_cut() -> None:
    """The second cut of a vision-language model collected each hidden state twice, and failed."""
    collected = list[Tensor]()

    class Lazy(Balanced):
        def forward(self, tokens: Tensor) -> Any:
            if not hasattr(self, "is_hooked"):
                self.is_hooked = True
                for part in self.layers:
                    part.register_forward_hook(lambda *a: collected.append(a[2]))
            collected.clear()
            out = super().forward(tokens)
            return out + collected[1] + len(collected)

    model, true = (Lazy(none, lambda *_: None, no_total) for _ in range(2))
    for num_stages in (2, 4):
        parts = cut(model, num_stages)
        check(model, parts, true)
        stages: Any = parts.modules.values()
        for stage in stages:
            assert [len(part._forward_hooks) for part in stage.layers] == [1] * 4


def compare_with_uncut(model: Any, labels: Tensor, **more: Any) -> None:
    """A balance loss is that of the rows of a microbatch."""
    model = model.train()
    batch = {"input_ids": torch.randint(3, 61, (2, 9)), "labels": labels, "use_cache": False} | more
    loss = model(**batch).loss
    loss.backward()
    true = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    parts = pipegrad.cut(model, 3, example=more or None)
    found, edges = run(parts, **batch)
    torch.testing.assert_close(found.loss, loss, rtol=1e-6, atol=1e-6)
    backward(found.loss, edges)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, true[name], rtol=1e-5, atol=1e-6, msg=name)


def test_shared_keys_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}
    inputs = {"vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8}
    sizes = GROUPED | layers | inputs | {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(**sizes, global_head_dim=8)
    compare_with_uncut(transformers.Gemma4ForCausalLM(config), torch.randint(3, 61, (2, 9)))


@pytest.mark.parametrize("name", ROUTED)
def test_losses_of_routers_of_transformers(name: str) -> None:
    """Without labels NLLB reads no router logits, and its loss was nan; Switch was refused."""
    pytest.importorskip("transformers")
    family = ROUTED[name]
    more = {"output_router_logits": True} if name == "Switch" else {}
    compare_with_uncut(family.build(), torch.randint(3, 61, (2, 9)), **more)
