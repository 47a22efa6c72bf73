"""Means over microbatches that are uneven: loss, gradients and metrics of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

import pipegrad
from tests.support.gradients.cases import rank
from tests.support.pairwise import pairwise
from tests.support.pipeline.layers import one_stage_each
from tests.support.pipeline.schedulers import error
from tests.support.rounding import rounding

pytestmark = pytest.mark.ranks(2)
CLASSES, WIDTH, MICROBATCHES = 5, 4, 4
ROWS = 14  # 4, 4, 3 and 3
MOST = rounding(ROWS * CLASSES)
WEIGHT = torch.tensor([0.1, 2.0, 0.7, 1.5, 0.3])


def with_metric(x: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return F.cross_entropy(x, target), {"right": (x.argmax(-1) == target).double().mean()}


class Named(nn.CrossEntropyLoss):
    """A subclass without a forward of its own."""


# A loss, and how many labels of each microbatch are ignored.
LOSSES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "function": (with_metric, ()),
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), ()),
    "ignored": (nn.CrossEntropyLoss(), (3, 0, 1, 0)),
    "subclass": (Named(weight=WEIGHT), (3, 0, 1, 0)),
    "one has none": (nn.CrossEntropyLoss(), (4, 0, 0, 0)),
    "weights": (nn.CrossEntropyLoss(weight=WEIGHT), ()),
    "weights, smoothing, ignored": (
        nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=0, label_smoothing=0.2),
        (2, 0, 1, 0),
    ),
    "partial": (partial(F.cross_entropy, weight=WEIGHT), (1, 0, 0, 0)),
    "chunked": (
        partial(
            pipegrad.losses.chunked_cross_entropy,
            head=torch.linspace(-2, 2, CLASSES * CLASSES).view(CLASSES, CLASSES).sin(),
            weight=WEIGHT,
            label_smoothing=0.2,
        ),
        (2, 0, 1, 0),
    ),
    "nll": (nn.NLLLoss(weight=WEIGHT), (0, 2, 0, 0)),
    "probabilities": (nn.CrossEntropyLoss(weight=WEIGHT), ()),
    "another mean": (nn.MultiMarginLoss(), ()),
}
WAYS: dict[str, dict[str, Any]] = {
    "cut": {},
    "even": {"rows": 12},
    "ready": {"ready": True},
    "recompute": {"recompute": True},
    "split": {"schedule": "zb-h1"},
    "scaler": {"scale": 8.0},
}


def batch(rows: int, loss_fn: Any, ignored: tuple[int, ...], name: str) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(rows, WIDTH, generator=drawn)
    if name == "probabilities":
        return x, torch.rand(rows, CLASSES, generator=drawn).softmax(-1)
    target = torch.randint(1, CLASSES, (rows,), generator=drawn)
    parts = target.tensor_split(MICROBATCHES)  # views
    for part, number in zip(parts, ignored, strict=False):
        part[:number] = getattr(loss_fn, "ignore_index", -100)
    return x, target


@pytest.mark.parametrize(
    ("name", "way"),
    pairwise(LOSSES, WAYS, allowed=lambda name, way: way != "ready" or "ignored" in name),
)
def test_a_mean_is_that_of_one_process(name: str, way: str) -> None:
    """Microbatches counted alike: class weights 1.0647 for 1.0402, a norm of 4/4/3/3 rows 6 %."""
    loss_fn, ignored = LOSSES[name]
    options = dict(WAYS[way])
    torch.manual_seed(1)
    true = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    own = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    own.load_state_dict(true.state_dict())
    x, target = batch(options.pop("rows", ROWS), loss_fn, ignored, name)
    is_ready, scale = options.pop("ready", False), options.pop("scale", None)
    of_stage = [{"recompute": options.pop("recompute", False)}] * 2
    scheduler = one_stage_each(
        own[:2], own[2:], num_microbatches=MICROBATCHES, loss_fn=loss_fn, of_stage=of_stage,
        **options,
    )  # fmt: skip
    scaler = None if scale is None else pipegrad.GradScaler(scheduler.sync, init_scale=scale)
    wanted = loss_fn(true(x), target)
    wanted, metrics = wanted if isinstance(wanted, tuple) else (wanted, {})
    wanted.backward()
    parts = zip(x.tensor_split(MICROBATCHES), target.tensor_split(MICROBATCHES), strict=True)
    ready = [{"x": part, "target": labels} for part, labels in parts]
    given: dict[str, Any] = {"microbatches": ready} if is_ready else {"x": x, "target": target}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for verb in (scheduler.evaluate, scheduler.step):
            result = verb(**given)
            assert error(result.loss, wanted.detach()) <= MOST
            for key, value in metrics.items():
                assert abs(result.metrics[key] - value.item()) <= MOST
    for (key, p), q in zip(own.named_parameters(), true.parameters(), strict=True):
        if key.startswith("2") == (rank() == 1):
            assert p.grad is not None
            assert error(p.grad / (scale or 1.0), q.grad) <= MOST, key
    del scaler
    scheduler.close()


def test_sums_count_alike_and_a_divisor_of_the_user_divides_them() -> None:
    torch.manual_seed(1)
    module = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(ROWS, WIDTH)
    loss_fn = nn.MSELoss(reduction="sum")
    wanted = loss_fn(module(module(x)), x).detach()
    scheduler = one_stage_each(module, module, num_microbatches=MICROBATCHES, loss_fn=loss_fn)
    assert error(scheduler.evaluate(x, target=x).loss * MICROBATCHES, wanted) <= MOST
    assert error(scheduler.evaluate(x, target=x, loss_divisor=2.0).loss * 2, wanted) <= MOST
    scheduler.close()


class WithLoss(nn.Linear):
    """Returns a mean over its rows, too: a loss of a stage."""

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return out, out.square().mean()


@pytest.mark.ranks(3)
def test_a_loss_of_a_stage_between_counts_by_rows() -> None:
    """Its rank takes nothing of the batch: gradients of the first stage were off by 17 %."""
    torch.manual_seed(1)
    modules = nn.Linear(WIDTH, WIDTH), WithLoss(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    x, target = torch.randn(2, ROWS, WIDTH)
    hidden, between = modules[1](modules[0](x))
    wanted = F.mse_loss(modules[2](hidden), target) + between
    own = list(modules[rank()].parameters())
    true = torch.autograd.grad(wanted, own)
    options = [{}, {"losses": ["own"]}, {}]
    scheduler = one_stage_each(
        *modules, num_microbatches=MICROBATCHES, loss_fn=F.mse_loss, of_stage=options
    )
    assert error(scheduler.step(x, target=target).loss, wanted.detach()) <= MOST
    for parameter, gradient in zip(own, true, strict=True):
        assert parameter.grad is not None
        assert error(parameter.grad, gradient) <= MOST
    scheduler.close()


@pytest.mark.parametrize("rows", [12, ROWS])
@pytest.mark.parametrize("over", ["microbatch", "batch"])
def test_losses_of_stages_count_by_rows(rows: int, over: str) -> None:
    """Each counted alike: a router of a last batch that is short moved up to 4 % elsewhere."""
    torch.manual_seed(1)
    modules = WithLoss(WIDTH, WIDTH), WithLoss(WIDTH, WIDTH)
    x, target = torch.randn(2, rows, WIDTH)
    hidden, first = modules[0](x)
    out, last = modules[1](hidden)
    wanted = F.mse_loss(out, target) + first + last
    own = list(modules[rank()].parameters())
    true = torch.autograd.grad(wanted, own)
    scheduler = one_stage_each(
        *modules, num_microbatches=MICROBATCHES, loss_fn=F.mse_loss, loss_over=over,
        schedule="gpipe", of_stage=[{"losses": ["own"]}] * 2,
    )  # fmt: skip
    for verb in (scheduler.evaluate, scheduler.step):
        assert error(verb(x, target=target).loss, wanted.detach()) <= MOST
    for parameter, gradient in zip(own, true, strict=True):
        assert parameter.grad is not None
        assert error(parameter.grad, gradient) <= MOST
    scheduler.close()
