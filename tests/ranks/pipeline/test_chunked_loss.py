"""Chunked cross-entropy of a tied head in a pipeline with FSDP2, against one process.

Its values are in tests/unit/pipeline/test_chunked_loss.py.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import pipegrad
from pipegrad.losses import chunked_cross_entropy
from tests.support.gradients.cases import outcome
from tests.support.pipeline.schedulers import error
from tests.support.rounding import rounding

pytestmark = pytest.mark.ranks(4)
CLASSES, WIDTH, ROWS, TOKENS, MICROBATCHES, STEPS = 29, 8, 8, 6, 4, 3
CHUNK_BYTES = 5 * CLASSES * 4  # five rows of logits, and fewer columns than there are
MOST = rounding(2 * ROWS * TOKENS * STEPS)
RATE = 0.5


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.embedding(tokens)))


class Last(nn.Module):
    """Returns hidden states. The head is its own, and only the loss reads it."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.linear, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), head

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x + torch.tanh(self.linear(x)))
        return found


def build() -> tuple[First, Last]:
    torch.manual_seed(4)
    first, head = First(), nn.Linear(WIDTH, CLASSES, bias=False)
    head.weight = first.embedding.weight
    return first, Last(head)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Returns tokens and targets of both replicas; microbatches ignore unlike many labels."""
    drawn = torch.Generator().manual_seed(step)
    tokens, target = torch.randint(CLASSES, (2, 2 * ROWS, TOKENS), generator=drawn)
    for row in range(2 * ROWS):
        target[row, : row % 5] = -100
    return tokens, target


def token_mean(hidden: Tensor, target: Tensor, *, head: nn.Linear) -> tuple[Tensor, Tensor]:
    loss = chunked_cross_entropy(hidden, target, head, reduction="sum", chunk_bytes=CHUNK_BYTES)
    return loss, (target != -100).sum()


def one_process() -> tuple[dict[str, Tensor], list[float]]:
    """Returns the parameters of a training with all logits, by name, and the losses."""
    first, last = build()
    parameters = list(dict.fromkeys((*first.parameters(), *last.parameters())))
    losses = []
    for step in range(STEPS):
        tokens, target = batch(step)
        logits = last.head(last(first(tokens)))
        loss = cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.sub_(RATE * parameter.grad)
                parameter.grad = None
    named = [*first.named_parameters("0"), *last.named_parameters("1", remove_duplicate=False)]
    return {name: p.detach() for name, p in named}, losses


@pytest.mark.parametrize("keep", [None, True])
def test_a_head_that_fsdp2_shards_is_right_or_refused(keep: bool | None) -> None:
    """Behind the forward of what it wraps last, FSDP2 leaves a stage whole unless told not to."""
    wanted, losses = one_process()
    at = pipegrad.Topology.create(pipeline=2)
    here = at.coordinate("pp")
    module: Any = copy.deepcopy(build()[here])
    assert at.mesh is not None
    fully_shard(module, mesh=at.mesh["dp"], reshard_after_forward=keep)
    scheduler = pipegrad.Scheduler(
        [pipegrad.Stage(module, here)],
        at,
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=partial(token_mean, head=module.head) if here else None,
        loss_reduction="token_mean",
        tied=[{0: "embedding.weight", 1: "head.weight"}],
        handlers=["pipeline-shared"],
    )
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=RATE)
    for step, loss in enumerate(losses):
        tokens, target = (x.chunk(2)[at.coordinate("dp")] for x in batch(step))
        if keep:
            found = outcome(partial(scheduler.step, tokens, target=target))
            assert "are a DTensor" in found
            break
        assert abs(float(scheduler.step(tokens, target=target).loss) - loss) <= MOST * abs(loss)
        optimizer.step()
        optimizer.zero_grad()
    else:
        sharded: dict[str, Any] = dict(module.named_parameters(str(here)))
        for name, parameter in sharded.items():
            assert error(parameter.full_tensor().detach(), wanted[name]) <= MOST, name
    scheduler.close()
