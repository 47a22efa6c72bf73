"""Modules whose backward is split, against the same ones whose backward is not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipegrad.pipeline.split_backward import (
    Waiting,
    accumulate,
    backward_inputs,
    by_parameter,
    mark,
)
from tests.support.rounding import rounding

WIDTH = 6
MICROBATCHES = 3

# What is run of which microbatch, in order: forward, I, W.
LATE = "F0 I0 F1 I1 F2 I2 W0 W1 W2"
BETWEEN = "F0 F1 I0 I1 W1 F2 W0 I2 W2"
AT_ONCE = "F0 I0 W0 F1 I1 W1 F2 I2 W2"


class Net(nn.Module):
    """One expression of an input, and of layers and parameters."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        for name, part in parts.items():
            given = part if isinstance(part, nn.Module | nn.Parameter) else nn.Parameter(part)
            setattr(self, name, given)
        self._function = function

    def forward(self, *values: Any) -> Any:
        return self._function(self, *values)


class Block(nn.Module):
    """A block of GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.LayerNorm(WIDTH, dtype=torch.float64) for _ in range(2))
        self.qkv, self.projection = linear(WIDTH, 3 * WIDTH), linear()
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.first(x)).view(*x.shape[:2], 6, -1).transpose(1, 2).chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return found


def linear(inputs: int = WIDTH, outputs: int = WIDTH, **options: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=torch.float64, **options)


def mlp() -> nn.Sequential:
    return nn.Sequential(linear(), nn.GELU(), linear(), nn.Dropout(0.3), linear(), nn.Tanh())


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)


@dataclass
class Graph:
    """A stage, and what it is given.

    Attributes:
        waits: How many products of a microbatch wait.
        early: What kinds of functions have the gradients of their parameters early.
    """

    name: str
    waits: int
    build: Callable[[], nn.Module]
    given: Callable[[], Sequence[Tensor]] = lambda: [normal(2, 5, WIDTH)]
    early: tuple[str, ...] = ()
    error: float = rounding(4096, dtype=torch.float64)  # more terms than any of its sums has

    def __str__(self) -> str:
        return self.name

    def built(self) -> nn.Module:
        torch.manual_seed(5)
        return self.build()

    def inputs(self, microbatch: int) -> list[Tensor]:
        torch.manual_seed(100 + microbatch)
        return [leaf(value) for value in self.given()]

    def roots(
        self, module: nn.Module, inputs: Sequence[Tensor], microbatch: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Runs a forward; returns what requires a gradient, and gradients of it."""
        torch.manual_seed(200 + microbatch)
        out = module(*inputs)
        outs = out if isinstance(out, tuple | list) else (out,)
        roots = [value for value in outs if value.requires_grad]
        return roots, [torch.randn_like(root) for root in roots]


def leaf(value: Tensor) -> Tensor:
    can = value.is_floating_point() or value.is_complex()
    return value.detach().requires_grad_(can)


@dataclass
class Gradients:
    """Of a step."""

    parameters: dict[str, Tensor | None]
    inputs: list[list[Tensor | None]]
    waiting: list[Waiting] = field(default_factory=list)


def whole(graph: Graph) -> Gradients:
    """Returns the gradients of whole backwards, each of its own: torch may leave two in one."""
    module = graph.built()
    total: dict[str, Tensor | None] = dict.fromkeys(name for name, _ in module.named_parameters())
    of_inputs = []
    for microbatch in range(MICROBATCHES):
        inputs = graph.inputs(microbatch)
        torch.autograd.backward(*graph.roots(module, inputs, microbatch))
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                before = total[name]
                grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                total[name] = grad.clone() if before is None else before + grad
                parameter.grad = None
        of_inputs.append([None if i.grad is None else i.grad.clone() for i in inputs])
    return Gradients(total, of_inputs)


def split(graph: Graph, plan: str, *, preset: bool) -> Gradients:
    """Returns the gradients of split backwards.

    Args:
        graph: Of what.
        plan: In which order.
        preset: Whether gradients accumulate into zeroed views of one buffer.
    """
    module = graph.built()
    marked = set[int]()
    if preset:
        preset_gradients(module)
        marked = marked_of(module)
    inputs: dict[str, list[Tensor]] = {}
    roots: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    waiting: dict[str, Waiting] = {}
    found: dict[str, Waiting] = {}
    of_inputs: dict[str, list[Tensor | None]] = {}
    for step in plan.split():
        action, at = step[0], step[1:]
        if action == "F":
            inputs[at] = graph.inputs(int(at))
            roots[at] = graph.roots(module, inputs[at], int(at))
        elif action == "I":
            waiting[at] = backward_inputs(*roots.pop(at), ids_of(module), marked)
            found[at] = Waiting(waiting[at].products.copy(), waiting[at].early)
            of_inputs[at] = [None if i.grad is None else i.grad.clone() for i in inputs[at]]
        else:
            compute(waiting.pop(at))
    parameters = {name: p.grad for name, p in module.named_parameters()}
    return Gradients(
        parameters,
        [of_inputs[str(at)] for at in range(MICROBATCHES)],
        [found[str(at)] for at in range(MICROBATCHES)],
    )


def ids_of(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def marked_of(module: nn.Module) -> set[int]:
    """Marks a module's parameters, as between steps."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    mark(trained)
    return {id(parameter) for parameter in trained}


def inputs_of(y: Tensor, *inputs: Tensor, marked: Collection[int] = ()) -> Waiting:
    """Returns what waits of a backward: of all leaves but the inputs."""
    nodes: list[Any] = [y.grad_fn]
    for node in nodes:
        nodes += [found for found, _ in node.next_functions if found not in (None, *nodes)]
    leaves = {id(node.variable) for node in nodes if hasattr(node, "variable")}
    return backward_inputs([y], [torch.ones_like(y)], leaves - set(map(id, inputs)), marked)


def compute(waiting: Waiting) -> None:
    """Computes what waits, as W does."""
    if waiting.products:
        accumulate(by_parameter(waiting.products).values())
    waiting.products.clear()


def preset_gradients(module: nn.Module) -> None:
    parameters = [p for p in module.parameters() if p.requires_grad]
    kinds = {(p.grad_dtype or p.dtype, p.device) for p in parameters}
    for dtype, device in kinds:
        mine = [p for p in parameters if (p.grad_dtype or p.dtype, p.device) == (dtype, device)]
        buffer = torch.zeros(sum(p.numel() for p in mine), dtype=dtype, device=device)
        for parameter, part in zip(mine, buffer.split([p.numel() for p in mine]), strict=True):
            parameter.grad = part.as_strided(  # autograd warns of other strides, whole or split
                parameter.shape, parameter.stride(), part.storage_offset()
            )


def differences(found: Gradients, true: Gradients, most: float) -> dict[str, object]:
    """Returns what is wrong, by name."""
    pairs = {name: (found.parameters[name], grad) for name, grad in true.parameters.items()}
    for at, (mine, wanted) in enumerate(zip(found.inputs, true.inputs, strict=True)):
        for index, pair in enumerate(zip(mine, wanted, strict=True)):
            pairs[f"input {index} of {at}"] = pair
    return {name: wrong for name, pair in pairs.items() if (wrong := _difference(*pair, most))}


def _difference(found: Tensor | None, true: Tensor | None, most: float) -> object:
    if found is None or true is None:
        unused = all(value is None or not value.any() for value in (found, true))
        return None if unused else f"found {found}, expected {true}"
    if (found.shape, found.dtype) != (true.shape, true.dtype):
        return f"found {found.shape} {found.dtype}, expected {true.shape} {true.dtype}"
    found = found.to_dense() if found.is_sparse else found
    if not found.numel():
        return None
    error = float((found - true).abs().max()) / max(float(true.abs().max()), 1e-30)
    return None if error <= most else error


PRODUCTS = (
    "aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm",
    "aten::convolution", "aten::convolution_backward",
)  # fmt: skip


class Products(TorchDispatchMode):
    """Counts matrix products; a convolution's backward is one for each gradient asked."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func._schema.name
        if name == "aten::convolution_backward":
            self.count += sum(args[-1][:2])
        elif name in PRODUCTS:
            self.count += 1
        return func(*args, **(kwargs or {}))


def num_products(graph: Graph, *, is_split: bool) -> int:
    """Returns how many are computed in a backward."""
    module, inputs = graph.built(), graph.inputs(0)
    preset_gradients(module)
    roots = graph.roots(module, inputs, 0)
    products = Products()
    with products:
        if is_split:
            compute(backward_inputs(*roots, ids_of(module), marked_of(module)))
        else:
            torch.autograd.backward(*roots)
    return products.count


class Storages(TorchDispatchMode):
    """Remembers what is made inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[tuple[str, weakref.ref[torch.UntypedStorage]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                name = func._schema.name.removeprefix("aten::")
                self._made.append((name, weakref.ref(value.untyped_storage())))
        return out

    def alive(self, *known: Tensor) -> list[str]:
        """Returns what made the memory that is still there, other than that of known tensors."""
        gc.collect()
        names: dict[int, str] = {}
        for name, reference in self._made:
            storage = reference()
            if storage is not None:
                names.setdefault(storage.data_ptr(), name)
        for tensor in known:
            names.pop(tensor.untyped_storage().data_ptr(), None)
        return sorted(names.values())


def assert_split(graph: Graph, *others: tuple[Any, bool]) -> None:
    """Asserts that gradients are those of a whole backward, and what waits, in LATE and others."""
    true = whole(graph)
    late = split(graph, LATE, preset=True)
    assert differences(late, true, graph.error) == {}
    for waiting in late.waiting:
        assert (len(waiting.products), waiting.early) == (graph.waits, graph.early)
    for plan, preset in others:
        assert differences(split(graph, plan, preset=preset), true, graph.error) == {}
