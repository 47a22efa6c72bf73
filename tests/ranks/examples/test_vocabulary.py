"""examples/vocabulary_over_ranks.py against one process that has the whole embedding."""

from __future__ import annotations

import contextlib
import runpy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding
from torch.utils._python_dispatch import TorchDispatchMode

from pipegrad import Topology
from tests.ranks.examples.test_examples import run_example
from tests.support.gradients.cases import rank
from tests.support.pipeline.schedulers import error
from tests.support.rounding import rounding
from tests.support.train.jobs import EXAMPLES, by_hand

pytestmark = pytest.mark.ranks(4)
EXAMPLE = EXAMPLES / "vocabulary_over_ranks.py"
RANKS, MICROBATCHES, ROWS, TOKENS, STEPS, RATE = 4, 6, 12, 10, 3, 0.3
MOST = rounding(ROWS * TOKENS * STEPS)


class Widest(TorchDispatchMode):
    """Sees the widest rows of what is made inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.width = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() == 3:
            self.width = max(self.width, out.shape[-1])
        return out


def batch(step: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(128, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    labels = text[:, 1:].clone()
    labels[:, :2] = -100  # as many in each row
    return text[:, :-1], labels


def test_it_trains_as_one_process_does() -> None:
    example = runpy.run_path(str(EXAMPLE))
    weight, blocks = example["uncut"](RANKS)
    parameters = [weight, *(p for block in blocks for p in block.parameters())]

    def loss_of(step: int) -> Tensor:
        tokens, labels = batch(step)
        x = embedding(tokens, weight)
        for block in blocks:
            x = block(x)
        return cross_entropy((x @ weight.T).flatten(0, 1), labels.flatten())

    losses = by_hand(range(STEPS), loss_of, torch.optim.SGD(parameters, lr=RATE))

    at = Topology.create(pipeline=RANKS)
    scheduler = example["scheduler"](at, MICROBATCHES)
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=RATE)
    seen = Widest()
    for step, (wanted, _) in enumerate(losses):
        tokens, labels = batch(step)
        with seen if step == 0 else contextlib.nullcontext():
            result = scheduler.step(tokens=tokens, labels=labels, target=labels)
        assert abs(float(result.loss) - wanted) <= MOST * abs(wanted)
        optimizer.step()
        optimizer.zero_grad()
    look, block, score, *_ = scheduler.steps.pipeline.stages
    assert look.module.weight is score.module.weight
    size = len(weight) // RANKS
    mine = weight[rank() * size : (rank() + 1) * size]
    assert error(look.module.weight.detach(), mine.detach()) <= MOST
    for p, q in zip(block.module.parameters(), blocks[rank()].parameters(), strict=True):
        assert error(p.detach(), q.detach()) <= MOST
    assert seen.width < len(weight)  # there are no rows of all logits
    assert not scheduler.sync.plan.buckets or all(
        len(step.ranks) == 1 for bucket in scheduler.sync.plan.buckets for step in bucket.route
    )  # the tie crosses no ranks
    scheduler.close()


def test_its_loss_falls() -> None:
    lines = [float(line.split()[-1]) for line in run_example(example=EXAMPLE).splitlines()]
    assert len(lines) == 3
    assert lines[-1] < 0.9 * lines[0]
