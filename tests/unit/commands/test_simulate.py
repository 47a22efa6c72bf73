"""`pipegrad simulate` prints what a step takes and why, and refuses bad input in words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipegrad.cli import main
from pipegrad.simulation.costs import Costs, StageCosts
from pipegrad.simulation.timeline import Timeline


def sizes(num_ranks: int, num_microbatches: int) -> list[str]:
    return ["--ranks", str(num_ranks), "--microbatches", str(num_microbatches)]


SIZE = sizes(4, 8)
SILENT = ["--mib", "0", "--latency-us", "0"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments], catch_exceptions=False)


def as_json(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads(result.output)
    return data


def test_closed_forms_of_schedules() -> None:
    data = as_json("1f1b", *SIZE, *SILENT)
    assert data["step_seconds"] == pytest.approx([11 * 0.03])
    assert data["breakdown"]["bubble"] == pytest.approx(3 / 11)
    # Schedules with other numbers of stages can be compared: the work of a rank is the same.
    data = as_json("interleaved-1f1b", *SIZE, *SILENT, "--set", "stages_per_rank=2")
    assert data["step_seconds"] == pytest.approx([8 * 0.03 + 3 * 0.03 / 2])
    # Half of a backward is W.
    expected = as_json("zb-h1", *SIZE, *SILENT, "--backward-ms", "4", "--weight-ms", "2")
    assert as_json("zb-h1", *SIZE, *SILENT, "--backward-ms", "4") == expected
    other = as_json("zb-h1", *SIZE, *SILENT, "--backward-ms", "4", "--weight-ms", "1")
    assert other["step_seconds"] > expected["step_seconds"]


def test_hop_aware_schedules_take_their_hops_from_the_costs() -> None:
    """Without transfers hop-aware-1f1b is 1f1b; with slow hops it is faster."""
    silent, slow = (
        {n: as_json(n, *SIZE, "--mib", mib)["step_seconds"][0] for n in names}
        for mib, names in (
            ("0", ["hop-aware-1f1b", "1f1b"]),
            ("1", ["hop-aware-1f1b", "1f1b", "hop-aware-zb-h1", "zb-h1", "eager-1f1b"]),
        )
    )
    assert silent["hop-aware-1f1b"] == silent["1f1b"]
    assert slow["hop-aware-1f1b"] < 0.9 * slow["1f1b"]
    assert slow["hop-aware-zb-h1"] < 0.95 * min(slow["zb-h1"], slow["eager-1f1b"])


def test_schedules_that_measure_steps_are_given_the_costs() -> None:
    steps = {
        name: as_json(name, *SIZE)["step_seconds"][0]
        for name in ("auto", "adaptive-1f1b", "eager-1f1b", "zb-h1", "1f1b", "gpipe")
    }
    assert steps["adaptive-1f1b"] < steps["1f1b"]
    assert steps["auto"] == pytest.approx(min(steps.values()))
    assert steps["auto"] < steps["1f1b"]


def test_what_people_read() -> None:
    result = run("1f1b", *SIZE, "--steps", "2")
    assert result.exit_code == 0
    for expected in (
        "1f1b: 4 ranks, 4 stages, 8 microbatches, simulated",
        "steps: ",
        "bubble 48 %",
        "critical path: of ",
        "rank 0 waits ",
        "schedule eager-1f1b (a rank holds 7 activations, now 4): ",
        "no communication at all: at most ",
    ):
        assert expected in result.output
    assert "peak memory" not in result.output


def test_one_rank_and_many_of_which_some_are_printed() -> None:
    assert "the 32 ranks of 40 with the largest bubbles" in run("1f1b", *sizes(40, 2)).output
    assert "step 0: 30.0 ms, bubble 0.0 %" in run("1f1b", *sizes(1, 1)).output


def test_costs_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    stage = StageCosts(0.1, 0.2, parameter_bytes=2**30, outputs={"hidden": 2**20, "mask": 8})
    Costs((stage,) * 4).save(path)
    data = as_json("1f1b", *SIZE, "--costs", str(path), "--save", str(tmp_path / "timeline.json"))
    assert data["step_seconds"] == pytest.approx([11 * 0.3])
    timeline = Timeline.load(tmp_path / "timeline.json")
    labels = {span.label for span in timeline.spans if span.kind == "transfer"}
    assert {"hidden of 0F0", "mask of 0F0", "gradient of hidden of 0F0"} <= labels
    assert "peak memory: 1,0" in run("1f1b", *SIZE, "--costs", str(path)).output


def test_a_page_and_a_trace(tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    result = run("1f1b", *SIZE, "--html", str(page), "--perfetto", str(trace))
    assert result.exit_code == 0
    assert "1f1b (predicted): " in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1f1b"], "Missing option '--ranks'"),
        (["1f1c", *SIZE], "1f1b"),
        (["1f1b", "--ranks", "0", "--microbatches", "8"], "'0': expected a whole number of at"),
        (["1f1b", *SIZE, "--forward-ms", "-1"], "'-1': expected a number of at least 0"),
        (["1f1b", *SIZE, "--forward-ms", "nan"], "'nan': expected a number of at least 0"),
        (["1f1b", *SIZE, "--mib", "inf"], "'inf': expected a number of at least 0"),
        (["1f1b", *SIZE, "--gbit", "0"], "'0': expected a number above 0"),
        (["1f1b", *SIZE, "--weight-ms", "30"], "weight_seconds is 0.03, a part of backward"),
        (["1f1b", *SIZE, "--set", "stages=3"], "stages"),
        (["1f1b", *SIZE, "--set", "stages"], "expected key=value"),
        (["interleaved-1f1b", "--ranks", "4", "--microbatches", "6"], "a multiple of 4"),
        (["hop-aware-1f1b", *SIZE, "--set", "hop_seconds=[1]"], "compute_seconds"),
        (["gpipe", "--ranks", "9999", "--microbatches", "999"], "at most 1,000,000"),
        (["1f1b", *SIZE, "--costs", "absent.json"], "there is no file absent.json"),
        (["1f1b", *SIZE, "--costs", "absent.json", "--mib", "1"], "--mib and --costs: absent.json"),
        (["1f1b", *SIZE, "--save", "absent/folder.json"], "No such file or directory"),
        (["1f1b", *SIZE, "--steps", "0"], "'0': expected a whole number from 1 to 10,000"),
        (["1f1b", *SIZE, "--ranks", "four"], "'four': expected a whole number of at least 1"),
    ],
)
def test_bad_input(arguments: Sequence[str], message: str) -> None:
    result = run(*arguments)
    *usage, line = result.output.splitlines()
    assert message in line
    assert line.startswith("Error: ")
    # click has 2 for words of the command line, and shows its usage.
    assert result.exit_code == (2 if usage else 1)


def test_costs_of_other_stages_and_of_no_time(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    Costs((StageCosts(),) * 3).save(path)
    result = run("1f1b", *SIZE, "--costs", str(path))
    assert result.exit_code == 1
    assert "costs of 3 stages" in result.output
    Costs((StageCosts(),) * 4).save(path)
    result = run("1f1b", *SIZE, "--costs", str(path))
    assert result.exit_code == 0
    assert "step 0: 0.00 us" in result.output
