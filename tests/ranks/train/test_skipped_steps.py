"""Gradients that are not finite end a job, or leave single updates out, on all ranks alike."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from pipegrad.errors import StepError
from pipegrad.testing import run_ranks
from pipegrad.train.config import load
from pipegrad.train.data import read_corpus
from pipegrad.train.trainer import Trainer
from tests.support.rounding import rounding
from tests.support.train.factories import tied
from tests.support.train.jobs import with_job

SKIP = "gradients.non_finite=skip"
SCHEDULE = "optimizer.schedule={name='StepLR', step_size=1, gamma=0.5}"
SHARDED = "gradient_handlers=['pipeline-shared', 'sharded']"
BAD = (3, 4)  # steps
NAMES = ["1.0.bias", "3.weight", "0.weight"]  # on the first stage, on the last one, and tied
TWO_BY_TWO = ["parallel.pipeline=2", "parallel.boundaries=[2]", SCHEDULE]


def spoil(trainer: Trainer, name: str, steps: tuple[int, ...], by: float) -> list[int]:
    """Spoils the gradient of a parameter in some steps, on the last data rank alone.

    Returns a list whose last element is the present step.
    """
    present = [0]

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * by if present[-1] in steps else gradient

    for module in trainer._modules.values():
        for known, parameter in module.named_parameters():
            if known == name and dist.get_rank() % 2:
                parameter.register_hook(hook)
    return present


def spoiled(settings: list[str], name: str, by: float = float("inf")) -> Any:
    trainer = Trainer(partial(load, Path("small.toml"), settings))
    present = spoil(trainer, name, BAD, by)
    found: list[Any] = []
    for number in range(1, 8):
        present.append(number)
        try:
            metrics = trainer.step(number)
        except StepError as error:
            found.append(str(error))
            break
        trainer.sync.wait_parameters()
        values = [p.tolist() for m in trainer._modules.values() for p in m.parameters()]
        told = metrics.skipped, metrics.note, metrics.learning_rate, metrics.loss
        scale = None if trainer.scaler is None else trainer.scaler.get_scale()
        found.append((*told, scale, values))
    trainer.close()
    return found


def jobs(folder: str) -> dict[Any, Any]:
    os.chdir(folder)
    found: dict[Any, Any] = {}
    for name in NAMES:
        found[name, "raise"] = spoiled(TWO_BY_TWO, name)
        found[name, "skip"] = spoiled([*TWO_BY_TWO, SKIP], name)
    nan = float("nan")
    found["nan"] = spoiled([*TWO_BY_TWO, SKIP], "3.weight", nan)
    found["clipped"] = spoiled([*TWO_BY_TWO, SKIP, "gradients.clip_norm=1.0"], "3.weight")
    found["sharded"] = spoiled([*TWO_BY_TWO, SKIP, SHARDED], "3.weight")
    found["fp16"] = spoiled([*TWO_BY_TWO, "train.precision=fp16"], "3.weight")
    found["fp16, sharded"] = spoiled([*TWO_BY_TWO, "train.precision=fp16", SHARDED], "3.weight")
    with mock.patch("pipegrad.train.run.update.MOST_SKIPPED", 2):
        found["many"] = spoiled([*TWO_BY_TWO, SKIP], "3.weight")
    return found


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(jobs, 4, str(with_job(tmp_path_factory.mktemp("spoiled"))))


# The embedding, of which the head is a tied copy, is held by both stages, so by all ranks.
HOLDERS = {
    "1.0.bias": "'1.0.bias' (stage 0, ranks [0, 1])",
    "3.weight": "'3.weight' (stage 1, ranks [2, 3])",
    "0.weight": "'0.weight' (stages [0, 1], ranks [0, 1, 2, 3])",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_message_names_parameter_stage_and_ranks(
    replies: list[dict[Any, Any]], name: str
) -> None:
    for reply in replies:
        *before, message = reply[name, "raise"]
        assert len(before) == 2
        norm = "inf" if name == "3.weight" else "nan"  # of zeros, infinite times
        assert message.startswith(
            f"step 3: the norm of the gradients is {norm}: the gradient of {HOLDERS[name]} is not "
            f"finite. This update would destroy the parameters: "
        )


@pytest.mark.parametrize(
    ("case", "name"),
    [*(((name, "skip"), name) for name in NAMES), ("nan", "3.weight"), ("clipped", "3.weight")],
)
def test_a_skipped_step_changes_nothing_and_is_counted(
    replies: list[dict[Any, Any]], case: Any, name: str
) -> None:
    why = f"the gradient of {HOLDERS[name]} is not finite"
    for reply in replies:
        skipped, notes, rates, losses, _, values = zip(*reply[case], strict=True)
        assert skipped == (0, 0, 1, 2, 2, 2, 2)
        assert notes == (None, None, f"skipped: {why}", f"skipped, 2 in a row: {why}", *[None] * 3)
        assert rates == (1e-3, 5e-4, 2.5e-4, 2.5e-4, 2.5e-4, 1.25e-4, 6.25e-5)
        assert values[1] == values[2] == values[3]
        assert len({str(each) for each in values}) == 5
        assert losses == tuple(each[3] for each in replies[0][case])


def test_sharded_gradients_name_the_rank_that_has_the_shard(replies: list[dict[Any, Any]]) -> None:
    for reply in replies:
        skipped, notes, _, _, _, values = zip(*reply["sharded"], strict=True)
        assert skipped == (0, 0, 1, 2, 2, 2, 2)
        assert notes[2].startswith("skipped: the gradient of '3.weight' (stage 1, rank")
        assert values[1] == values[2] == values[3] != values[4]
    assert len({reply["sharded"][2][1] for reply in replies}) == 1


def test_many_skipped_steps_in_a_row_end_the_run(replies: list[dict[Any, Any]]) -> None:
    for reply in replies:
        assert reply["many"][2][0] == 1
        assert reply["many"][3].startswith(
            "step 4: the norm of the gradients is inf after 1 steps that were skipped for that: "
            "the gradient of '3.weight' (stage 1, ranks [2, 3]) is not finite. "
        )
        assert len(reply["many"]) == 4


@pytest.mark.parametrize("case", ["fp16", "fp16, sharded"])
def test_fp16_skips_and_halves_the_scale(replies: list[dict[Any, Any]], case: str) -> None:
    for reply in replies:
        skipped, notes, rates, losses, scales, values = zip(*reply[case], strict=True)
        assert skipped == (0, 0, 1, 2, 2, 2, 2)
        assert scales == (65536.0, 65536.0, 32768.0, *[16384.0] * 4)
        assert notes[2].endswith(" is not finite, and the loss scale is 32768 now")
        assert rates == (1e-3, 5e-4, 2.5e-4, 2.5e-4, 2.5e-4, 1.25e-4, 6.25e-5)
        assert values[1] == values[2] == values[3] != values[4]
        assert losses == tuple(each[3] for each in replies[0][case])


def test_fp16_is_autocast_of_one_process(replies: list[dict[Any, Any]], tmp_path: Path) -> None:
    with_job(tmp_path)
    torch.manual_seed(0)
    model, corpus = tied(), read_corpus(load(tmp_path / "small.toml"))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    for number, metrics in enumerate(replies[0]["fp16"][:2], start=1):
        tokens, target = corpus.batch(number, seed=0, size=8)
        losses = []
        for part, goal in zip(tokens.chunk(8), target.chunk(8), strict=True):
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(part)
            losses.append(functional.cross_entropy(logits.flatten(0, 1).float(), goal.flatten()))
            scaler.scale(losses[-1] / 8).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        most = rounding(number * 8 * 16) if number == 1 else 1e-3  # of fp16, rounded by 2**-11
        assert metrics[3] == pytest.approx(torch.stack(losses).mean().item(), rel=most)
