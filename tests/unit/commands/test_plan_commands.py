"""pipegrad plan, schedule and simulate."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipegrad.cli import main
from pipegrad.simulation.costs import CollectiveCosts, Costs, Network, StageCosts
from pipegrad.simulation.timeline import Timeline
from tests.support.train.jobs import with_job

TIED_GPT = str(Path(__file__).parents[3] / "examples" / "tied_gpt.toml")


def plan(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["plan", *map(str, words)])
    assert result.exit_code == code, result.output
    assert code == 0 or isinstance(result.exception, SystemExit), result.exception
    return result.output


def printed(*arguments: str) -> str:
    return plan(TIED_GPT, *arguments)


def test_many_ranks_and_microbatches_fit_two_screens() -> None:
    text = printed("--ranks", "1024", "--set", "parallel.pipeline=4", "--set",
                   "data.batch_size=16384", "--set", "parallel.microbatches=64")  # fmt: skip
    assert len(text.splitlines()) < 60
    assert " ... " in next(line for line in text.splitlines() if line.startswith("rank 0"))
    assert "256-511" in text
    assert "One replica of 256. F forward, B backward" in text


def test_a_rank_has_its_plan_and_its_program() -> None:
    text = printed("--ranks", "4", "--rank", "3")
    assert text.startswith("rank 3: ")
    assert "compute        3F0" in text
    told = json.loads(printed("--ranks", "4", "--rank", "3", "--json"))
    assert [launch["bucket"] for launch in told["launches"]] == [0]
    assert told["program"] == text.partition("\n\npipeline ")[2].rstrip().split("\n")


def test_costs_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"stages": [{"forward_seconds": 1, "backward_seconds": 2}] * 2}))
    assert "of 15 seconds" in printed("--ranks", "2", "--costs", str(path))
    text = printed("--ranks", "2", "--set", "parallel.pipeline=2", "--schedule", "auto",
                   "--costs", str(path))  # fmt: skip
    assert "chosen" in text
    assert "peak memory by simulation: " in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "4", "--rank", "4"], "--rank 4: the job has ranks 0 to 3"),
        (["--costs", TIED_GPT], "tied_gpt.toml holds no costs"),
        (["--set", "optimizer.name=SparseAdam"], "optimizer"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_in_words(arguments: list[str], message: str) -> None:
    found = CliRunner().invoke(main, ["plan", TIED_GPT, *arguments])
    assert found.exit_code != 0
    assert message in found.output
    assert isinstance(found.exception, SystemExit), found.exception


def test_codecs_are_shown_and_their_bytes_are_counted(tmp_path: Path) -> None:
    """Rows of 1,024 numbers have 1,024 bytes and a scale of 4 in place of 4,096."""
    stage = {"forward_seconds": 1.0, "backward_seconds": 2.0, "outputs": {"x": 2**20}}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"stages": [stage] * 3}))
    arguments = ("--ranks", "3", "--costs", str(path), "--set", "model.layers=6")
    codecs = ("--set", "parallel.codecs={'0-1' = {gradients = 'int8'}}")
    assert "\ncodecs: 0-1: gradients int8\n" in printed(*arguments, *codecs)
    assert "\ncodecs" not in printed(*arguments)
    told = json.loads(printed(*arguments, *codecs, "--json"))
    found = {(link["source"], link["target"]): link["bytes"] for link in told["links"]}
    plain, coded = 4 * 2**20, 4 * 2**8 * (1024 + 4)
    assert found == {(0, 1): plain, (1, 0): coded, (1, 2): plain, (2, 1): plain}


def test_codecs_that_do_not_fit_are_errors_of_their_key() -> None:
    for codecs, words in {
        "{'0-4' = 'int8'}": "which nothing crosses",
        "int9": "closest first: int8",
        "{activations = 'topk'}": "for gradients alone",
    }.items():
        setting = f"parallel.codecs={codecs}"
        text = plan(TIED_GPT, "--ranks", "4", "--set", setting, code=1)
        assert "parallel.codecs" in text
        assert words in " ".join(text.split())


STAGE = StageCosts(forward_seconds=0.01, backward_seconds=0.02, outputs={"x": 2**20})
RANKS = ["--ranks", "2", "--set", "parallel.pipeline=2"]
AUTO = ["--set", "parallel.schedule.name='auto'", "--set", "parallel.schedule.costs='costs.json'"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = with_job(tmp_path_factory.mktemp("auto"))
    Costs((STAGE,) * 2, Network(nic_bytes_per_second=125e6)).save(folder / "costs.json")
    return folder / "small.toml"


def test_a_page_of_a_plan_without_costs_counts_units_as_the_terminal_does(
    job: Path, tmp_path: Path
) -> None:
    text = plan(job, *RANKS, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    [units] = re.findall(r"idle share of a step of (\d+) units", " ".join(text.split()))
    assert f"(predicted, in units): {units} units; ranks compute in " in page
    assert '"time_unit":"units"' in page
    assert '"notes":{"costs":"F 1, B 2, I 1, W 1, and nothing for sending"}' in page
    assert " s;" not in page.split('"sentences"')[1].split("]]")[0]
    plan(job, *RANKS, "--costs", job.parent / "costs.json", "--html", tmp_path / "page.html")
    assert '"time_unit":"seconds"' in (tmp_path / "page.html").read_text()


def test_a_plan_shows_why_a_schedule_was_chosen(job: Path) -> None:
    # The file of costs is looked for beside the configuration, not where the command runs.
    text = plan(job, *RANKS, *AUTO)
    assert "chosen" in text
    assert "microbatches by auto" in text
    told = json.loads(plan(job, *RANKS, *AUTO, "--json"))
    assert told["choice"][0]["step_seconds"] > 0
    assert told["choice"][0]["name"] not in ("gpipe", "zbv")
    assert not told["is_measured"]


def test_without_costs_a_plan_shows_what_it_begins_with(job: Path) -> None:
    for name in ("auto", "hop-aware-1f1b", "hop-aware-zb-h1", "adaptive-1f1b"):
        text = plan(job, *RANKS, "--schedule", name)
        assert "the schedule to begin with; it may change when steps have been measured:" in text
        assert "chosen" not in text
    assert "begin with" not in plan(job, *RANKS, "--schedule", "1f1b")


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ("'nowhere.json'", "nowhere.json"),
        ("{stages=[{}]}", "there are costs of 1 stages, for 2 ranks"),
        ("5", "parallel.schedule"),
    ],
)
def test_costs_that_do_not_fit_are_errors_of_the_configuration(
    job: Path, costs: str, message: str
) -> None:
    text = plan(job, *RANKS, *AUTO[:2], "--set", f"parallel.schedule.costs={costs}", code=1)
    assert message in text
    assert "parallel.schedule" in text


FAILING = ["--set", "model.factory=factories:fails"]
HINT = " (--traceback prints where)"


def test_an_error_of_the_users_code_is_one_line_and_the_whole_traceback_if_asked_for(
    job: Path,
) -> None:
    [line] = plan(job, *FAILING, code=1).splitlines()
    assert line.startswith("Error: model = ")
    assert line.endswith(HINT)
    lines = plan(job, *FAILING, "--traceback", code=1).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert any('factories.py", line ' in line for line in lines)
    assert "RuntimeError: no such checkpoint" in lines
    assert lines[-1].startswith("Error: model = ")
    assert not lines[-1].endswith(HINT)
    # An error of the configuration has nothing more to show.
    [line] = plan(job, "--set", "train.stpes=3", code=1).splitlines()
    assert not line.endswith(HINT)
    [line] = plan("nowhere.toml", code=1).splitlines()
    assert line == "Error: nowhere.toml: there is no such file: give the path of a TOML file"


def sizes(num_ranks: int, num_microbatches: int) -> list[str]:
    return ["--ranks", str(num_ranks), "--microbatches", str(num_microbatches)]


SIZE = sizes(4, 8)
SILENT = ["--mib", "0", "--latency-us", "0"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments], catch_exceptions=False)


def test_a_slow_link_of_an_option_is_no_mistake_of_units() -> None:
    """--gbit 0.000001 was told that rates are in bytes a second, which the option's is not."""
    found = run("1f1b", "--ranks", "2", "--microbatches", "2", "--gbit", "0.000001")
    assert "1e-06 Gbit/s" in found.stdout
    assert "in bytes" not in found.stdout


def as_json(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads(result.output)
    return data


def test_closed_forms_of_schedules() -> None:
    data = as_json("1f1b", *SIZE, *SILENT)
    assert data["step_seconds"] == pytest.approx([11 * 0.03])
    parts = [rank["parts"] for rank in data["breakdown"]["ranks"]]
    assert [own["F"] + own["B"] for own in parts] == pytest.approx([8 * 0.03] * 4)
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
    result = run("1f1b", *SIZE)
    assert result.exit_code == 0
    for expected in (
        "1f1b: 4 ranks, 4 stages, 8 microbatches, simulated",
        "costs: assumed: forward 10 ms, backward 20 ms (split: 10 ms in W) of a microbatch on ",
        "each rank; 1 MiB to the next stage; 1 Gbit/s, 50 us a message\n",
        "a step takes ",
        "What decided when it ended: of ",
        " rank   forward   backward   waits to receive ",
        'parallel.schedule = "eager-1f1b" (a rank holds 7 activations, now 4): ',
        "links that take no time: at most ",
    ):
        assert expected in result.output
    assert "peak memory" not in result.output


def test_one_rank_and_many_of_which_some_are_printed() -> None:
    assert "16 of 40 ranks; --json prints all" in run("1f1b", *sizes(40, 2)).output
    assert "a step takes 30.0 ms; nothing stands out: " in run("1f1b", *sizes(1, 1)).output


def test_costs_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    stage = StageCosts(0.1, 0.2, parameter_bytes=2**30, outputs={"hidden": 2**20, "mask": 8})
    Costs((stage,) * 4).save(path)
    data = as_json("1f1b", *SIZE, "--costs", str(path), "--save", str(tmp_path / "timeline.json"))
    assert data["step_seconds"] == pytest.approx([11 * 0.3])
    timeline = Timeline.load(tmp_path / "timeline.json")
    labels = {span.label for span in timeline.spans if span.kind == "transfer"}
    assert {"hidden of 0F0", "mask of 0F0", "gradient of hidden of 0F0"} <= labels
    assert timeline.notes == {"costs": str(path)}
    printed = run("1f1b", *SIZE, "--costs", str(path)).output
    assert "peak memory: 1,0" in printed
    assert f"costs: {path}\n" in printed
    assert "assumed" not in printed


def test_a_unit_that_is_likely_another_one_has_a_line(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    Costs((StageCosts(15, 30),) * 4).save(path)
    line = "\nthe forward of stage 0 takes 15 s: costs are in seconds\n"
    assert line in run("1f1b", *SIZE, "--costs", str(path)).output


def test_reductions_that_are_left_out_are_simulated_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    Costs((StageCosts(0.1, 0.2),) * 4, collectives={"0": CollectiveCosts(8, 2)}).save(path)
    words = "the reductions of gradients in the costs are left out: they belong to the parameters "
    assert f"{words}of a job; pipegrad plan CONFIG --costs FILE simulates them" in run(
        "1f1b", *SIZE, "--costs", str(path)
    ).output.replace("\n", " ")


def test_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("1f1b", *SIZE, "--html", str(page))
    assert result.exit_code == 0
    assert "1f1b (predicted): " in page.read_text()
    assert '"notes":{"costs":"assumed: forward 10 ms, ' in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1f1b"], "Missing option '--ranks'"),
        (["1f1c", *SIZE], "1f1b"),
        (["1f1b", "--ranks", "0", "--microbatches", "8"], "0 is not in the range x>=1"),
        (["1f1b", *SIZE, "--forward-ms", "-1"], "-1.0 is not in the range x>=0"),
        (["1f1b", *SIZE, "--gbit", "0"], "0.0 is not in the range x>0"),
        (["1f1b", *SIZE, "--mib", "inf"], "'inf' is not a finite number"),
        (["1f1b", *SIZE, "--weight-ms", "30"], "weight_seconds is 0.03, a part of backward"),
        (["1f1b", *SIZE, "--set", "stages=3"], "stages"),
        (["hop-aware-1f1b", *SIZE, "--set", "hop_seconds=[1]"], "compute_seconds"),
        (["gpipe", "--ranks", "9999", "--microbatches", "999"], "at most 1,000,000"),
        (["1f1b", *SIZE, "--costs", "absent.json", "--mib", "1"], "--mib and --costs: absent.json"),
        (["1f1b", *SIZE, "--save", "absent/folder.json"], "No such file or directory"),
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
    assert "step 0 took 0.00 us. " in result.output
