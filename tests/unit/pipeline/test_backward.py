"""Split backward against a whole one: numbers, what waits, and how much is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.support.pipeline.graphs import (
    AT_ONCE,
    BETWEEN,
    WIDTH,
    Block,
    Graph,
    Net,
    assert_split,
    linear,
    mlp,
    normal,
    num_products,
)
from tests.support.rounding import rounding

DOUBLE, COMPLEX = torch.float64, torch.complex128


def given(*shapes: tuple[int, ...], dtype: torch.dtype = DOUBLE) -> Callable[[], list[Tensor]]:
    return lambda: [normal(*shape, dtype=dtype) for shape in shapes]


def tokens() -> list[Tensor]:
    return [torch.randint(8, (2, 5))]


def square(**options: Any) -> Tensor:
    return normal(WIDTH, WIDTH, **options)


def table(*, sparse: bool = False) -> nn.Embedding:
    return nn.Embedding(8, WIDTH, sparse=sparse, dtype=DOUBLE)


def matrix(name: str, waits: int, function: Callable[..., Any], **options: Any) -> Graph:
    """Makes a graph of an input and a weight `w`, both of WIDTH columns."""
    return Graph(name, waits, lambda: Net(function, w=square()), **options)


linears = [
    Graph("linear", 1, linear),
    Graph("linear without bias", 1, lambda: linear(bias=False)),
    Graph("linear of a vector", 1, linear, given((WIDTH,))),
    Graph("linear of a matrix", 1, lambda: linear(bias=False), given((5, WIDTH))),
    Graph("linear of a transposed", 1, lambda: Net(lambda m, x: m.a(x.mT), a=linear(5))),
    Graph("linear of nothing", 1, lambda: Net(lambda m, x: m.a(x[:0]), a=linear())),
    Graph("one by one", 2, lambda: Net(lambda m, x: x @ m.w @ m.w.T, w=normal(1, 1)),
          given((4, 1))),
    Graph("linear to a scalar", 1, lambda: Net(lambda m, x: m.a(x).sum(), a=linear())),
    Graph("GPT block", 4, Block),
    Graph("MLP", 3, mlp),
    Graph("in place", 2, lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear())),
    Graph("changed in place later", 2, lambda: Net(
        lambda m, x: m.a(_changed(m.a(x))).add_(1), a=linear())),
]  # fmt: skip


def _changed(y: Tensor) -> Tensor:
    y[:, 0].mul_(2)
    return y.relu_()


several_uses = [
    Graph("thrice in a row", 3, lambda: Net(lambda m, x: m.a(m.a(m.a(x))), a=linear())),
    matrix("transposed too", 3, lambda m, x: x @ m.w @ m.w.T + x @ m.w),
    Graph("a weight of two linears", 2, lambda: Net(
        lambda m, x: F.linear(F.linear(x, m.w, m.b), m.w, m.c),
        w=square(), b=normal(WIDTH), c=normal(WIDTH))),
    Graph("tied embedding", 0, lambda: Net(lambda m, x: m.e(x) @ m.e.weight.T, e=table()), tokens),
    matrix("added too", 0, lambda m, x: x @ m.w + m.w.sum()),
    matrix("squared", 2, lambda m, x: x @ (m.w @ m.w)),
    Graph("merged", 2, lambda: Net(
        lambda m, x: x @ (m.a @ m.b), a=normal(WIDTH, 4), b=normal(4, WIDTH))),
    Graph("LoRA", 3, lambda: Net(
        lambda m, x: m.a(x) + x @ m.b @ m.c, a=linear(), b=normal(WIDTH, 2), c=normal(2, WIDTH))),
    Graph("parts of one", 3, lambda: Net(
        lambda m, x: [x := x @ part for part in m.w.chunk(3, 1)][-1], w=normal(WIDTH, 3 * WIDTH))),
    Graph("chosen parts and constants", 1, lambda: Net(
        lambda m, x: x @ torch.cat([m.w, x.new_ones(3, WIDTH)]), w=normal(3, WIDTH))),
    matrix("triangles", 2, lambda m, x: x @ m.w.tril() @ m.w.triu()),
]  # fmt: skip

off_the_path = [
    Graph("integers", 2, lambda: nn.Sequential(table(), linear(), nn.GELU(), linear()), tokens),
    Graph("integers, sparse", 1, lambda: nn.Sequential(table(sparse=True), linear()), tokens),
    Graph("aside", 3, lambda: Net(
        lambda m, x: (m.a(x), m.b(m.w).sum()), a=linear(), b=linear(bias=False), w=square())),
    Graph("frozen", 1, lambda: Net(
        lambda m, x: m.a(m.b(x)), a=linear(), b=linear().requires_grad_(requires_grad=False))),
    Graph("unused", 1, lambda: Net(lambda m, x: m.a(x), a=linear(), b=linear())),
    Graph("detached", 2, lambda: Net(
        lambda m, x: m.a(x) + m.b(m.a(x).detach()) + torch.no_grad()(m.b)(x), a=linear(), b=linear()
    )),
    Graph("an output that is an input", 1, lambda: Net(lambda m, x: (m.a(x), x), a=linear())),
    matrix("an output that is a parameter", 0, lambda m, x: (x @ m.w, m.w, m.w.T)),
    Graph("outputs of one another", 1, lambda: Net(
        lambda m, x: (y := m.a(x), y, y.mT, y[0]), a=linear())),
    Graph("hypernetwork", 1, lambda: Net(
        lambda m, x: x @ m.a(x.mean((0, 1))).view(WIDTH, 4), a=linear(WIDTH, 4 * WIDTH))),
    Graph("two inputs", 1, lambda: Net(lambda m, x, y: m.a(x) @ y.mT @ x, a=linear()),
          given((2, 5, WIDTH), (2, 5, WIDTH))),
    matrix("a parameter times an input", 1, lambda m, x: F.linear(m.w, x[0])),
]  # fmt: skip

layers = [
    Graph("weight_norm", 0, lambda: parametrizations.weight_norm(linear())),
    Graph("spectral_norm", 0, lambda: parametrizations.spectral_norm(linear())),
    Graph("attention", 2, lambda: Net(
        lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(WIDTH, 2, dtype=DOUBLE))),
    Graph("encoder layer", 4, lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dtype=DOUBLE)),
    Graph("LSTM", 6, lambda: Net(lambda m, x: m.a(x)[0], a=nn.LSTM(WIDTH, 4, 2, dtype=DOUBLE))),
    Graph("GRU", 6, lambda: Net(lambda m, x: m.a(x)[0], a=nn.GRU(WIDTH, 4, 2, dtype=DOUBLE))),
    Graph("bilinear", 0, lambda: Net(
        lambda m, x: m.a(x, x), a=nn.Bilinear(WIDTH, WIDTH, 4, dtype=DOUBLE))),
    Graph("batch norm", 1, lambda: nn.Sequential(
        nn.Conv1d(5, 4, 3, dtype=DOUBLE), nn.BatchNorm1d(4, dtype=DOUBLE), nn.ReLU(inplace=True))),
]  # fmt: skip


def convolution(name: str, module: type[nn.Module], size: int, **options: Any) -> Graph:
    def build() -> nn.Module:
        return module(4, 6, 3, dtype=DOUBLE, **options)

    return Graph(name, 1, build, given((2, 4, *[6] * size)))


def _channels_last(module: Any) -> nn.Module:
    found: nn.Module = module.to(DOUBLE, memory_format=torch.channels_last)
    return found


convolutions = [
    convolution("Conv1d", nn.Conv1d, 1),
    convolution("Conv2d", nn.Conv2d, 2, stride=2, padding=1, dilation=2, groups=2),
    convolution("Conv2d, same", nn.Conv2d, 2, padding="same", dilation=2),
    convolution("Conv2d, circular", nn.Conv2d, 2, padding=1, padding_mode="circular"),
    convolution("Conv3d", nn.Conv3d, 3, bias=False),
    convolution("ConvTranspose1d", nn.ConvTranspose1d, 1, stride=2, output_padding=1),
    convolution("ConvTranspose2d", nn.ConvTranspose2d, 2, groups=2, dilation=2),
    convolution("ConvTranspose3d", nn.ConvTranspose3d, 3),
    Graph("channels last", 1, lambda: _channels_last(nn.Conv2d(4, 6, 3)), given((2, 4, 6, 6))),
    Graph("a kernel and its transposed", 2, lambda: Net(
        lambda m, x: F.conv_transpose2d(F.conv2d(x, m.w), m.w), w=normal(6, 4, 3, 3)),
        given((2, 4, 6, 6))),
    Graph("a kernel made of one", 0, lambda: Net(
        lambda m, x: F.conv2d(x, m.w.permute(3, 2, 0, 1)), w=normal(3, 3, 4, 6)),
        given((2, 4, 6, 6))),
    Graph("fp32", 1, lambda: nn.Conv2d(4, 6, 3), given((2, 4, 6, 6), dtype=torch.float32),
          error=rounding(2 * 4 * 4)),
]  # fmt: skip


def einsum(equation: str, *shape: int) -> Graph:
    return Graph(equation, 1, lambda: Net(
        lambda m, x: torch.einsum(equation, x, m.w), w=normal(*shape)))  # fmt: skip


def autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found: Tensor = m.a(torch.relu(m.a(x)))
    return found


def half(grad_dtype: torch.dtype) -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
    for parameter in module.parameters():
        parameter.grad_dtype = grad_dtype
    return module


HALVES = given((2, 5, WIDTH), dtype=torch.bfloat16)
COMPLEXES = given((2, 5, WIDTH), dtype=COMPLEX)

products = [
    einsum("bik,hkd->bhid", 3, WIDTH, 2),
    einsum("bik,bkd->bid", 2, WIDTH, 3),
    einsum("bik,kd->bd", WIDTH, 4),
    einsum("bik,ij->bjk", 5, 3),
    einsum("bik,ikd->bid", 5, WIDTH, 4),
    matrix("expanded", 1, lambda m, x: torch.bmm(x, m.w.expand(2, -1, -1))),
    Graph("broadcast", 2, lambda: Net(
        lambda m, x: (x[:, None] @ m.w, m.v @ x.mT), w=normal(3, WIDTH, 4), v=normal(3, WIDTH))),
    matrix("beta", 1, lambda m, x: torch.addmm(m.w[0].detach(), x[0], m.w, beta=0.7)),
    matrix("alpha", 0, lambda m, x: torch.addmm(x[0], x[1], m.w, alpha=0.3)),
    Graph("batched alpha", 0, lambda: Net(
        lambda m, x: torch.baddbmm(m.b, x, m.w, alpha=0.5), w=normal(2, WIDTH, 4),
        b=normal(2, 5, 4))),
    Graph("complex", 3, lambda: Net(
        lambda m, x: x @ m.w @ m.w.mH + x.conj() @ m.w.T, w=square(dtype=COMPLEX)), COMPLEXES),
    Graph("complex layer", 1, lambda: nn.Linear(WIDTH, WIDTH, dtype=COMPLEX), COMPLEXES),
    matrix("real weights of complex", 1, lambda m, x: x @ m.w.to(COMPLEX), given=COMPLEXES),
    matrix("negative views", 2, lambda m, x: torch._neg_view(x[0]) @ torch._neg_view(m.w) @ m.w),
    matrix("sparse operands", 1, lambda m, x: torch.eye(9, WIDTH, dtype=DOUBLE).to_sparse() @ m.w),
    matrix("vmap", 2, lambda m, x: (torch.vmap(lambda v: v @ m.w)(x), torch.vmap(
        torch.vmap(lambda v: m.w @ v))(x))),
    Graph("func.grad", 4, lambda: Net(lambda m, x: torch.func.grad(
        lambda y: torch.tanh(m.a(torch.tanh(m.b(y)))).sum())(x), a=linear(), b=linear())),
    Graph("autocast", 2, lambda: Net(autocast, a=nn.Linear(WIDTH, WIDTH)),
          given((2, 5, WIDTH), dtype=torch.float32), error=1e-2),
    Graph("bf16", 1, lambda: half(torch.bfloat16), HALVES, error=2e-2),
    Graph("bf16 with fp32 gradients", 1, lambda: half(torch.float32), HALVES,
          error=rounding(2 * 5)),
]  # fmt: skip

graphs = [*linears, *several_uses, *off_the_path, *layers, *convolutions, *products]
every_graph = pytest.mark.parametrize("graph", graphs, ids=str)


@every_graph
def test_gradients_are_those_of_a_whole_backward_and_what_can_wait_does(graph: Graph) -> None:
    assert_split(graph, (BETWEEN, True), (AT_ONCE, False))


@every_graph
def test_no_product_is_computed_twice(graph: Graph) -> None:
    assert num_products(graph, is_split=True) == num_products(graph, is_split=False)
