"""Gradients that are not finite, and bits that flip: a job ends, or goes on, on all ranks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from pipegrad.errors import DriftError, StepError
from pipegrad.train.loop import Trainer
from pipegrad.train.reporters.reporter import StepMetrics
from tests.support.ranked import gathered
from tests.support.train.jobs import trainer_of, with_job

pytestmark = pytest.mark.ranks(4)
SKIP = "gradients.non_finite=skip"
FP16 = "train.precision=fp16"
SHARDED = "gradient_handlers=['pipeline-shared', 'sharded']"
TWO_BY_TWO = [
    "parallel.pipeline=2",
    "parallel.boundaries=[2]",
    "optimizer.schedule={name='StepLR', step_size=1, gamma=0.5}",
]
# Parameters on the first stage, on the last one, and tied: the embedding, of which the head is a
# copy, is held by both stages, so by all ranks.
HOLDERS = {
    "1.0.bias": "'1.0.bias' (stage 0, ranks [0, 1])",
    "3.weight": "'3.weight' (stage 1, ranks [2, 3])",
    "0.weight": "'0.weight' (stages [0, 1], ranks [0, 1, 2, 3])",
}
INF, NAN = float("inf"), float("nan")
RATES = [1e-3, 5e-4, 2.5e-4, 2.5e-4, 2.5e-4, 1.25e-4, 6.25e-5]


class Spoiled(NamedTuple):
    """What a job has come to: metrics, values of parameters and the loss scale after each step."""

    steps: list[StepMetrics]
    values: list[list[Any]]
    scales: list[float]
    error: str

    def check(self) -> None:
        """Raises unless steps 3 and 4 changed nothing, all others did, and all ranks know it."""
        assert [step.skipped for step in self.steps] == [0, 0, 1, 2, 2, 2, 2]
        assert self.values[1] == self.values[2] == self.values[3]
        assert len({str(each) for each in self.values}) == 5
        losses = [step.loss for step in self.steps]
        assert gathered(losses) == [losses] * 4
        assert self.error == ""

    @property
    def notes(self) -> list[str | None]:
        return [step.note for step in self.steps]


def spoiled(folder: Path, *settings: str, name: str = "3.weight", by: float = INF) -> Spoiled:
    """Spoils the gradient of a parameter in steps 3 and 4, on the last data rank alone."""
    trainer = trainer_of(folder / "small.toml", *TWO_BY_TWO, *settings)
    found, number = Spoiled([], [], [], ""), 0

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * by if number in (3, 4) else gradient

    for module in trainer._modules.values():
        for known, parameter in module.named_parameters():
            if known == name and dist.get_rank() % 2:
                parameter.register_hook(hook)
    try:
        for number in range(1, 8):
            found.steps.append(trainer.step(number))
            trainer.sync.wait_parameters()
            modules = trainer._modules.values()
            found.values.append([p.tolist() for m in modules for p in m.parameters()])
            if trainer.scaler is not None:
                found.scales.append(trainer.scaler.get_scale())
    except StepError as error:
        found = found._replace(error=str(error))
    trainer.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_job(tmp_path_factory.mktemp("spoiled"))


@pytest.mark.parametrize("name", HOLDERS)
def test_the_message_names_parameter_stage_and_ranks(folder: Path, name: str) -> None:
    found = spoiled(folder, name=name)
    assert len(found.steps) == 2
    norm = "inf" if name == "3.weight" else "nan"  # of zeros, infinite times
    assert found.error.startswith(
        f"step 3: the norm of the gradients is {norm}: the gradient of {HOLDERS[name]} is not "
        f"finite. This update would destroy the parameters: "
    )


@pytest.mark.parametrize(
    ("name", "by", "settings"),
    [
        *((name, INF, []) for name in HOLDERS),
        ("3.weight", NAN, []),
        ("3.weight", INF, ["gradients.clip_norm=1.0"]),
    ],
)
def test_a_skipped_step_changes_nothing_and_is_counted(
    folder: Path, name: str, by: float, settings: list[str]
) -> None:
    found = spoiled(folder, SKIP, *settings, name=name, by=by)
    found.check()
    why = f"the gradient of {HOLDERS[name]} is not finite"
    assert found.notes == [
        *(None, None, f"skipped: {why}", f"skipped, 2 in a row: {why}"),
        *[None] * 3,
    ]
    assert [step.learning_rate for step in found.steps] == RATES


def test_sharded_gradients_name_the_rank_that_has_the_shard(folder: Path) -> None:
    found = spoiled(folder, SKIP, SHARDED)
    found.check()
    note = found.notes[2]
    assert note is not None
    assert note.startswith("skipped: the gradient of '3.weight' (stage 1, rank")
    assert gathered(note) == [note] * 4


def test_many_skipped_steps_in_a_row_end_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipegrad.train.optimizer.MOST_SKIPPED", 2)
    found = spoiled(folder, SKIP)
    assert [step.skipped for step in found.steps] == [0, 0, 1]
    assert found.error.startswith(
        "step 4: the norm of the gradients is inf after 1 steps that were skipped for that: "
        "the gradient of '3.weight' (stage 1, ranks [2, 3]) is not finite. "
    )


@pytest.mark.parametrize("settings", [[FP16], [FP16, SHARDED]])
def test_fp16_skips_and_halves_the_scale(folder: Path, settings: list[str]) -> None:
    found = spoiled(folder, *settings)
    found.check()
    assert found.scales == [65536.0, 65536.0, 32768.0, *[16384.0] * 4]
    assert str(found.notes[2]).endswith(" is not finite, and the loss scale is 32768 now")
    assert [step.learning_rate for step in found.steps] == RATES


JOB = ["parallel.pipeline=2", "parallel.boundaries=[2]", "gradients.check_every=3"]


def flip(trainer: Trainer, name: str) -> None:
    for module in trainer._modules.values():
        for known, parameter in module.named_parameters():
            if known == name:
                parameter.data.view(torch.int32).view(-1)[1] ^= 1


def with_flip(folder: Path, *settings: str, flips: str) -> list[Any]:
    """Runs seven steps; before the sixth one bit of one copy of a parameter flips on rank 3."""
    trainer = trainer_of(folder / "small.toml", *JOB, *settings)
    found: list[Any] = []
    try:
        for number in range(trainer.first_step, 8):
            if number == 6:
                trainer.sync.wait_parameters()
                if dist.get_rank() == 3:
                    flip(trainer, flips)
            found.append(trainer.step(number).loss)
            if number == 4 and not settings:
                trainer.saving.write(folder / "checkpoint", 4)
        trainer.sync.check_replicas()
    except DriftError as error:
        found.append(str(error))
    trainer.close()
    return found


def test_a_flipped_bit_ends_a_job_and_names_the_step_also_of_a_resumed_job(folder: Path) -> None:
    raised = with_flip(folder, flips="3.weight")
    assert len(raised) == 6
    assert raised[-1].startswith(
        "copies of one parameter have drifted apart: '1.3.weight' over ranks [2, 3]. They "
        "differ in step 6, and were equal in step 3. "
    )
    resumed = with_flip(folder, f"train.resume='{folder}/checkpoint'", flips="4.weight")
    assert len(resumed) == 2  # step 6 is the second one after the checkpoint of step 4
    assert resumed[-1].startswith(
        "copies of one parameter have drifted apart: '0.0.weight' on ranks [3], of the copies "
        "on ranks [0, 1, 2, 3]. They differ in step 6. "
    )
