"""Jobs whose replicas train alone: they go on with the same bits, and end as one model."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import pipegrad
from pipegrad.errors import PipegradError
from pipegrad.testing import run_ranks
from pipegrad.train.config import load
from pipegrad.train.trainer import Trainer
from tests.support.train.jobs import with_job

SETTINGS = ["parallel.pipeline=2", "parallel.data=2", "train.steps=6", "gradients.clip_norm=1"]
MEETING = "gradient_handlers=[{shared}, {{name='diloco', every={every}}}]"
OWNED = "{name='pipeline-shared', placement='owner'}"


def meeting(every: int, shared: str = "'pipeline-shared'") -> str:
    return MEETING.format(every=every, shared=shared)


WAYS = {
    "replicas": [meeting(2)],
    "owners": [meeting(2, OWNED)],
    "fp16": [meeting(2), "train.precision=fp16"],
}


def trained(settings: list[str], until: int, saved: str = "") -> Any:
    """Trains a job until a step, saves it there; returns this rank's parameters, or an error."""
    try:
        trainer = Trainer(partial(load, Path("small.toml"), [*SETTINGS, *settings]))
    except PipegradError as error:
        return str(error)
    for number in range(trainer.first_step, until + 1):
        trainer.step(number)
    if saved:
        trainer.save(Path(saved), until)
    trainer.sync.wait_parameters()
    held = {name: tensor.clone() for name, tensor in trainer._state.tensors().items()}
    trainer.close()
    return held


def histories(folder: str) -> dict[str, Any]:
    os.chdir(folder)
    found: dict[str, Any] = {}
    for name, way in WAYS.items():
        found[f"{name} through"] = trained(way, 6)
        for step in (3, 4):
            trained(way, step, f"{name} {step}")
            found[f"{name} from {step}"] = trained([*way, f"train.resume='{name} {step}'"], 6)
    halfway = "train.resume='replicas 3'"
    found["no multiple"] = trained([meeting(4)], 6)
    found["no replicas"] = trained(["parallel.pipeline=4", "parallel.data=1", halfway], 6)
    found["other handlers"] = trained([halfway], 6)
    found["shards"] = trained([meeting(2), "parallel.shards={'1.0.weight'=0}"], 6)
    found["another every"] = trained([meeting(3), halfway], 6)
    found["another every after a meeting"] = trained([meeting(3), "train.resume='replicas 4'"], 6)
    found["other buckets"] = trained([meeting(2), "gradients.bucket_bytes=200", halfway], 6)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_job(tmp_path_factory.mktemp("diloco"))


@pytest.fixture(scope="module")
def replies(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(histories, 4, str(folder))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("step", [3, 4])
def test_a_resumed_run_has_the_same_bits(
    name: str, step: int, replies: list[dict[str, Any]]
) -> None:
    """After step 3 replicas are apart, after step 4 they have just met."""
    for rank, reply in enumerate(replies):
        through, resumed = reply[f"{name} through"], reply[f"{name} from {step}"]
        assert through.keys() == resumed.keys()
        for key, tensor in through.items():
            assert torch.equal(resumed[key], tensor), (rank, key)


def test_replicas_end_as_one_model(replies: list[dict[str, Any]]) -> None:
    of_replicas = [
        {key.partition("[")[0]: tensor for key, tensor in reply["replicas through"].items()}
        for reply in replies
    ]
    for stage in (0, 2):
        first, second = of_replicas[stage : stage + 2]
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_checkpoint_after_a_meeting_can_be_exported(
    folder: Path, replies: list[dict[str, Any]]
) -> None:
    model = pipegrad.load(folder / "replicas 4")
    assert {key.partition("[")[0] for key in replies[0]["replicas through"]} <= {
        f"model.{name}" for name in model
    }
    with pytest.raises(PipegradError, match="export a checkpoint of a step after which they have"):
        pipegrad.load(folder / "replicas 3")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no multiple", "6 is no multiple of 4, the steps between two meetings of handler"),
        ("no replicas", "is there in the places [dp=0] [dp=1], and here in (everywhere the same)"),
        ("other handlers", "is there in the places [dp=0] [dp=1], and here in (everywhere the"),
        ("shards", "'1.0.weight' each, and it meets by handler 'diloco': a checkpoint would take"),
        ("another every", "it was saved with the outer step every=2, lr=0.7, momentum=0.9, and"),
        ("another every after a meeting", "and this run has every=3, lr=0.7, momentum=0.9: choose"),
        ("other buckets", "replicas that train alone cannot go on: what handlers kept is of"),
    ],
)
def test_what_replicas_cannot_do_is_refused(
    name: str, says: str, replies: list[dict[str, Any]]
) -> None:
    for reply in replies:
        assert isinstance(reply[name], str)
        assert says in reply[name]
