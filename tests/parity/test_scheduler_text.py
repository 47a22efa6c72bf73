"""Thirty steps over text, padded to the longest of each microbatch, against one process."""

from __future__ import annotations

from itertools import islice
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipegrad import Scheduler, Stage, Topology
from tests.support.pipeline.trained import (
    Seen,
    backward,
    bits,
    copied,
    differences,
    once,
    train,
)
from tests.support.rounding import ADAM_EPS, rounding

STEPS, ROWS, LONGEST, WIDTH, PAD = 30, 3, 40, 8, -100
SCHEDULES = ("1f1b", "zb-h1")
PLACEMENTS: dict[str, list[Any]] = {
    "replicated": ["pipeline-shared", "data-parallel"],
    "sharded": ["pipeline-shared", "sharded"],
}
TIED = ("0.embedding.weight", "1.head.weight")


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, WIDTH, dtype=torch.float64)
        self.mix = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embedding(x)
        mixed: Tensor = embedded + self.mix(embedded).tanh().cumsum(1)
        return mixed


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Embedding(256, WIDTH, dtype=torch.float64)  # tied to the first embedding
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.head.weight)


def texts() -> list[bytes]:
    """Returns the paragraphs of Python's language reference, cut off."""
    parts = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    return [part.encode()[: LONGEST + 1] for part in parts if len(part) > 2]


def padded(rows: list[bytes]) -> dict[str, Tensor]:
    """Returns inputs and target, as long as the longest row."""
    longest = max(map(len, rows)) - 1
    x = torch.zeros(len(rows), longest, dtype=torch.long)
    target = torch.full((len(rows), longest), PAD)
    for i, row in enumerate(rows):
        codes = torch.tensor(list(row))
        x[i, : len(row) - 1], target[i, : len(row) - 1] = codes[:-1], codes[1:]
    return {"x": x, "target": target}


def summed(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of losses, and how many targets count."""
    sums = functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum"
    )
    return sums, (target != PAD).sum()


def batches() -> list[list[list[list[bytes]]]]:
    """Returns for each step, replica and microbatch its texts; numbers of microbatches change."""
    rows = iter(texts())
    return [
        [[list(islice(rows, 1 + (ROWS + m) % 3)) for m in range(2 + step % 3)] for _ in range(2)]
        for step in range(STEPS)
    ]


@once
def truth() -> Seen:
    first, last = First(), Last()
    last.head.weight = first.embedding.weight
    stages = nn.ModuleList([first, last])

    def step(number: int, _: int) -> Tensor:
        parts = [padded(rows) for replica in batches()[number] for rows in replica]
        found = [summed(last(first(part["x"])), part["target"]) for part in parts]
        return backward(torch.stack([s for s, _ in found]).sum() / sum(w for _, w in found))

    held = dict(stages.named_parameters(remove_duplicate=False))
    optimizer = torch.optim.AdamW(stages.parameters(), lr=1e-2, eps=ADAM_EPS)
    seen = train(step, lambda: held, optimizer=optimizer, steps=STEPS, clip=(1.0, 2.0))
    return Seen(losses=seen.losses, parameters=seen.parameters)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_over_text_is_that_of_one_process(schedule: str, placement: str) -> None:
    topology, given = Topology.create(pipeline=2), batches()
    stage, replica = topology.coordinate("pp"), topology.coordinate("dp")
    module = [First, Last][stage]()
    scheduler = Scheduler(
        [Stage(module, stage)],
        topology,
        schedule=schedule,
        num_microbatches=3,
        loss_fn=summed,
        loss_reduction="token_mean",
        tied=[{0: TIED[0][2:], 1: TIED[1][2:]}],
        handlers=PLACEMENTS[placement],
    )

    def step(number: int, _: int) -> Tensor:
        microbatches = [padded(rows) for rows in given[number][replica]]
        return scheduler.step(microbatches=microbatches).loss

    held = {f"{stage}.{name}": p for name, p in module.named_parameters()}
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-2, eps=ADAM_EPS)
    sync, true = scheduler.sync, truth()
    seen = train(step, lambda: held, sync=sync, optimizer=optimizer, steps=STEPS, clip=(1.0, 2.0))
    scheduler.close()  # waits for parameters that come back
    seen.norms, seen.parameters = [], copied(held)
    most = rounding(STEPS * 4 * 2 * ROWS * LONGEST, dtype=torch.float64)
    # A loss travels in float32.
    assert differences(seen, true, most, later=rounding(1), parameters=most) == {}
    assert seen.losses[-1] < seen.losses[0]
    assert bits({n: p for n, p in seen.parameters.items() if n in TIED}, [TIED]) == {TIED[0]: 4}
