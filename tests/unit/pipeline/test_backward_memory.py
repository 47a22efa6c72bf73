"""What split backward adds to, and what it keeps until then, and after it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.pipeline.graphs import (
    WIDTH,
    Net,
    Storages,
    compute,
    inputs_of,
    linear,
    marked_of,
    normal,
    preset_gradients,
)

pytestmark = pytest.mark.slow
again = partial(checkpoint, use_reentrant=False)
SQUARE = (WIDTH, WIDTH)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(3)
    return normal(4, WIDTH).requires_grad_()


# Gradients as they are found.


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
