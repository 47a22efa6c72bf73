"""Examples of models with named edges, each against one process that runs the uncut model.

What one process computes is written here once more, without names of edges. All of it is float64,
so that an error is one.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, pad

from pipegrad import Scheduler, Stage, Topology, find_tied, schedules
from tests.support.gradients.cases import rank
from tests.support.pairwise import everything
from tests.support.pipeline.schedulers import share
from tests.support.pipeline.trained import (
    Seen,
    backward,
    bits,
    checked,
    differences,
    once,
    train,
)
from tests.support.rounding import ADAM_EPS, rounding

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS, TOKENS, STEPS = 16, 12, 3
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
    """

    alone: Callable[[nn.ModuleList, Batch], Tensor]
    draw: Callable[[], Batch]


KNOWN = {
    "attention_residuals": Example(attention_residuals, lambda: next_words("tokens")),
    "multi_token_prediction": Example(multi_token_prediction, two_words_ahead),
    "balance_loss": Example(balance_loss, lambda: next_words("x")),
    "hyper_connections": Example(hyper_connections, lambda: next_words("tokens")),
    "encoder_decoder": Example(encoder_decoder, pairs),
    "unet_skip": Example(unet_skip, images),
}
LAUNCHED = "unet_skip"  # by torchrun; the others run in ranks that are there
SCHEDULES = {4: ("1f1b", "eager-1f1b", "zb-h1"), 2: ("interleaved-1f1b", "zbv")}  # by ranks


TIED = ("multi_token_prediction", "encoder_decoder")
CASES = [  # those that tie have replicas too
    pytest.param(name, schedule, pipeline, marks=pytest.mark.ranks(4 if name in TIED else pipeline))
    for at, name in enumerate(KNOWN)
    for pipeline, names in SCHEDULES.items()
    for schedule in (names if everything() else [names[at % len(names)]])
]


# One rank.


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def built(name: str) -> tuple[dict[str, Any], list[Stage], nn.ModuleList, list[Batch]]:
    """Returns an example, its stages and their modules, and batches: the same ones each time."""
    torch.manual_seed(0)
    example = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    stages = example["stages"]()
    parts = nn.ModuleList(stage.module for stage in stages)
    with torch.no_grad():  # zeros, ones and identities would hide errors behind symmetries
        for parameter in parts.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return example, stages, parts, [KNOWN[name].draw() for _ in range(STEPS)]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=ADAM_EPS)


@once
def truth(name: str) -> Seen:
    _, _, parts, batches = built(name)
    held = dict(parts.named_parameters(remove_duplicate=False))
    return train(
        lambda step, _: backward(KNOWN[name].alone(parts, batches[step])),
        lambda: held,
        optimizer=optimizer_of(parts.parameters()),
        steps=STEPS,
    )


def trained(name: str, schedule: str, pipeline: int) -> tuple[Seen, Any]:
    """Trains the stages of this rank; returns what was seen and what is tied."""
    made = schedules.build(schedule, num_ranks=pipeline, num_microbatches=4)
    at = Topology.create(pipeline=pipeline, stage_to_rank=made.stage_to_rank)
    example, stages, parts, batches = built(name)
    tied = find_tied(parts)
    scheduler = Scheduler(
        [stages[index] for index in at.local_stages],
        at,
        schedule=made,
        loss_fn=example.get("loss_fn", mse_loss),
        tied=tied,
    )
    held = {
        name: parameter
        for name, parameter in parts.named_parameters(remove_duplicate=False)
        if int(name.split(".")[0]) in at.local_stages
    }
    seen = train(
        lambda step, _: scheduler.step({n: share(x, at) for n, x in batches[step].items()}).loss,
        lambda: held,
        sync=scheduler.sync,
        optimizer=scheduler.optimizer(optimizer_of),
        steps=STEPS,
    )
    scheduler.close()
    return seen, tied


@pytest.mark.parametrize(("name", "schedule", "pipeline"), CASES)
@checked()
def test_loss_and_gradients_are_those_of_one_process(
    name: str, schedule: str, pipeline: int
) -> None:
    with in_float64():
        seen, tied = trained(name, schedule, pipeline)
        assert differences(seen, truth(name), MOST, later=MOST_OF_LOSS) == {}
    names = {name for tie in tied for name in tie}
    copies = bits({n: p for n, p in seen.parameters.items() if n in names}, tied)
    assert bool(copies) == (name in TIED)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", [name for name in KNOWN if name != LAUNCHED])
def test_its_loss_falls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda *_, **__: None)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    if rank() == 0:
        check_losses(printed.getvalue())
    else:
        assert printed.getvalue() == ""


@pytest.mark.parametrize("name", KNOWN)
def test_it_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60


def check_losses(printed: str) -> None:
    found = re.findall(r"step (\d+)  loss (\S+)", printed)
    assert [int(step) for step, _ in found] == [10, 20, 30]
    first, *_, last = (float(loss) for _, loss in found)
    assert last < 0.9 * first


def test_torchrun_runs_one_as_its_first_lines_say() -> None:
    command = ["torchrun", "--nproc-per-node", "4", f"examples/{LAUNCHED}.py"]
    assert shlex.join(command) in (EXAMPLES / f"{LAUNCHED}.py").read_text()
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
    check_losses(ran.stdout)
