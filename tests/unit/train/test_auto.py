"""A configuration whose schedule is chosen: its costs, its table, and what it begins with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipegrad.cli import main
from pipegrad.simulation.costs import Costs, Network, StageCosts
from tests.support.train.jobs import with_job

STAGE = StageCosts(forward_seconds=0.01, backward_seconds=0.02, outputs={"x": 2**20})
RANKS = ["--ranks", "2", "--set", "parallel.pipeline=2"]
AUTO = ["--set", "parallel.schedule.name='auto'", "--set", "parallel.schedule.costs='costs.json'"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = with_job(tmp_path_factory.mktemp("auto"))
    Costs((STAGE,) * 2, Network(nic_bytes_per_second=125e6)).save(folder / "costs.json")
    return folder / "small.toml"


def planned(job: Path, *arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(main, ["plan", str(job), *RANKS, *arguments])
    return found.exit_code, found.output


def test_a_plan_shows_why_a_schedule_was_chosen(job: Path) -> None:
    # The file of costs is looked for beside the configuration, not where the command runs.
    code, text = planned(job, *AUTO)
    assert code == 0, text
    assert "chosen" in text
    assert "microbatches by auto" in text
    code, text = planned(job, *AUTO, "--json")
    told = json.loads(text)
    assert told["choice"][0]["step_seconds"] > 0
    assert told["choice"][0]["name"] not in ("gpipe", "zbv")
    assert not told["is_measured"]


def test_without_costs_a_plan_shows_what_it_begins_with(job: Path) -> None:
    for name in ("auto", "hop-aware-1f1b", "hop-aware-zb-h1", "adaptive-1f1b"):
        code, text = planned(job, "--schedule", name)
        assert code == 0, text
        assert "the schedule to begin with; it may change when steps have been measured:" in text
        assert "chosen" not in text
    assert "begin with" not in planned(job, "--schedule", "1f1b")[1]


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ("'nowhere.json'", "nowhere.json holds no costs"),
        ("{stages=[{}, {}, {}]}", "there are costs of 3 stages, for 2 ranks"),
        ("5", "parallel.schedule"),
    ],
)
def test_costs_that_do_not_fit_are_errors_of_the_configuration(
    job: Path, costs: str, message: str
) -> None:
    settings = [*AUTO[:2], "--set", f"parallel.schedule.costs={costs}"]
    code, text = planned(job, *settings)
    assert code == 1, text
    assert message in text
    assert "parallel.schedule" in text
