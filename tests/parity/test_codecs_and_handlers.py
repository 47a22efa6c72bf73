"""Codecs beside each way of data parallelism: replicas of one batch train as one of them alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import pipegrad
from pipegrad import Scheduler, Topology
from tests.support.gradients.diloco import batch, loss_of, model, weights_of

EVERY, MICROBATCHES = 3, 4  # EVERY: steps between two meetings, and before the first
Seen = tuple[list[float], dict[str, Tensor]]
ALONE = "nothing is reduced over replicas"
WAYS: dict[str, list[Any]] = {
    ALONE: ["pipeline-shared"],
    "data-parallel": ["pipeline-shared", "data-parallel"],
    "sharded": ["pipeline-shared", "sharded"],
    "owned": ["pipeline-shared", "owned"],
    "diloco": ["pipeline-shared", {"name": "diloco", "every": EVERY}],
}
CODECS: dict[str, Any] = {"int8": "int8", "both": {"activations": "bf16", "gradients": "topk"}}


@cache
def train(way: str, codecs: str) -> Seen:
    """Returns the losses of this rank, and its weights before the first meeting."""
    topology = Topology.create(pipeline=2, device_type="cpu")
    stages = pipegrad.cut(model(), 2)
    options: dict[str, Any] = {
        "schedule": "1f1b",
        "num_microbatches": MICROBATCHES,
        "loss_fn": loss_of,
        "allow_unsynced": ["*"] if way == ALONE else [],
    }
    options |= {"handlers": WAYS[way], "codecs": CODECS[codecs]}
    scheduler = Scheduler(stages, topology, **options)
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.5)
    losses = []
    for step in range(EVERY - 1):
        tokens, target = batch(step, 0)  # the same for all replicas, so means are exact
        losses.append(scheduler.step(tokens, target=target).loss.item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.sync.wait_parameters()
    weights = weights_of(scheduler)
    scheduler.close()
    return losses, weights


@pytest.mark.ranks(4)
@pytest.mark.parametrize("codecs", CODECS)
@pytest.mark.parametrize("way", [way for way in WAYS if way != ALONE])
def test_replicas_of_one_batch_train_as_one_of_them_alone(way: str, codecs: str) -> None:
    (losses, weights), (alone, expected) = train(way, codecs), train(ALONE, codecs)
    assert losses == alone
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.ranks(4)
def test_codecs_change_the_losses() -> None:
    assert train(ALONE, "int8")[0] != train(ALONE, "both")[0]
