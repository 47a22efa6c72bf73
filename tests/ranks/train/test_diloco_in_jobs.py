"""Jobs whose replicas train alone: they go on with the same bits, and end as one model."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pipegrad
from pipegrad.errors import PipegradError
from tests.support.ranked import gathered
from tests.support.train.jobs import Trained, refusal, trained, trained_to, with_job

pytestmark = pytest.mark.ranks(4)
SETTINGS = ["parallel.pipeline=2", "parallel.data=2", "train.steps=6", "gradients.clip_norm=1"]


def meeting(every: int, shared: str = "'pipeline-shared'") -> str:
    return f"gradient_handlers=[{shared}, {{name='diloco', every={every}}}]"


WAYS = {
    "replicas": [meeting(2)],
    "owners": [meeting(2, "{name='pipeline-shared', placement='owner'}")],
    "fp16": [meeting(2), "train.precision=fp16"],
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_job(tmp_path_factory.mktemp("diloco")) / "small.toml"


@cache
def runs(job: Path, name: str) -> dict[int, Trained]:
    """Trains in one of the ways; returns what is known after steps, and saves it but at the end."""
    ends, saves = (3, 4, 6), {step: f"{name} {step}" for step in (3, 4)}
    found = trained_to(job, *SETTINGS, *WAYS[name], ends=ends, saves=saves)
    return dict(zip(ends, found, strict=True))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("step", [3, 4])
def test_a_resumed_run_has_the_same_bits(job: Path, name: str, step: int) -> None:
    """After step 3 replicas are apart, after step 4 they have just met."""
    found = runs(job, name)
    resumed = trained(job, *SETTINGS, *WAYS[name], f"train.resume='{name} {step}'", until=6)
    found[6].goes_on(found[step], resumed)


def test_replicas_end_as_one_model_that_can_be_exported_after_a_meeting(job: Path) -> None:
    values = {k.partition("[")[0]: v for k, v in runs(job, "replicas")[6].values.items()}
    other = gathered(values)[dist.get_rank() ^ 1]  # the other replica of this stage
    assert values.keys() == other.keys()
    assert all(torch.equal(values[key], other[key]) for key in values)
    model = pipegrad.load(job.with_name("replicas 4"))
    assert values.keys() <= {f"model.{name}" for name in model}
    with pytest.raises(PipegradError, match="export a checkpoint of a step after which they have"):
        pipegrad.load(job.with_name("replicas 3"))


@pytest.mark.parametrize(
    ("step", "settings", "says"),
    [
        (0, [meeting(4)], "6 is no multiple of 4, the steps after which handler 'diloco' joins"),
        (
            3,
            ["parallel.pipeline=4", "parallel.data=1"],
            "is there in the locations [dp=0] [dp=1], and here in (everywhere the same)",
        ),
        (3, [], "is there in the locations [dp=0] [dp=1], and here in (everywhere the"),
        (
            0,
            [meeting(2), "parallel.shards={'1.0.weight'=0}"],
            "by handler 'diloco', and each has '1.0.weight': a checkpoint would take",
        ),
        (3, [meeting(3)], "it was saved with the outer step every=2, lr=0.7, momentum=0.9, and"),
        (4, [meeting(3)], "and this run has every=3, lr=0.7, momentum=0.9: choose"),
        (
            3,
            [meeting(2, "{name='pipeline-shared', placement='owner'}")],
            "replicas that train alone cannot go on: the state of handlers is of",
        ),
    ],
)
def test_what_replicas_cannot_do_is_refused(
    job: Path, step: int, settings: list[str], says: str
) -> None:
    resumed = [f"train.resume='replicas {step}'"] if step else []
    if step:
        runs(job, "replicas")
    assert says in refusal(job, *SETTINGS, *settings, *resumed, until=6)
