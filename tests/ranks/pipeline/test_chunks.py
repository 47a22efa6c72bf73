"""Sequences in chunks of time: loss and gradients of the whole sequence in one process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

import pipegrad
from pipegrad import Stage, Topology
from pipegrad.errors import PipegradError
from tests.support.gradients.cases import outcome, rank
from tests.support.pairwise import pairwise
from tests.support.pipeline.layers import one_stage_each
from tests.support.pipeline.schedulers import error
from tests.support.rounding import rounding

pytestmark = pytest.mark.ranks(2)
WIDTH, CLASSES, ROWS, LENGTH, MICROBATCHES = 8, 5, 6, 12, 3
MOST = rounding(ROWS * LENGTH * WIDTH)
State = Any


class Recurrent(nn.Module):
    """Backpropagation through time: a state of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, state: State = None) -> tuple[Tensor, State]:
        return self.lstm(x, state)


class Attention(nn.Module):
    """Causal attention whose state is a list that grows: a key and a value of each chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, state: State = None) -> tuple[Tensor, State]:
        past: list[dict[str, Any]] = [] if state is None else state["past"]
        q, k, v = self.qkv(x).split(WIDTH, -1)
        # Earlier tensors are handed on as they came, and so is a number.
        now = [*past, {"k": k, "v": v}]
        keys, values = (torch.cat([part[name] for part in now], 1) for name in ("k", "v"))
        begin = keys.shape[1] - x.shape[1]
        assert begin == (0 if state is None else state["length"])
        seen = torch.arange(keys.shape[1]) <= torch.arange(begin, keys.shape[1])[:, None]
        scores = (q @ keys.mT).masked_fill(~seen, -torch.inf)
        x = x + self.out(self.drop(scores.softmax(-1)) @ values)
        return x, {"past": now, "length": keys.shape[1], "none": None}


class Head(nn.Module):
    """The last stage, whose state has no gradient in one part."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.inner, self.head = kind(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, state: State = None) -> tuple[Tensor, State]:
        inner, count = (None, torch.zeros(())) if state is None else state
        x, inner = self.inner(x, inner)
        return self.head(x), (inner, count + x.detach().sum())


def batch(*, ignored: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(rows, LENGTH, WIDTH, generator=drawn)
    target = torch.randint(CLASSES, (rows, LENGTH), generator=drawn)
    target[0, LENGTH - ignored :] = -100
    return x, target


def mean(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), target.flatten())


def sums(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(x.flatten(0, 1), target.flatten(), reduction="sum")
    return loss, (target != -100).sum()


WAYS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "chunked-1f1b"},
    "split": {"schedule": "chunked-zb-h1"},
    "recompute": {"schedule": "chunked-1f1b", "recompute": True},
    "split, recompute": {"schedule": "chunked-zb-h1", "recompute": True},
    "scaler": {"schedule": "chunked-zb-h1", "scale": 8.0},
    "its own number": {"schedule": {"name": "chunked-1f1b", "chunks": 4}},
    "ready": {"schedule": "chunked-1f1b", "ready": True},
    "token_mean": {"schedule": "chunked-1f1b", "loss_fn": sums, "ignored": 7},
    "uneven rows": {"schedule": "chunked-1f1b", "rows": 8},
}
CHUNKS = {"one": 1, "even": 4, "uneven": 5, "lengths": [7, 1, 4], "single": LENGTH}


@pytest.mark.parametrize("kind", [Recurrent, Attention])
@pytest.mark.parametrize(("way", "cut"), pairwise(WAYS, CHUNKS))
def test_chunks_are_the_whole_sequence(kind: type[nn.Module], way: str, cut: str) -> None:
    options, chunks = dict(WAYS[way]), CHUNKS[cut]
    torch.manual_seed(1)
    true, own = [kind(), Head(kind)], [kind(), Head(kind)]
    for a, b in zip(true, own, strict=True):
        b.load_state_dict(a.state_dict())
    x, target = batch(ignored=options.pop("ignored", 0), rows=options.pop("rows", ROWS))
    is_ready, scale = options.pop("ready", False), options.pop("scale", None)
    of_stage = [{"carry": ("state",), "recompute": options.pop("recompute", False)}] * 2
    options = {"loss_fn": mean, **options}
    if options["loss_fn"] is sums:
        options["loss_reduction"] = "token_mean"
    scheduler = one_stage_each(*own, num_microbatches=MICROBATCHES, of_stage=of_stage, **options)
    scaler = None if scale is None else pipegrad.GradScaler(scheduler.sync, init_scale=scale)
    hidden, _ = true[0](x)
    outputs, _ = true[1](hidden)
    wanted = mean(outputs, target)
    wanted.backward()
    parts = zip(x.tensor_split(MICROBATCHES), target.tensor_split(MICROBATCHES), strict=True)
    ready = [{"x": part, "target": labels} for part, labels in parts]
    given: dict[str, Any] = {"microbatches": ready} if is_ready else {"x": x, "target": target}
    if "chunks" not in options["schedule"] or chunks != 4:
        given["chunks"] = chunks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluated = scheduler.evaluate(**given)
        assert error(evaluated.loss, wanted.detach()) <= MOST
        if rank() == 1:
            assert error(evaluated.outputs[0], outputs.detach()) <= MOST
        for _ in range(2):
            for p in own[rank()].parameters():
                p.grad = None
            assert error(scheduler.step(**given).loss, wanted.detach()) <= MOST
    for (name, p), q in zip(own[rank()].named_parameters(), true[rank()].parameters(), strict=True):
        assert p.grad is not None
        assert error(p.grad / (scale or 1.0), q.grad) <= MOST, name
    # A step of whole sequences follows, with the same result.
    for p in own[rank()].parameters():
        p.grad = None
    assert error(scheduler.step(**{**given, "chunks": 1}).loss, wanted.detach()) <= MOST
    del scaler
    scheduler.close()
