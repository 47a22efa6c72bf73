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
    assert rest[0].startswith("a step takes 150 ms; ")
    assert any("What decided when it ended: " in line for line in rest)


def test_a_step_is_chosen_by_its_number_and_json_is_the_explanation(run: Path) -> None:
    assert "\nstep 1 took 150 ms." in trace(run, "--step", 1).output
    data = json.loads(trace(run, "--json").output)
    assert set(data) >= {"sentence", "breakdown", "critical_path", "advice"}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("nothing", None, "there is no file"),
        ("empty.json", "", "holds no timeline: it is empty"),
        ("other.json", "{}", "expected a timeline of version 1, found 'no version'"),
    ],
)
def test_a_file_that_is_no_timeline_is_one_line(
    tmp_path: Path, name: str, text: str | None, says: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    result = trace(path)
    assert result.exit_code == 1
    assert says in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("source",), "guessed", "source: should be 'predicted' or 'measured'"),
        (("num_ranks",), 0, "num_ranks: 0, expected a stage on each rank"),
        (("stage_to_rank",), [0, 9], "stage_to_rank: expected ranks of"),
        (("step_ends",), [2.0, 1.0], "step_ends: expected seconds that ascend"),
        (("memory",), [[]], "memory: expected points of"),
        (("spans", 0, 0), 99, "spans.0: expected ranks of"),
        (("collectives",), [["tied", [9], [0], 0]], "collective 'tied': expected ranks"),
        (("spans", 0, 2), "soon", "spans.0.2: should be a valid number"),
        (("spans", 0, 3), -5.0, "spans.0: expected a begin and a later end"),
        (("spans", 0, 5), 99, "spans.0: stage 99 is none"),
        (("step_ends",), [1e300], "step_ends: expected seconds that ascend"),
        (("spans", 0, 8), 10**12, "expected integers of 32 bits"),
        (("spans", 0, 6), 99, "microbatch 99 is none of a step's"),
        (("num_microbatches",), 10**18, "at most 1,000,000"),
        (("colour",), "red", "colour: Unexpected keyword argument, found 'red'"),
    ],
)
def test_a_timeline_that_was_altered_is_one_line(
    run: Path, path: tuple[str | int, ...], value: object, says: str
) -> None:
    file = run / "timeline.json"
    data = json.loads(file.read_text())
    inside = data
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    file.write_text(json.dumps(data))
    result = trace(run)
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_run_that_was_not_recorded_or_has_no_such_step_says_so(run: Path, tmp_path: Path) -> None:
    result = trace(run, "--step", 9)
    assert result.exit_code == 1
    assert "steps 0 to 1" in result.output
    (tmp_path / "empty").mkdir()
    result = trace(tmp_path / "empty")
    assert result.exit_code == 1
    assert "train.trace=false" in result.output
