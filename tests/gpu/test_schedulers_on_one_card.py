"""A Scheduler on ranks that share one card, against one process on that card. Never a timing.

The same cases run on gloo and CPU, so that they are right before a card sees them. A case that
hangs takes a minute, so each world is one process for each rank and case.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology
from pipegrad.testing import run_ranks
from tests.support.gpu.card import GPU, sleep
from tests.support.gpu.worlds import GLOO, WORLDS, World, at_rest, enter
from tests.support.gradients.cases import outcome, rank
from tests.support.pipeline.models import TOKENS, VOCAB, build
from tests.support.pipeline.pipelines import loss_of
from tests.support.pipeline.schedulers import ROWS, error, share, topology
from tests.support.pipeline.trained import held_by, scheduled
from tests.support.rounding import rounding

SECONDS = 60.0
NUM_MICROBATCHES = 4
OWNED = [{"name": "pipeline-shared", "placement": "owner"}, "data-parallel"]
ASYMMETRIC = [{"name": "pipeline-shared", "exchange": "asymmetric"}, "data-parallel"]
pytestmark = pytest.mark.timeout(2 * SECONDS + 40)
MOST = rounding(2 * NUM_MICROBATCHES * ROWS * 2 * TOKENS)


def batch(step: int, shares: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (ROWS * NUM_MICROBATCHES * shares, tokens)
    x = torch.randint(VOCAB, shape, generator=generator)
    return x.to(device), ((5 * x + 3) % VOCAB).to(device)


def pipeline(device: torch.device, schedule: str, size: int, **options: Any) -> Scheduler:
    """Returns a Scheduler of a small tied model."""
    model = build("tied").to(device)
    return scheduled(model, schedule, topology(size), NUM_MICROBATCHES, **options)


def against_one_process(
    schedule: str,
    device: torch.device,
    *,
    size: int = 2,
    tokens: tuple[int, ...] = (TOKENS,) * 4,
    evaluates_first: bool = False,
    **options: Any,
) -> str:
    """Trains some steps; returns what is wrong with gradients and losses, "" if nothing is."""
    scheduler, whole = pipeline(device, schedule, size, **options), build("tied").to(device)
    at, mine, theirs = (
        scheduler.topology,
        held_by(scheduler),
        dict(whole.named_parameters(remove_duplicate=False)),
    )
    true_optimizer = torch.optim.SGD(whole.parameters(), lr=0.05)
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.05)
    wrong = []
    for step, length in enumerate(tokens):
        x, target = batch(step, at.size("dp"), length, device)
        if evaluates_first or step:
            with torch.no_grad():
                true = loss_of(whole(x), target).item()
            found = scheduler.evaluate(share(x, at), target=share(target, at)).loss
            wrong += [f"evaluation {step}: {found}"] if abs(found / true - 1) > MOST else []
        true_loss = loss_of(whole(x), target)
        true_loss.backward()
        loss = float(scheduler.step(share(x, at), target=share(target, at)).loss)
        wrong += [f"loss {step}: {loss}"] if abs(loss / true_loss.item() - 1) > MOST else []
        for name, parameter in mine.items():
            if parameter.grad is not None or "handlers" not in options:
                off = error(parameter.grad, theirs[name].grad)
                wrong += [f"step {step} {name}: {off}"] if not off <= MOST else []
        for one in (optimizer, true_optimizer):
            one.step()
            one.zero_grad()
    scheduler.sync.check_replicas()
    scheduler.close()
    at_rest(device)
    return ", ".join(wrong[:5])


def two(device: torch.device) -> str:
    """Two Schedulers, whose steps take turns."""
    both = [pipeline(device, name, 2) for name in ("1f1b", "zb-h1")]
    whole = build("tied").to(device)
    wrong = []
    for step in range(3):
        at = both[0].topology
        x, target = batch(step, at.size("dp"), TOKENS, device)
        whole.zero_grad()
        loss_of(whole(x), target).backward()
        theirs = dict(whole.named_parameters(remove_duplicate=False))
        for scheduler in both:
            mine = held_by(scheduler)
            for parameter in mine.values():
                parameter.grad = None
            scheduler.step(share(x, at), target=share(target, at))
            wrong += [
                f"step {step} {name}"
                for name, parameter in mine.items()
                if not error(parameter.grad, theirs[name].grad) <= MOST
            ]
    for scheduler in both:
        scheduler.close()
    return ", ".join(wrong[:5])


class Fails(nn.Module):
    """Multiplies; its forward fails when it is told to, behind a busy device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, device=device))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            if x.is_cuda:
                sleep(10)
            raise ValueError("no more")
        return x * self.weight


def one_fails(device: torch.device) -> str:
    """The last rank fails late in step 2: all refuse the step; the one behind it is right."""
    at = Topology.create(pipeline=2)
    module = Fails(device)
    (index,) = at.local_stages
    scheduler = Scheduler(
        [Stage(module, index)],
        at,
        schedule="1f1b",
        num_microbatches=NUM_MICROBATCHES,
        loss_fn=lambda out, _: out.sum(),
        handlers=["data-parallel"],
    )
    x = torch.ones(NUM_MICROBATCHES, 4, device=device)
    found = []
    for step in range(4):
        module.fails = step == 2 and rank() == dist.get_world_size() - 1
        module.weight.grad = None
        said = outcome(lambda: scheduler.step(x, target=x))
        gradient: Any = module.weight.grad
        found.append("Error" not in said and torch.equal(gradient, torch.ones_like(gradient)))
    scheduler.close()
    return "" if found == [True, True, False, True] else f"{found}"


class Weighted(nn.Module):
    """One parameter; its gradient is the input."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum().reshape(1)


def large(device: torch.device, numel: int, **options: Any) -> str:
    """One parameter of a size for which NCCL takes another way than for a few numbers."""
    at = Topology.create(pipeline=1)
    module = Weighted(numel).to(device)
    scheduler = Scheduler(
        [Stage(module, 0)],
        at,
        schedule="1f1b",
        num_microbatches=2,
        loss_fn=lambda out, _: out.sum(),
        handlers=["data-parallel"],
        **options,
    )
    x = torch.full((2, 1), rank() + 1.0, device=device)
    wrong = []
    for step in range(3):
        module.weight.grad = None
        scheduler.step(x, target=x)
        gradient: Any = module.weight.grad
        if gradient.unique().tolist() != [(dist.get_world_size() + 1) / 2]:
            wrong.append(f"step {step}: {gradient.unique().tolist()[:3]}")
    scheduler.close()
    return ", ".join(wrong)


CASES: dict[str, tuple[Callable[[torch.device], str], int]] = {
    **{
        f"{schedule} {size}": (partial(against_one_process, schedule), size)
        for schedule in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv")
        for size in (2, 4)
    },
    "changing shapes": (
        partial(against_one_process, "1f1b", tokens=(5, 9, 3, 5, 10)),
        2,
    ),
    "changing shapes, zb-h1": (
        partial(against_one_process, "zb-h1", tokens=(5, 9, 3, 5, 10)),
        2,
    ),
    "evaluate first": (partial(against_one_process, "1f1b", evaluates_first=True), 2),
    "nothing posted ahead": (partial(against_one_process, "1f1b", depth=0), 2),
    "owner": (partial(against_one_process, "1f1b", handlers=OWNED), 2),
    "owner 4": (partial(against_one_process, "1f1b", handlers=OWNED), 4),
    "asymmetric": (partial(against_one_process, "1f1b", handlers=ASYMMETRIC), 2),
    "asymmetric 4": (partial(against_one_process, "1f1b", handlers=ASYMMETRIC), 4),
    "two": (two, 2),
    "one fails": (one_fails, 2),
    "one of four fails": (one_fails, 4),
    "1 KiB": (partial(large, numel=2**8), 2),
    "1 MiB": (partial(large, numel=2**18), 2),
    "64 MiB": (partial(large, numel=2**24), 2),
    "64 MiB, wide sums": (partial(large, numel=2**24, sum_dtype=torch.float64), 2),
}


def run_case(world: World, folder: str, name: str) -> str:
    """Runs on every rank."""
    return CASES[name][0](enter(world, folder))


@pytest.mark.parametrize("world", [world for world in WORLDS if world.values[0] != GLOO])
@pytest.mark.parametrize("name", CASES)
def test_every_rank_finds_what_one_process_would(name: str, world: World, tmp_path: Path) -> None:
    size = CASES[name][1]
    replies = run_ranks(run_case, size, world, str(tmp_path), name, timeout_seconds=SECONDS)
    assert replies == [""] * size


def refused(world: World, folder: str) -> str:
    """Returns what a Scheduler says: gloo would hand a device's pointer to the socket."""
    device = enter(world, folder)
    return outcome(lambda: pipeline(device, "1f1b", 2))


@pytest.mark.parametrize("world", [pytest.param(GLOO, id="gloo-cuda", marks=GPU)])
def test_a_backend_that_cannot_send_is_refused(world: World, tmp_path: Path) -> None:
    replies = run_ranks(refused, 2, world, str(tmp_path), timeout_seconds=SECONDS)
    assert all("gloo sends from the CPU alone" in said for said in replies)
