"""Stages that a function makes DTensors: what a rank holds, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipegrad.errors import ConfigError
from pipegrad.model.dtensor import described
from pipegrad.testing import run_ranks
from pipegrad.train.config import load
from pipegrad.train.job import Job
from tests.support.rounding import rounding
from tests.support.train.jobs import EXAMPLES, refusal, trained, trainer_of, with_job

pytestmark = [
    pytest.mark.ranks(4),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),  # of a linear layer at the end
]
EXAMPLE = EXAMPLES / "prepared.toml"
FSDP = ["parallel.prepare=prepared:fsdp2", "parallel.dimensions={}", "parallel.pipeline=2"]
ALONE = "gradient_handlers=['pipeline-shared']"
RUNS = {"tensor parallel": [], "fsdp2": [*FSDP, ALONE]}


def losses_alone() -> list[float]:
    return trained(EXAMPLES / "tied_gpt.toml", "optimizer={lr=3e-3}", until=3).losses


@pytest.fixture(scope="module")
def truth() -> list[float]:
    return run_ranks(losses_alone, 1)[0]


@pytest.mark.parametrize("name", RUNS)
def test_each_rank_holds_its_part_and_the_losses_are_those_of_one_process(
    name: str, truth: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = trainer_of(EXAMPLE, *RUNS[name])
    layouts = {r.name: described(trainer.sync.parameter(r))[0] for r in trainer.sync.records()}
    losses = [trainer.step(number).loss for number in (1, 2, 3)]
    trainer.close()
    sharded = {n for n, layout in layouts.items() if layout and layout.replicated == (False,)}
    assert sharded == {n for n in layouts if name == "fsdp2" or "linear1" in n or "linear2.w" in n}
    assert losses == pytest.approx(truth, rel=rounding(3 * 16 * 64))


REFUSED = {
    "no function": (["parallel.prepare=prepared:fsdp3"], "cannot be imported: AttributeError"),
    "it fails": (["parallel.prepare=prepared:tensor_parallel"], "prepare = .*: it fails: "),
    "splits": ([*FSDP, ALONE, "parallel.schedule=zb-h1"], "splits backward"),
    "sharded": ([*FSDP, "gradient_handlers=['pipeline-shared', 'sharded']"], "it is a DTensor"),
    "data-parallel": (FSDP, "DTensor"),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_job(tmp_path_factory.mktemp("prepared")) / "small.toml"


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_alike(job: Path, name: str) -> None:
    settings, says = REFUSED[name]
    said = refusal(job, "parallel.pipeline=2", *settings)
    assert re.search(says, said), said


def test_a_plan_without_ranks_is_refused(job: Path) -> None:
    offline = Job(load(job, FSDP), 4)
    with pytest.raises(ConfigError, match="what it makes is not known without ranks"):
        offline.manifest(offline.cut(offline.model("meta")))
