"""Examples of models with named edges, each against one process that runs the uncut model.

What one process computes is written here once more, without names of edges. All of it is float64,
so that an error is one.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, pad

from pipegrad import Scheduler, Stage, Topology, find_tied, schedules
from pipegrad.testing import run_ranks
from tests.support.pipeline.schedulers import (
    Report,
    digest,
    error,
    finder,
    run_each,
    share,
    wrong,
)
from tests.support.rounding import ADAM_EPS, rounding

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS, TOKENS, STEPS = 16, 12, 4
MOST = rounding(STEPS * ROWS * 16 * 16, dtype=torch.float64)  # an image has 16 x 16 pixels
MOST_OF_LOSS = rounding(4)  # the losses of microbatches are added in float32

Batch = dict[str, Tensor]


# One process.


def of_words(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def attention_residuals(parts: nn.ModuleList, batch: Batch) -> Tensor:
    outputs = [parts[0](batch["tokens"])]
    for part in list(parts)[1:]:
        outputs.append(part(*outputs))
    return of_words(outputs[-1], batch["target"])


def multi_token_prediction(parts: nn.ModuleList, batch: Batch) -> Tensor:
    x = parts[2](parts[1](parts[0](batch["x"])))
    logits, ahead = parts[3](x, batch["following"])
    next_words, after_next = batch["target"][:, :-1], batch["target"][:, 1:]
    return of_words(logits, next_words) + 0.3 * of_words(ahead, after_next)


def balance_loss(parts: nn.ModuleList, batch: Batch) -> Tensor:
    x, balances = batch["x"], list[Tensor]()
    for part in parts:
        x, balance = part(x)
        balances.append(balance)
    return of_words(x, batch["target"]) + sum(balances)


def hyper_connections(parts: nn.ModuleList, batch: Batch) -> Tensor:
    streams = parts[0](batch["tokens"])
    return of_words(parts[3](*parts[2](*parts[1](*streams))), batch["target"])


def encoder_decoder(parts: nn.ModuleList, batch: Batch) -> Tensor:
    x, memory = batch["x"], parts[0](batch["source"])
    for part in list(parts)[1:]:
        x = part(x, memory)
    return of_words(x, batch["target"])


def unet_skip(parts: nn.ModuleList, batch: Batch) -> Tensor:
    x, large = parts[0](batch["x"], batch["t"])
    x, small = parts[1](x, batch["t"])
    x = parts[2](x, batch["t"], small)
    return mse_loss(parts[3](x, batch["t"], large), batch["target"])


# What it is given.


def words(number: int) -> Tensor:
    return torch.randint(32, (ROWS, number))


def next_words(name: str) -> Batch:
    text = words(TOKENS + 1)
    return {name: text[:, :-1], "target": text[:, 1:]}


def two_words_ahead() -> Batch:
    text = words(TOKENS + 2)
    return {"x": text[:, :-2], "following": text[:, 1:-1], "target": text[:, 1:]}


def pairs() -> Batch:
    answer = pad(words(TOKENS), (1, 0))
    return {"source": words(TOKENS - 3), "x": answer[:, :-1], "target": answer[:, 1:]}


def images() -> Batch:
    x, noise = torch.randn(2, ROWS, 3, 16, 16)
    return {"x": x, "t": torch.rand(ROWS, 1), "target": noise}


@dataclass(frozen=True)
class Example:
    """What is known of an example.

    Attributes:
        alone: Returns the loss in one process, given its stages' modules.
        draw: Returns a batch, of all replicas.
        lost: A value, and a stage that lets no gradient back through it in a case that must fail.
    """

    alone: Callable[[nn.ModuleList, Batch], Tensor]
    draw: Callable[[], Batch]
    lost: tuple[str, int]


KNOWN = {
    "attention_residuals": Example(attention_residuals, lambda: next_words("tokens"), ("h0", 3)),
    "multi_token_prediction": Example(multi_token_prediction, two_words_ahead, ("x", 3)),
    "balance_loss": Example(balance_loss, lambda: next_words("x"), ("balance", 1)),
    "hyper_connections": Example(hyper_connections, lambda: next_words("tokens"), ("c", 2)),
    "encoder_decoder": Example(encoder_decoder, pairs, ("memory", 2)),
    "unet_skip": Example(unet_skip, images, ("skip0", 3)),
}
SCHEDULES = {4: ("1f1b", "eager-1f1b", "zb-h1"), 2: ("interleaved-1f1b", "zbv")}  # by ranks


@dataclass(frozen=True)
class Case:
    name: str
    schedule: str
    pipeline: int
    loses: bool = False
    num_ranks: int = 4

    def __str__(self) -> str:
        lost = " without a gradient" if self.loses else ""
        return f"{self.name} {self.schedule} {self.pipeline}x{4 // self.pipeline}{lost}"


CASES = [
    Case(name, schedule, pipeline)
    for name in KNOWN
    for pipeline, names in SCHEDULES.items()
    for schedule in names
]
LOSING = [Case(name, "1f1b", 4, loses=True) for name in KNOWN]


# One rank.


def lose_gradient(stage: Stage, name: str) -> None:
    """Lets no gradient back through an input, or a loss, of this name."""
    whole = stage.forward

    def detached(names: tuple[str, ...], values: Any) -> tuple[Any, ...]:
        return tuple(v.detach() if n == name else v for n, v in zip(names, values, strict=True))

    def forward(values: Any) -> tuple[Tensor, ...]:
        made = whole(detached(stage.inputs, values))
        count = len(stage.outputs)
        return *made[:count], *detached(stage.losses, made[count:])

    stage.forward = forward  # type: ignore[method-assign]


def run_case(case: Case) -> Report:
    """Trains the stages of this rank, and the whole model. Runs on every rank."""
    known, report = KNOWN[case.name], Report()
    schedule = schedules.build(case.schedule, num_ranks=case.pipeline, num_microbatches=4)
    at = Topology.create(pipeline=case.pipeline, stage_to_rank=schedule.stage_to_rank)
    torch.manual_seed(0)
    example = runpy.run_path(str(EXAMPLES / f"{case.name}.py"))
    stages = example["stages"]()
    parts = nn.ModuleList(stage.module for stage in stages)
    with torch.no_grad():  # zeros, ones and identities would hide errors behind symmetries
        for parameter in parts.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    true = copy.deepcopy(parts)
    if case.loses:
        name, index = known.lost
        lose_gradient(stages[index], name)
    tied = find_tied(parts)
    scheduler = Scheduler(
        [stages[index] for index in at.local_stages],
        at,
        schedule=schedule,
        loss_fn=example.get("loss_fn", mse_loss),
        tied=tied,
    )
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-2, eps=ADAM_EPS)
    true_optimizer = torch.optim.AdamW(true.parameters(), lr=1e-2, eps=ADAM_EPS)
    theirs = dict(true.named_parameters(remove_duplicate=False))
    ours = {
        name: parameter
        for name, parameter in parts.named_parameters(remove_duplicate=False)
        if int(name.split(".")[0]) in at.local_stages
    }
    for step in range(STEPS):
        batch = known.draw()
        result = scheduler.step({name: share(value, at) for name, value in batch.items()})
        loss = known.alone(true, batch)
        loss.backward()
        report.losses.append(abs(result.loss.item() / loss.item() - 1))
        for name, parameter in ours.items():
            found = error(parameter.grad, theirs[name].grad)
            report.errors[f"step {step} gradient of {name}"] = found
        for each in (optimizer, true_optimizer):
            each.step()
            each.zero_grad()
        report.bits.append({digest(ours[name]) for names in tied for name in names if name in ours})
    scheduler.close()
    return report


def run_cases(names: list[str]) -> Any:
    torch.set_default_dtype(torch.float64)
    return run_each(run_case, [*CASES, *LOSING], names)


found = finder([*CASES, *LOSING], run_cases)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients_are_those_of_one_process(case: Case) -> None:
    reports = found(case)

    for rank, report in enumerate(reports):
        assert wrong(report.errors, MOST) == {}, f"{case}, rank {rank}"
        assert max(report.losses) <= MOST_OF_LOSS, f"{case}, rank {rank}"
    for step in range(STEPS):
        digests = set().union(*(report.bits[step] for report in reports))
        is_tied = case.name in ("multi_token_prediction", "encoder_decoder")
        assert len(digests) == is_tied, f"{case}, step {step}"


@pytest.mark.parametrize("case", LOSING, ids=str)
def test_without_the_gradient_of_one_value_they_are_not(case: Case) -> None:
    reports = found(case)

    assert max(max(report.errors.values()) for report in reports) > 1e-3
    assert max(report.losses[0] for report in reports) < MOST_OF_LOSS  # forward is as it was


def run_mains() -> list[str]:
    """Runs all examples on a world that is there already; returns what each printed."""
    dist.init_process_group = lambda *_, **__: None
    dist.destroy_process_group = lambda *_, **__: None
    pages = list[str]()
    for name in KNOWN:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        pages.append(printed.getvalue())
    return pages


def losses(printed: str) -> list[float]:
    found = re.findall(r"step (\d+)  loss (\S+)", printed)
    assert [int(step) for step, _ in found] == [10, 20, 30]
    return [float(loss) for _, loss in found]


def test_their_losses_fall_and_they_are_short() -> None:
    printed, *others = run_ranks(run_mains, 4)

    for name, page in zip(KNOWN, printed, strict=True):
        first, *_, last = losses(page)
        assert last < 0.9 * first, name
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60
    assert others == [[""] * len(KNOWN)] * 3


def test_torchrun_runs_one_as_its_first_lines_say() -> None:
    path = EXAMPLES / "unet_skip.py"
    command = ["torchrun", "--nproc-per-node", "4", "examples/unet_skip.py"]
    assert shlex.join(command) in path.read_text()
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *command[1:]],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert len(losses(ran.stdout)) == 3
