"""A bit that flips in a job: an error that names the step of the run, or a repaired copy."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipegrad.errors import DriftError
from pipegrad.testing import run_ranks
from pipegrad.train.config import load
from pipegrad.train.trainer import Trainer
from tests.support.train.jobs import with_job

JOB = ["parallel.pipeline=2", "parallel.boundaries=[2]", "gradients.check_every=3"]


def flip(trainer: Trainer, name: str) -> None:
    for module in trainer._modules.values():
        for known, parameter in module.named_parameters():
            if known == name:
                parameter.data.view(torch.int32).view(-1)[1] ^= 1


def run(settings: list[str], name: str, *, flips: bool = True) -> Any:
    """Runs seven steps; before the sixth one bit of one copy flips on rank 3."""
    trainer = Trainer(partial(load, Path("small.toml"), [*JOB, *settings]))
    found: list[Any] = []
    try:
        for number in range(trainer.first_step, 8):
            if number == 6:
                trainer.sync.wait_parameters()
            if flips and number == 6 and dist.get_rank() == 3:
                flip(trainer, name)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                metrics = trainer.step(number)
            found.append((metrics.repaired, metrics.loss, [str(w.message) for w in caught]))
            if number == 4 and not settings:
                trainer.save(Path("checkpoint"), 4)
        trainer.sync.check_replicas()
    except DriftError as error:
        found.append(str(error))
    trainer.close()
    return found


def jobs(folder: str) -> dict[str, Any]:
    os.chdir(folder)
    return {
        "raised": run([], "3.weight"),
        "resumed": run(["train.resume=checkpoint"], "4.weight"),
        "repaired": run(["gradients.repair=true"], "4.weight"),
        "without": run(["gradients.repair=true"], "4.weight", flips=False),
    }


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(jobs, 4, str(with_job(tmp_path_factory.mktemp("drift"))))


def test_a_flipped_bit_ends_a_job_and_names_the_step(replies: list[dict[str, Any]]) -> None:
    for reply in replies:
        assert len(reply["raised"]) == 6
        assert reply["raised"][-1].startswith(
            "copies of one parameter have drifted apart: '1.3.weight' over ranks [2, 3]. They "
            "differ in step 6, and were equal in step 3. "
        )


def test_steps_of_a_resumed_job_go_on(replies: list[dict[str, Any]]) -> None:
    """Step 6 is the second one after the checkpoint of step 4."""
    for reply in replies:
        assert len(reply["resumed"]) == 2
        assert reply["resumed"][-1].startswith(
            "copies of one parameter have drifted apart: '0.0.weight' on ranks [3], of the copies "
            "on ranks [0, 1, 2, 3]. They differ in step 6. "
        )


def test_a_repaired_job_goes_on(replies: list[dict[str, Any]]) -> None:
    for rank, reply in enumerate(replies):
        repaired, without = reply["repaired"], reply["without"]
        assert [each[0] for each in repaired] == [0, 0, 0, 0, 0, 1, 1]
        assert [each[0] for each in without] == [0] * 7
        assert repaired[:5] == without[:5]
        # One bit of one weight, in one step.
        assert [each[1] for each in repaired] == pytest.approx([e[1] for e in without], rel=1e-4)
        told = [text for each in repaired for text in each[2] if "copies" in text]
        assert len(told) == (rank == 0)
        assert all("'0.0.weight' on ranks [3]" in text for text in told)
