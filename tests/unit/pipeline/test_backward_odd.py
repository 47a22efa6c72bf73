"""Split backward of what is not plain autograd; how much is computed and kept; errors half way."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from pipegrad.errors import StepError
from pipegrad.pipeline.split_backward import backward_inputs, may_write
from pipegrad.pipeline.weight_gradients import WeightGradients
from tests.support.pipeline.graphs import (
    BETWEEN,
    LATE,
    WIDTH,
    Graph,
    Net,
    Storages,
    assert_split,
    compute,
    inputs_of,
    linear,
    marked_of,
    mlp,
    normal,
    num_products,
    preset_gradients,
)
from tests.support.versions import IS_OLD

again = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)


class Function(torch.autograd.Function):
    """A custom one, whose backward is not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.clamp(-0.5, 0.5)


class Scaled(torch.autograd.Function):
    """Takes a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum((0, 1))


class Nothing(torch.autograd.Function):
    """Has no gradient to give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None


apply: Any = Function.apply
scaled: Any = Scaled.apply
nothing: Any = Nothing.apply


def net(function: Callable[..., Any], **shapes: tuple[int, ...]) -> Net:
    return Net(function, **{name: normal(*shape) for name, shape in shapes.items()})


def hooked(num_uses: int, hook: Callable[[Tensor], Tensor]) -> Net:
    def function(m: Any, x: Tensor) -> Tensor:
        for _ in range(num_uses):
            x = x @ m.w
        return x

    module: Any = net(function, w=SQUARE)
    module.w.register_hook(hook)
    return module  # type: ignore[no-any-return]


def hooked_between(m: Any, x: Tensor) -> Tensor:
    weight = m.w * 2
    weight.register_hook(clamped)
    return x @ weight @ weight  # type: ignore[no-any-return]


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.5, 0.5)


def module_hooks() -> nn.Module:
    module = mlp()
    for layer in module:
        layer.register_full_backward_hook(lambda m, gradients, _: tripled(gradients))
        layer.register_full_backward_pre_hook(lambda m, gradients: tripled(gradients))
    return module


def tripled(gradients: Any) -> tuple[Tensor]:
    (gradient,) = gradients
    return (gradient * 3,)


def hooks_on_tensors(m: Any, x: Tensor) -> Tensor:
    found: Tensor = m.a(x)
    found.register_hook(lambda gradient: gradient * 3)
    found.retain_grad()
    return m.a(found)  # type: ignore[no-any-return]


def compiled(module: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend="aot_eager")


def on_cpu(m: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return m.a(x)  # type: ignore[no-any-return]


def selective(m: Any, x: Tensor) -> Tensor:
    saved = [torch.ops.aten.addmm.default]
    return again(m.a, x, context_fn=partial(create_selective_checkpoint_contexts, saved))  # type: ignore[no-any-return]


SQUARE = (WIDTH, WIDTH)
PACKED = ("saved-tensor hooks (checkpointing, offloading)",)
COMPILED, REENTRANT = ("CompiledFunctionBackward",), ("CheckpointFunctionBackward",)

FUNCTION_OF_A_WEIGHT = (
    ("an autograd function of a weight, before torch 2.13", "FunctionBackward") if IS_OLD else ()
)
graphs = [
    Graph("checkpoint", 0, lambda: Net(lambda m, x: again(m.a, x), a=mlp()), early=PACKED),
    Graph("eager next to a checkpoint", 3, lambda: Net(
        lambda m, x: m.b(again(m.a, x)), a=mlp(), b=mlp()), early=PACKED),
    Graph("selective checkpoint", 0, lambda: Net(selective, a=mlp()), early=PACKED),
    Graph("a weight from a checkpoint", 1, lambda: net(
        lambda m, x: x @ again(torch.sin, m.w), w=SQUARE)),
    Graph("reentrant", 0, lambda: Net(
        lambda m, x: m.b(reentrant(m.a, x)), a=mlp(), b=mlp()), early=REENTRANT),
    Graph("dropped weights, checkpointed", 0, lambda: net(lambda m, x: again(
        lambda y: torch.relu(y @ F.dropout(m.w, 0.4)) @ F.dropout(m.v, 0.3), x),
        w=SQUARE, v=SQUARE), early=PACKED),
    Graph("saved on CPU", 0, lambda: Net(on_cpu, a=mlp()), early=PACKED),
    Graph("custom of a parameter", 1, lambda: Net(
        lambda m, x: m.a(scaled(x, m.s)), a=linear(), s=normal(WIDTH)),
        early=("ScaledBackward",)),
    Graph("custom without", 2, lambda: Net(lambda m, x: m.a(apply(m.a(x))), a=linear())),
    Graph("custom of a weight alone", 0 if IS_OLD else 1, lambda: net(
        lambda m, x: x @ apply(m.w), w=SQUARE), early=FUNCTION_OF_A_WEIGHT),
    Graph("custom without gradients", 2, lambda: Net(
        lambda m, x: nothing(m.a(x)) + m.b(m.b(x)), a=linear(), b=linear())),
    Graph("compiled", 0, lambda: compiled(mlp()), early=COMPILED),
    Graph("compiled next to an eager one", 3, lambda: Net(
        lambda m, x: m.b(m.a(x)), a=mlp(), b=compiled(mlp())), early=COMPILED),
    Graph("compiled weight", 0, lambda: Net(lambda m, x: x @ m.f(m.w), f=compiled(
        Net(lambda m, w: w.sin())), w=normal(*SQUARE)), early=COMPILED),
    Graph("hook on a weight", 1, lambda: hooked(1, clamped)),
    Graph("module hooks", 3, module_hooks),
    Graph("tensor hooks", 2, lambda: Net(hooks_on_tensors, a=linear())),
    Graph("a hook that scales", 1, lambda: hooked(1, lambda g: g.sum() * g)),
    Graph("a gradient in the memory of what waits", 1, lambda: Net(
        lambda m, x: m.a(x) + m.p.view(x.shape), a=linear(bias=False), p=normal(10, WIDTH))),
    Graph("hook on a weight used twice", 2, lambda: hooked(2, clamped)),
    Graph("hook on what a weight becomes", 2, lambda: net(hooked_between, w=SQUARE)),
    Graph("custom of a weight used twice", 0 if IS_OLD else 2, lambda: net(
        lambda m, x: (w := apply(m.w), x @ w @ w)[1], w=SQUARE), early=FUNCTION_OF_A_WEIGHT),
]  # fmt: skip
# Dynamo asks tensors for their gradients, and torch warns that they are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


every = pytest.mark.parametrize("graph", graphs, ids=str)


@every
def test_gradients_are_those_of_a_whole_backward_and_what_can_wait_does(graph: Graph) -> None:
    assert_split(graph, (LATE, False), (BETWEEN, True), (BETWEEN, False))


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(3)
    return normal(4, WIDTH).requires_grad_()


# What is computed, and how often.


def test_a_checkpoint_computes_anew_once_in_all(x: Tensor) -> None:
    module = mlp()
    module.register_forward_hook(lambda *_: calls.append("forward"), always_call=True)
    calls: list[str] = []
    waiting = inputs_of(again(module, x).sin(), x)
    compute(waiting)

    assert len(calls) == 2


def test_a_weight_made_by_a_product_is_made_once_for_all_its_uses() -> None:
    graph = Graph("merged with a frozen one", 1, lambda: Net(
        lambda m, x: (w := m.f.weight @ m.p, x @ w @ w @ w)[1],
        f=linear().requires_grad_(requires_grad=False), p=normal(*SQUARE)))  # fmt: skip

    assert num_products(graph, is_split=True) == num_products(graph, is_split=False)


def test_a_parameter_that_a_reentrant_checkpoint_makes_a_weight_with_does_not_wait_untold(
    x: Tensor,
) -> None:
    m: Any = net(lambda m, x: x @ reentrant(lambda w: w * m.s, m.w), w=SQUARE, s=(1,))
    waiting = inputs_of(m(x), x)

    assert m.s.grad is not None or any(p.parameter is m.s for p in waiting.products)


# Hooks.


@pytest.mark.parametrize("preset", [False, True])
def test_hooks_after_accumulation_see_the_gradient_and_may_change_the_parameter(
    x: Tensor, *, preset: bool
) -> None:
    layer = linear()
    before = layer.weight.detach().clone()
    layer.weight.register_post_accumulate_grad_hook(lambda p: p.sub_(p.grad))
    if preset:
        preset_gradients(layer)
    compute(inputs_of(layer(x), x, marked=marked_of(layer)))

    assert torch.allclose(layer.weight, before - x.sum(0))


@pytest.mark.parametrize("is_held", [False, True])
def test_hooks_on_the_node_that_accumulates_are_called(x: Tensor, *, is_held: bool) -> None:
    """Nobody can be asked for them; but who has them holds the node."""
    layer, seen = linear(), list[int]()
    node: Any = torch.autograd.graph.get_gradient_edge(layer.weight).node
    node.register_hook(lambda *_: seen.append(1))
    if not is_held:
        del node
    preset_gradients(layer)
    marked = marked_of(layer)
    waiting = inputs_of(layer(x), x, marked=marked)
    assert layer.weight.grad is not None
    assert [may_write([p], layer.weight.grad) for p in waiting.products] == [not is_held]
    compute(waiting)

    assert seen == [1] * is_held
    assert torch.allclose(layer.weight.grad, x.sum(0))


class Mistake(Exception):  # noqa: N818
    pass


def fail(*_: Any) -> Any:
    raise Mistake


def test_an_error_of_a_hook_after_accumulation_comes_out_as_it_is(x: Tensor) -> None:
    layer = linear()
    layer.weight.register_post_accumulate_grad_hook(fail)
    preset_gradients(layer)
    waiting = inputs_of(layer(x), x, marked=marked_of(layer))
    with pytest.raises(Mistake):
        compute(waiting)


def test_a_weights_hook_may_remove_itself_and_add_another(x: Tensor) -> None:
    """The hooks were iterated over while they changed, and the backward failed."""
    layer, calls = linear(), list[str]()

    def once(_: Tensor) -> None:
        handle.remove()
        layer.weight.register_post_accumulate_grad_hook(lambda _: calls.append("later"))
        calls.append("once")

    handle = layer.weight.register_post_accumulate_grad_hook(once)
    layer.weight.register_post_accumulate_grad_hook(lambda _: calls.append("always"))
    preset_gradients(layer)
    for _ in range(2):
        marked = marked_of(layer)
        compute(inputs_of(layer(x), x, marked=marked))
    assert calls == ["once", "always", "always", "later"]


def test_a_gradient_or_an_operand_that_is_changed_meanwhile_is_an_error(x: Tensor) -> None:
    y, gradient = linear()(x), torch.ones(4, WIDTH, dtype=torch.float64)
    waiting = backward_inputs([y], [gradient], {id(p) for p in linear().parameters()})
    assert waiting.products == []  # of another layer
    layer = linear()
    waiting = backward_inputs([layer(x)], [gradient], {id(p) for p in layer.parameters()})
    gradient.add_(1)
    with pytest.raises(StepError, match="changed in place"):
        compute(waiting)
    operand = x * 1
    waiting = inputs_of(linear()(operand), x)
    operand.detach().zero_()
    with pytest.raises(StepError, match=r"\(4, 6\), .* changed in place"):
        compute(waiting)


# Gradients that are there, and what is kept.


zeros = partial(torch.zeros, dtype=torch.float64)
gradients: dict[str, Tensor] = {
    "strided": zeros(3 * WIDTH, 2 * WIDTH)[::3, ::2].T,
    "requires_grad": zeros(SQUARE, requires_grad=True),
    "sparse": zeros(SQUARE).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("gradient", list(gradients.values()), ids=list(gradients))
def test_adds_to_any_gradient(gradient: Tensor, x: Tensor) -> None:
    layer = linear()
    layer.weight.grad = gradient
    compute(inputs_of(layer(x), x, marked=marked_of(layer)))

    assert torch.allclose(layer.weight.grad, x.sum(0))


def test_a_weight_that_is_meta_has_a_meta_gradient() -> None:
    layer = nn.Linear(WIDTH, WIDTH, device="meta")
    compute(inputs_of(layer(torch.ones(4, WIDTH, device="meta"))))

    assert layer.weight.grad is not None
    assert layer.weight.grad.is_meta


# What is kept.


def kept(module: nn.Module, x: Tensor, *, keep_root: bool = False) -> tuple[list[str], list[str]]:
    """Returns what is alive after I, and after W."""
    preset_gradients(module)
    marked = marked_of(module)
    known = [x, *module.parameters(), *(p.grad for p in module.parameters() if p.grad is not None)]
    with Storages() as storages:
        y = module(x)
        waiting = inputs_of(y, x, marked=marked)
        root = y if keep_root else None
        x.grad = None
        del y
        after_inputs = storages.alive(*known)
        compute(waiting)
        after_weights = storages.alive(*known, *(() if root is None else (root,)))
    return after_inputs, after_weights


def test_operands_alone_are_kept_and_nothing_of_a_checkpoint(x: Tensor) -> None:
    module = nn.Sequential(linear(), nn.GELU(), linear(), nn.GELU())
    # The operand of the second layer, and the gradients of both.
    assert kept(module, x) == (["gelu", "gelu_backward", "gelu_backward"], [])
    layers = nn.Sequential(nn.Tanh(), linear(), nn.GELU())
    assert kept(Net(lambda m, x: again(m.a, x), a=layers), x) == ([], [])
    # Nor what is eager before it.
    assert kept(Net(lambda m, x: again(m.a, x.exp().sin().exp()), a=layers), x) == ([], [])
    # Who keeps an output keeps nothing else.
    _, after = kept(nn.Sequential(linear(), nn.GELU(), linear()), x, keep_root=True)
    assert after == []


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_failed_step_keeps_nothing(x: Tensor, *, is_checkpointed: bool) -> None:
    module = nn.Sequential(linear(), nn.GELU(), linear(), nn.GELU())
    preset_gradients(module)
    known = [x, *module.parameters(), *(p.grad for p in module.parameters() if p.grad is not None)]
    with Storages() as storages:
        inputs_of(again(module, x) if is_checkpointed else module(x), x)
        x.grad = None

        assert storages.alive(*known) == []


# A step.


def step_of(weights: WeightGradients, module: nn.Module, x: Tensor) -> None:
    """Takes a step of two microbatches, as the executor does."""
    weights.begin()
    for _ in range(2):
        y = module(x)
        weights.compute(0, weights.backward(0, [y], [torch.ones_like(y)], parameters_of(module)))


def parameters_of(module: nn.Module) -> dict[int, nn.Parameter]:
    return {id(parameter): parameter for parameter in module.parameters()}


def weights_of_no_sync() -> WeightGradients:
    sync: Any = None  # nothing becomes final
    return WeightGradients(sync)


@pytest.mark.parametrize("is_held", [False, True])
def test_a_hook_on_a_node_counts_from_the_next_step_on(x: Tensor, *, is_held: bool) -> None:
    """It was not called in the first step after it was added: nodes were marked too early."""
    layer, seen = linear(), list[int]()
    weights = weights_of_no_sync()
    preset_gradients(layer)
    step_of(weights, layer, x)
    node: Any = torch.autograd.graph.get_gradient_edge(layer.weight).node
    node.register_hook(lambda *_: seen.append(1))
    if not is_held:
        del node
    step_of(weights, layer, x)
    assert len(seen) == 2 * is_held
    assert layer.weight.grad is not None
    assert torch.allclose(layer.weight.grad, 4 * x.sum(0))


@contextlib.contextmanager
def collections() -> Iterator[list[int]]:
    """Notes the generations of objects that Python looks through for garbage."""
    found = list[int]()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def test_a_walk_makes_python_look_for_no_garbage(x: Tensor) -> None:
    """Of 2000 layers it makes some 20000 objects, and keeps three for each."""
    layers = nn.Sequential(*(linear() for _ in range(2000)))
    weights = weights_of_no_sync()
    preset_gradients(layers)
    step_of(weights, layers, x)
    with collections() as begun:
        weights.begin()
    y = layers(x)
    _held = [parameter.grad for parameter in layers.parameters()]  # Python's objects of them
    before = len(gc.get_objects())
    with collections() as found:
        products = weights.backward(0, [y], [torch.ones_like(y)], parameters_of(layers))
    kept = len(gc.get_objects()) - before
    # At most once, when it is allowed again, and then through the youngest objects alone.
    assert begun in ([], [0])
    assert found in ([], [0])
    del y
    gc.collect()
    assert len(gc.get_objects()) - before <= 3.1 * len(layers) < kept
    weights.compute(0, products)


@pytest.mark.parametrize("is_enabled", [False, True])
def test_garbage_is_looked_for_afterwards_as_before(x: Tensor, *, is_enabled: bool) -> None:
    layer = linear()
    y = layer(x)
    y.register_hook(fail)
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        weights, ones = weights_of_no_sync(), [torch.ones_like(y)]
        with pytest.raises(Mistake):
            weights.backward(0, [y], ones, parameters_of(layer))
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
