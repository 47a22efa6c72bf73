"""A bit that flips in a job: an error that names the step of the run, or a repaired copy."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipegrad.errors import DriftError
from pipegrad.train.trainer import Trainer
from tests.support.train.jobs import trainer_of, with_job

pytestmark = pytest.mark.ranks(4)
JOB = ["parallel.pipeline=2", "parallel.boundaries=[2]", "gradients.check_every=3"]


def flip(trainer: Trainer, name: str) -> None:
    for module in trainer._modules.values():
        for known, parameter in module.named_parameters():
            if known == name:
                parameter.data.view(torch.int32).view(-1)[1] ^= 1


def run(folder: Path, *settings: str, flips: str) -> list[Any]:
    """Runs seven steps; before the sixth one bit of one copy of a parameter flips on rank 3."""
    trainer = trainer_of(folder / "small.toml", *JOB, *settings)
    found: list[Any] = []
    try:
        for number in range(trainer.first_step, 8):
            if number == 6:
                trainer.sync.wait_parameters()
                if dist.get_rank() == 3:
                    flip(trainer, flips)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                metrics = trainer.step(number)
            found.append((metrics.repaired, metrics.loss, [str(w.message) for w in caught]))
            if number == 4 and not settings:
                trainer.save(folder / "checkpoint", 4)
        trainer.sync.check_replicas()
    except DriftError as error:
        found.append(str(error))
    trainer.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_job(tmp_path_factory.mktemp("drift"))


def test_a_flipped_bit_ends_a_job_and_names_the_step_also_of_a_resumed_job(folder: Path) -> None:
    raised = run(folder, flips="3.weight")
    assert len(raised) == 6
    assert raised[-1].startswith(
        "copies of one parameter have drifted apart: '1.3.weight' over ranks [2, 3]. They "
        "differ in step 6, and were equal in step 3. "
    )
    resumed = run(folder, f"train.resume='{folder}/checkpoint'", flips="4.weight")
    assert len(resumed) == 2  # step 6 is the second one after the checkpoint of step 4
    assert resumed[-1].startswith(
        "copies of one parameter have drifted apart: '0.0.weight' on ranks [3], of the copies "
        "on ranks [0, 1, 2, 3]. They differ in step 6. "
    )


def test_a_repaired_job_goes_on(folder: Path) -> None:
    repaired = run(folder, "gradients.repair=true", flips="4.weight")
    without = run(folder, "gradients.repair=true", flips="")
    assert [each[0] for each in repaired] == [0, 0, 0, 0, 0, 1, 1]
    assert [each[0] for each in without] == [0] * 7
    assert repaired[:5] == without[:5]
    # One bit of one weight, in one step.
    assert [each[1] for each in repaired] == pytest.approx([e[1] for e in without], rel=1e-4)
    told = [text for each in repaired for text in each[2] if "copies" in text]
    assert len(told) == (dist.get_rank() == 0)
    assert all("'0.0.weight' on ranks [3]" in text for text in told)
