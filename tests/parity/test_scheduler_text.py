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
from pipegrad.testing import run_ranks
from tests.support.rounding import ADAM_EPS, rounding

STEPS, ROWS, LONGEST, WIDTH, PAD = 30, 3, 40, 8, -100
SCHEDULES = ("1f1b", "zb-h1")
PLACEMENTS: dict[str, list[Any]] = {
    "replicated": ["pipeline-shared", "data-parallel"],
    "sharded": ["pipeline-shared", "sharded"],
}


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


def one_process() -> tuple[list[float], dict[str, Tensor]]:
    """Returns the losses of all steps, and the parameters afterwards."""
    first, last = First(), Last()
    last.head.weight = first.embedding.weight
    optimizer = torch.optim.AdamW(
        [*first.parameters(), last.norm.weight, last.norm.bias], lr=1e-2, eps=ADAM_EPS
    )
    losses = []
    for replicas in batches():
        parts = [padded(rows) for microbatches in replicas for rows in microbatches]
        found = [summed(last(first(part["x"])), part["target"]) for part in parts]
        loss = torch.stack([s for s, _ in found]).sum() / torch.stack([w for _, w in found]).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(nn.ModuleList([first, last]).parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {**named(0, first), **named(1, last)}


def named(stage: int, module: nn.Module) -> dict[str, Tensor]:
    return {f"{stage}.{name}": p.detach().clone() for name, p in module.named_parameters()}


def train(schedule: str, handlers: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
    topology = Topology.create(pipeline=2)
    stage, replica = topology.coordinate("pp"), topology.coordinate("dp")
    module = [First, Last][stage]()
    scheduler = Scheduler(
        [Stage(module, stage)],
        topology,
        schedule=schedule,
        num_microbatches=3,
        loss_fn=summed,
        loss_reduction="token_mean",
        tied=[{0: "embedding.weight", 1: "head.weight"}],
        handlers=handlers,
    )
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-2, eps=ADAM_EPS)
    losses = []
    for replicas in batches():
        result = scheduler.step(microbatches=[padded(rows) for rows in replicas[replica]])
        scheduler.sync.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss.item())
    scheduler.sync.wait_parameters()
    found = named(stage, module)
    scheduler.close()
    return losses, found


def run() -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    return {
        f"{schedule}, {name}": train(schedule, handlers)
        for schedule in SCHEDULES
        for name, handlers in PLACEMENTS.items()
    }


@pytest.fixture(scope="module")
def replies() -> Any:
    return run_ranks(run, 4)


@pytest.fixture(scope="module")
def true() -> Any:
    return one_process()


@pytest.mark.parametrize("case", [f"{s}, {p}" for s in SCHEDULES for p in PLACEMENTS])
def test_a_run_over_text_is_that_of_one_process(case: str, replies: Any, true: Any) -> None:
    losses, parameters = true
    terms = STEPS * 4 * 2 * ROWS * LONGEST
    for reply in replies:
        found, mine = reply[case]
        assert found == pytest.approx(losses, rel=rounding(1))  # a loss travels in float32
        for name, parameter in mine.items():
            largest = parameters[name].abs().max()
            error = (parameter - parameters[name]).abs().max() / largest
            assert error <= rounding(terms, dtype=torch.float64), name
    assert losses[-1] < losses[0]
    tied = [reply[case][1].get("0.embedding.weight", None) for reply in replies]
    heads = [reply[case][1].get("1.head.weight", None) for reply in replies]
    copies = [copy for copy in (*tied, *heads) if copy is not None]
    assert len(copies) == 4
    assert all(torch.equal(copies[0], copy) for copy in copies)
