"""`pipegrad trace`: a folder or a file, one step or the median one, words or JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipegrad.cli import main
from pipegrad.schedules import Link, build, lower
from pipegrad.simulation.costs import Costs, StageCosts
from pipegrad.simulation.simulator import simulate
from pipegrad.simulation.timeline import Timeline


def timeline() -> Timeline:
    program = lower(build("1f1b", num_ranks=2, num_microbatches=4), links=[Link("x", 0, (1,))])
    stage = StageCosts(0.01, 0.02)
    found = simulate(program, Costs((stage, stage)), num_steps=2).timeline
    assert found is not None
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    timeline().save(tmp_path / "timeline.json")
    return tmp_path


def trace(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["trace", *map(str, arguments)])


def test_a_run_and_its_file_print_the_same(run: Path) -> None:
    of_run, of_file = trace(run), trace(run / "timeline.json")
    assert of_run.exit_code == of_file.exit_code == 0
    assert of_run.output == of_file.output
    head, *rest = of_run.output.splitlines()
    assert head == "1f1b: 2 ranks, 2 stages, 4 microbatches, predicted, 2 steps"
    assert any(line.startswith("critical path: ") for line in rest)


def test_a_step_is_chosen_by_its_number(run: Path) -> None:
    assert "\nstep 1: " in trace(run, "--step", 1).output


def test_json_is_the_explanation(run: Path) -> None:
    data = json.loads(trace(run, "--json").output)
    assert set(data) >= {"breakdown", "critical_path", "advice"}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("nothing", None, "holds no timeline"),
        ("empty.json", "", "holds no timeline"),
        ("list.json", "[]", "expected an object"),
        ("other.json", "{}", "expected a timeline of version 1, found 'no version'"),
        ("short.json", '{"pipegrad_timeline": 1}', "expected a timeline"),
    ],
)
def test_a_file_that_is_no_timeline_is_one_line(
    tmp_path: Path, name: str, text: str | None, says: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    result = trace(path)
    assert result.exit_code == 2
    assert says in result.output
    assert "Traceback" not in result.output


def test_a_run_that_was_not_recorded_says_how_to_record_it(tmp_path: Path) -> None:
    result = trace(tmp_path)
    assert result.exit_code == 2
    assert "train.trace=true" in result.output


def test_a_step_that_is_not_there_is_refused(run: Path) -> None:
    result = trace(run, "--step", 9)
    assert result.exit_code == 2
    assert "steps 0 to 1" in result.output
