"""Chunked cross-entropy against torch's: values, gradients, memory, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipegrad.errors import PlanError, StepError
from pipegrad.losses import chunked_cross_entropy
from pipegrad.partition.deferred_logits import deferred
from pipegrad.pipeline.shares import shares
from pipegrad.pipeline.split_backward import PACKED, accumulate, backward_inputs, by_parameter
from pipegrad.plan.check import refuse_loss_parameters
from tests.support.pairwise import pairwise
from tests.support.pipeline.graphs import Products
from tests.support.rounding import rounding

TOKENS, CLASSES, WIDTH = 37, 53, 8
ERROR = {torch.float64: 1e-13, torch.float32: rounding(CLASSES), torch.bfloat16: 2**-6}
LABELS = {"all": lambda y: y, "some": lambda y: y.where(torch.arange(TOKENS) % 3 > 0, -100),
          "none": lambda y: torch.full_like(y, -100)}  # fmt: skip


def drawn(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns hidden states, targets and a head."""
    torch.manual_seed(seed)
    hidden, head = (torch.randn(n, WIDTH, dtype=dtype) for n in (TOKENS, CLASSES))
    return hidden.requires_grad_(), torch.randint(CLASSES, (TOKENS,)), head.requires_grad_()


@pytest.mark.parametrize(
    ("dtype", "reduction", "smoothing", "scaled", "labels", "has", "chunk_bytes"),
    pairwise(
        [torch.float64, torch.float32, torch.bfloat16],
        ["mean", "sum", "none"],
        [0.0, 0.2],
        [(1.0, None), (0.3, None), (1.0, 3.0), (0.3, 3.0)],
        LABELS,
        ["", "bias", "weight", "bias and weight"],
        [1, 4 * CLASSES * 5, 2**20],
    ),
)
def test_values_and_gradients_are_torchs(  # noqa: PLR0917 - a row of an array
    dtype: torch.dtype,
    reduction: str,
    smoothing: float,
    scaled: tuple[float, float | None],
    labels: str,
    has: str,
    chunk_bytes: int,
) -> None:
    hidden, target, head = drawn(dtype)
    target = LABELS[labels](target)  # type: ignore[no-untyped-call]
    bias = torch.randn(CLASSES, dtype=dtype, requires_grad=True) if "bias" in has else None
    total = torch.float64 if dtype == torch.float64 else torch.float32
    weight = torch.rand(CLASSES, dtype=total) if "weight" in has else None
    options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
    scale, softcap = scaled
    logits = functional.linear(hidden, head, bias).to(total) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    wanted = functional.cross_entropy(logits, target, weight=weight, **options)
    options |= {"scale": scale, "softcap": softcap, "chunk_bytes": chunk_bytes}
    found = chunked_cross_entropy(hidden, target, head, bias=bias, weight=weight, **options)
    assert (found.dtype, found.shape) == (total, wanted.shape)
    leaves = [x for x in (hidden, head, bias) if x is not None]
    by = torch.randn_like(wanted)
    pairs = zip(
        (found, *torch.autograd.grad(found, leaves, by)),
        (wanted, *torch.autograd.grad(wanted, leaves, by)),
        strict=True,
    )
    for mine, true in pairs:
        assert torch.equal(mine.isnan(), true.isnan())
        error = (mine - true).nan_to_num().abs().max() / true.nan_to_num().abs().max().clamp(1e-9)
        assert error <= ERROR[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_torchs(dtype: torch.dtype) -> None:
    hidden, target, head = drawn()
    scale = 2.0**16 if dtype == torch.float16 else 1.0
    with torch.autocast("cpu", dtype=dtype):
        wanted = functional.cross_entropy(functional.linear(hidden, head), target)
        found = chunked_cross_entropy(hidden, target, head, chunk_bytes=1000)
    assert (found - wanted).abs() <= 1e-6 * wanted
    pairs = zip(
        torch.autograd.grad(found * scale, (hidden, head)),
        torch.autograd.grad(wanted * scale, (hidden, head)),
        strict=True,
    )
    for mine, true in pairs:
        assert mine.dtype == torch.float32
        assert (mine - true).abs().max() <= 4 * torch.finfo(dtype).eps * true.abs().max()


def test_small_gradients_do_not_vanish_in_half_precision() -> None:
    """A backward has a loss scale, and the forward, which computes a part of it, does not know it.

    Here all but the label have a probability of 2e-8, which is nothing in float16.
    """
    hidden = torch.tensor([[18.0, 0.0]], dtype=torch.float16, requires_grad=True)
    head = torch.tensor([[1.0, 0.0]] + [[0.02, 1.0]] * 2000, dtype=torch.float16)
    chunked_cross_entropy(hidden, torch.tensor([0]), head).mul(2.0**14).backward()
    assert hidden.grad is not None
    true = hidden.detach().double().requires_grad_()
    functional.cross_entropy(true @ head.double().T, torch.tensor([0])).mul(2.0**14).backward()
    assert true.grad is not None
    assert (hidden.grad - true.grad).abs().max() <= 0.1 * true.grad.abs().max()


class Largest(TorchDispatchMode):
    """Sees how many elements the largest tensor has that is made inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


def test_nothing_of_the_size_of_all_logits_is_made() -> None:
    hidden, target, head = drawn()
    with Largest() as seen:
        chunked_cross_entropy(hidden, target, head, chunk_bytes=4 * 600).backward()
    assert seen.numel == 600 // TOKENS * TOKENS  # of all tokens, for some classes
    with Largest() as seen:
        functional.cross_entropy(functional.linear(hidden, head), target).backward()
    assert seen.numel == TOKENS * CLASSES


@pytest.mark.parametrize("trained", ["hidden", "head"])
def test_what_is_frozen_gets_no_gradient_and_costs_none(trained: str) -> None:
    hidden, target, head = drawn()
    (head if trained == "hidden" else hidden).requires_grad_(False)
    chunked_cross_entropy(hidden, target, head).backward()
    assert [x.grad is None for x in (hidden, head)] == [trained == "head", trained == "hidden"]


def test_no_gradient_is_computed_without_a_backward() -> None:
    hidden, target, head = drawn()
    products = Products()
    with torch.no_grad(), products:
        loss = chunked_cross_entropy(hidden, target, head)
    assert products.count == 1
    assert loss == chunked_cross_entropy(hidden, target, head)


def parts(has: str) -> Iterator[tuple[str, nn.Parameter]]:
    torch.manual_seed(1)
    embedding, layer = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
    head = nn.Linear(WIDTH, CLASSES, bias=has == "bias")
    if has == "tie":
        head.weight = embedding.weight
    yield from nn.ModuleDict({"e": embedding, "l": layer, "h": head}).named_parameters()


@pytest.mark.parametrize(
    ("has", "waits", "early"),
    [("", 2, ()), ("bias", 1, ()), ("tie", 1, ()), ("checkpoint", 0, (PACKED,))],
)
def test_a_split_backward_leaves_the_head_to_w(has: str, waits: int, early: tuple[str]) -> None:
    """A tie in one stage has a gradient of the lookup at once, and uses of a weight go together."""
    torch.manual_seed(2)
    tokens, target = torch.randint(CLASSES, (2, TOKENS))

    def run(p: dict[str, nn.Parameter], *, chunked: bool) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            hidden = functional.linear(x, p["l.weight"], p["l.bias"])
            head = p.get("h.weight", p["e.weight"])
            if chunked:
                return chunked_cross_entropy(
                    hidden, target, head, bias=p.get("h.bias"), chunk_bytes=999
                )
            logits = functional.linear(hidden, head, p.get("h.bias"))
            return functional.cross_entropy(logits, target)

        x = functional.embedding(tokens, p["e.weight"])
        if has != "checkpoint" or not chunked:
            return loss(x)
        found: Tensor = checkpoint(loss, x, use_reentrant=False)
        return found

    true, mine = dict(parts(has)), dict(parts(has))
    run(true, chunked=False).backward()
    waiting = backward_inputs([run(mine, chunked=True)], [None], {id(p) for p in mine.values()})
    assert (len(waiting.products), waiting.early) == (waits, early)
    assert ("h.weight" in mine and mine["h.weight"].grad is None) == (waits == 2)
    accumulate(by_parameter(waiting.products).values())
    for name, parameter in true.items():
        grad, other = parameter.grad, mine[name].grad
        assert grad is not None
        assert other is not None
        assert (grad - other).abs().max() <= rounding(TOKENS) * grad.abs().max(), name


def test_a_second_derivative_is_refused() -> None:
    hidden, target, head = drawn()
    loss = chunked_cross_entropy(hidden, target, head)
    with pytest.raises(StepError, match="no second derivative"):
        torch.autograd.grad(loss + hidden.square().sum(), hidden, create_graph=True)


def test_a_weight_that_changed_behind_the_forward_is_refused() -> None:
    hidden, target, head = drawn()
    loss = chunked_cross_entropy(hidden, target, head)
    with torch.no_grad():
        head.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head": torch.ones(CLASSES, WIDTH + 1)}, "expected (classes, 8)"),
        ({"target": torch.ones(TOKENS)}, "expected classes as integers, (37,)"),
        ({"reduction": "batchmean"}, "expected one of ['mean', 'sum', 'none']"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    hidden, target, head = drawn()
    given = {"hidden": hidden, "target": target, "head": head, **change}
    with pytest.raises(StepError) as caught:
        chunked_cross_entropy(**given)
    assert words in str(caught.value)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="since torch 2.13")
def test_labels_of_torchs_own_loss_with_a_head_are_counted() -> None:
    """Its ignore_index is None by default, which was compared with labels."""
    loss = nn.LinearCrossEntropyLoss(WIDTH, CLASSES)
    labels = [torch.tensor([1, 2, -100]), torch.tensor([3, -100, -100])]
    found, total = shares(loss, labels, 6)
    assert found is not None
    assert [*map(float, found)] == [4 / 3, 2 / 3]
    assert total == 3


# What a head may be that nobody calls, and labels that say little.


def test_a_head_that_does_more_than_to_multiply_is_refused() -> None:
    """Hooks would not run: a spectral norm made its weight in one, and was never trained."""
    hidden, target, _ = drawn()
    hooked, own = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)
    hooked.register_forward_hook(lambda module, inputs, output: output * 5)
    vars(own)["forward"] = lambda x: 5 * x
    for head in (nn.utils.spectral_norm(nn.Linear(WIDTH, CLASSES)), hooked, own):
        with pytest.raises(StepError, match="may do more than to multiply"):
            chunked_cross_entropy(hidden, target, head)


def test_labels_of_a_byte_count() -> None:
    """-100 is 156 in 8 bits."""
    torch.manual_seed(0)
    hidden, head = torch.randn(8, WIDTH), torch.randn(200, WIDTH)
    target = torch.full((8,), 156, dtype=torch.uint8)
    wanted = functional.cross_entropy(hidden @ head.mT, target.long())
    assert abs(chunked_cross_entropy(hidden, target, head) / wanted - 1) <= ERROR[torch.float32]


def test_what_does_not_count_has_no_loss_whatever_its_states_are() -> None:
    hidden, target, head = drawn()
    bias = torch.zeros(CLASSES)
    bias[0] = -torch.inf
    target = target.clamp(min=1)
    target[::2] = -100
    wanted = functional.cross_entropy(functional.linear(hidden, head, bias), target)
    found = chunked_cross_entropy(hidden, target, head, bias=bias)
    assert abs(found / wanted - 1) <= ERROR[torch.float32]


@pytest.mark.parametrize("scale", [1.0, 600.0])
def test_float16_has_a_gradient_of_heavy_labels(scale: float) -> None:
    hidden, target, head = (x.detach() for x in drawn())
    near = (hidden * 0.01).half().requires_grad_()
    loss = chunked_cross_entropy(near, target, head.half(), weight=torch.full((CLASSES,), scale))
    (found,) = torch.autograd.grad(loss, near)
    true = near.detach().double().requires_grad_()
    wanted = functional.cross_entropy(true @ head.half().double().mT, target)
    (by,) = torch.autograd.grad(wanted, true)
    assert (found - by).abs().max() / by.abs().max() <= 2**-8


def test_a_backward_inside_of_autocast_is_that_of_the_forward() -> None:
    hidden, target, head = drawn()
    head = (head.detach() * 30).requires_grad_()
    loss = chunked_cross_entropy(hidden, target, head)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = torch.autograd.grad(loss, head)
    (wanted,) = torch.autograd.grad(functional.cross_entropy(hidden @ head.mT, target), head)
    assert (found - wanted).abs().max() / wanted.abs().max() <= ERROR[torch.float32]


# Deferred logits.


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.__setitem__((slice(None), 0), 0.0),
        lambda x: x.masked_fill_(torch.ones(1, dtype=torch.bool), 0.0),
        lambda x: x.float().div_(2.0),
        lambda x: torch.mul(x, 2.0, out=x),
        lambda x: x.__imul__(2.0),
    ],
)
def test_logits_that_the_model_writes_into_are_refused(write: Any) -> None:
    """Nobody would see it: Chameleon sets those of images, and its loss was another one."""
    head = nn.Linear(WIDTH, CLASSES)
    with deferred(head), pytest.raises(StepError, match="changes its logits in place"):
        write(head(torch.randn(4, WIDTH)))
    assert "forward" not in vars(head)


def test_a_loss_that_is_given_a_parameter_is_refused() -> None:
    head, stage = nn.Parameter(torch.zeros(CLASSES, WIDTH)), nn.Linear(2, 2)
    loss = partial(chunked_cross_entropy, head=head)
    with pytest.raises(PlanError, match="no stage holds"):
        refuse_loss_parameters(loss, [stage])
    stage.head = head
    refuse_loss_parameters(loss, [stage])
