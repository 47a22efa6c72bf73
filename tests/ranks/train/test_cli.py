"""What people type, see and find in the run's folder."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from click.testing import CliRunner
from rich.console import Console

import pipegrad.train.reporters.terminal
from pipegrad import tables
from pipegrad.cli import main
from pipegrad.testing import run_ranks
from tests.support.distributions import declared, write_distribution
from tests.support.train.jobs import EXAMPLES, command, with_job
from tests.support.train.launched import Launched, torchrun

TIED_GPT = EXAMPLES / "tied_gpt.toml"
CALLS = {
    "run": "",
    "another": "--set train.log_every=5 --handler noop",
    "dry": "--dry-run",
    "saved": "--set train.save_every=5 --set train.output=saved",
}


def calls() -> list[str]:
    """Returns what the command line prints on a rank, call by call."""
    return [command("train", "small.toml", *words.split())[1] for words in CALLS.values()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_job(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, str]:
    """What rank 0 of two prints in each call; the other one prints nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        first, second = run_ranks(calls, 2)
    assert second == [""] * len(CALLS)
    return dict(zip(CALLS, first, strict=True))


def test_a_run_prints_lines_and_a_summary(said: dict[str, str]) -> None:
    lines = [line.split() for line in said["run"].splitlines()]
    steps = [words for words in lines if words[:1] == ["step"] and words[1].isdigit()]
    assert [words[1] for words in steps] == ["1", "10", "12"]
    assert all(words[2::2] == ["loss", "grad", words[6], "tokens/s"] for words in steps)
    assert said["run"].splitlines()[0] == "writes into runs/run"
    end = said["run"].splitlines()[-8:]
    assert re.fullmatch(r"a step takes [\d.]+ m?s; \S.*", end[0])
    assert "12 steps on cpu" in end[4]
    (step,) = re.findall(r"a step takes ([\d.]+ m?s);", end[0])
    assert f"  {step}, " in end[5]  # both numbers are one
    assert end[7].startswith("runs/run has metrics.jsonl, manifest.json, checkpoint-12; ")
    assert end[7].endswith("where a step went: pipegrad trace runs/run")


def test_a_run_never_writes_over_another(said: dict[str, str], folder: Path) -> None:
    first, *_ = said["another"].splitlines()
    assert first == "writes into runs/run-2: runs/run is there already"
    assert {"run", "run-2"} <= {path.name for path in (folder / "runs").iterdir()}


def test_replicas_that_nothing_keeps_equal_are_told(said: dict[str, str]) -> None:
    assert "replicas   DIFFER" in said["another"]
    assert "bit by bit" not in said["run"]  # two stages have no replicas


@pytest.mark.usefixtures("said")
def test_metrics_are_a_line_a_step(folder: Path) -> None:
    text = (folder / "runs" / "run" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert list(rows[0]) == [
        "step",
        "loss",
        "grad_norm",
        "step_seconds",
        "tokens_per_second",
        "collectives",
        "bytes_reduced",
        "exposed_seconds",
        "learning_rate",
        "tokens_seen",
        "elapsed_seconds",
        "peak_memory_bytes",
        "skipped",
    ]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(8 * 16 / row["step_seconds"])
        assert (row["collectives"], row["bytes_reduced"]) == (2, 2 * 4 * (256 * 8 + 1))
        assert 0 <= row["exposed_seconds"] < row["step_seconds"]
        assert row["tokens_seen"] == row["step"] * 8 * 16
        assert row["learning_rate"] == 1e-3
        assert row["peak_memory_bytes"] > 2**20
    elapsed = [row["elapsed_seconds"] for row in rows]
    assert elapsed == sorted(elapsed)


@pytest.mark.usefixtures("said")
def test_checkpoints_are_in_the_runs_folder(folder: Path) -> None:
    saved = sorted(path.parent.name for path in (folder / "saved").glob("*/index.json"))
    assert saved == ["checkpoint-10", "checkpoint-12"]  # the two newest
    assert [path.name for path in (folder / "runs" / "run").glob("check*")] == ["checkpoint-12"]


@pytest.mark.usefixtures("said")
def test_the_manifest_says_what_was_run(folder: Path) -> None:
    told = json.loads((folder / "runs" / "run" / "manifest.json").read_text())
    versions = {h["name"]: (h["distribution"], h["version"]) for h in told["handlers"]}
    assert versions == {
        "pipeline-shared": ("pipegrad", told["pipegrad"]),
        "data-parallel": ("pipegrad", told["pipegrad"]),
    }
    assert told["config"]["train"]["steps"] == 12
    assert told["schedule"]["name"] == "1f1b"
    assert [rank["collectives"] for rank in told["pipeline_ranks"]] == [1, 1]
    assert told["reduced_bytes"] == 2 * 4 * (256 * 8 + 1)


def test_a_dry_run_prints_the_plan_that_is_made_offline(said: dict[str, str], folder: Path) -> None:
    offline = CliRunner().invoke(main, ["plan", str(folder / "small.toml"), "--ranks", "2"])
    assert offline.exit_code == 0
    assert offline.output == said["dry"]
    assert "one parameter (256, 8): '0.weight' on stage 0 and '4.weight' on stage 1" in said["dry"]
    assert "replicate-sum(pp)   1" in said["dry"]
    assert "all ranks: 2 collectives" in said["dry"]


def plan(*arguments: str) -> Any:
    result = CliRunner().invoke(main, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_a_plan_of_many_ranks() -> None:
    told = plan(str(TIED_GPT), "--ranks", "64", "--set", "parallel.pipeline=4", "--set",
                "data.batch_size=64", "--schedule", "gpipe")  # fmt: skip
    spans = [[[0, 15, 1]], [[16, 31, 1]], [[32, 47, 1]], [[48, 63, 1]]]
    assert [stage["ranks"] for stage in told["stages"]] == spans
    assert told["ties"] == [
        {
            "key": "0.0.weight",
            "shape": [256, 64],
            "places": [[0, "0.weight"], [3, "6.weight"]],
            "ranks": [0, 48],
        }
    ]
    assert sum(stage["elements"] for stage in told["stages"]) == 220_544 + 256 * 64
    assert {way["route"]: way["parameters"] for way in told["routes"]} == {
        "replicate-mean(dp) then replicate-sum(pp[0,3])": 1,
        "replicate-mean(dp)": 51,
    }
    assert [rank["ranks"] for rank in told["pipeline_ranks"]] == spans
    assert told["collectives"] == 16 * sum(r["collectives"] for r in told["pipeline_ranks"])


def test_a_plan_takes_no_memory_where_the_factory_allows(folder: Path) -> None:
    path = str(folder / "small.toml")
    big = plan(path, "--set", "model.width=1000000000", "--set", "model.layers=0")  # a terabyte
    assert big["stages"][0]["bytes"] == 4 * (256 + 2) * 10**9
    real = plan(path, "--set", "model.factory=factories:reads_its_start")
    assert real["stages"] == plan(path)["stages"]


def test_what_is_installed_is_listed_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {"broken": "raise RuntimeError\n"}
    write_distribution(tmp_path, "zeta", entry_points={"worse": "broken:X"}, modules=broken)
    monkeypatch.syspath_prepend(tmp_path)
    result = CliRunner().invoke(main, ["handlers"])
    assert result.exit_code == 0
    words = [line.split() for line in result.output.splitlines() if line.split()]
    assert words[0] == ["name", "distribution", "version", "value"]
    assert ["worse", "zeta", "1.0", "broken:X"] in words
    assert "broken" not in sys.modules
    rows = json.loads(CliRunner().invoke(main, ["handlers", "--json"]).output)
    assert [row["name"] for row in rows] == [*declared("pipegrad.handlers"), "worse"]


@pytest.mark.parametrize("kind", ["schedules", "codecs", "reporters"])
def test_what_there_is_is_listed(kind: str) -> None:
    rows = json.loads(CliRunner().invoke(main, [kind, "--json"]).output)
    names = [(name, "pipegrad") for name in declared(f"pipegrad.{kind}")]
    assert [(row["name"], row["distribution"]) for row in rows] == names
    assert all(":" in row["value"] for row in rows)


def test_alone_on_a_terminal_it_shows_a_bar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=80)
    for module in (tables, pipegrad.train.reporters.terminal):
        monkeypatch.setattr(module, "make_console", lambda **_: terminal)
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(main, ["train", "small.toml", "--set", "train.output=bar"])
    assert result.exit_code == 0, result.output
    assert not dist.is_initialized()
    assert "12/12" in shown.getvalue()
    assert "tokens/s" in shown.getvalue()
    assert "step     1 " not in shown.getvalue()
    assert len((folder / "bar" / "metrics.jsonl").read_text().splitlines()) == 12


def test_options_there_are() -> None:
    """A new option replaces one, or brings a measurement."""
    found = {name: [o for p in c.params for o in p.opts] for name, c in main.commands.items()}
    changes = "--handler --schedule --set config"
    drawings = "--html --svg"
    expected = {
        "train": f"--dry-run {changes}",
        "plan": f"--costs --json --rank --ranks {changes} {drawings}",
        "trace": f"--against --json --step run {drawings}",
        "audit": "target -n --json --ranks --steps --timeout --tolerance --variant",
        "verify": "--batched --communicators --json --sends file",
        "doctor": "--device --json --save --timeout",
        "simulate": "--backward-ms --costs --forward-ms --gbit --json --latency-us --mib "
        f"--microbatches --ranks --save --set --weight-ms schedule {drawings}",
        "handlers": "--json",
        "schedules": "--json",
        "schedule": "--format --microbatches --ranks --set name",
        "reporters": "--json",
        "codecs": "--json",
        "export": "--dtype --output checkpoint",
        "launch": "-n --max-restarts --nodes --rendezvous arguments config",
    }
    lists = {"handlers", "schedules", "reporters", "codecs"}
    for name, words in expected.items():
        traceback = [] if name in lists else ["--traceback"]
        assert sorted(found.pop(name)) == sorted([*words.split(), *traceback]), name
    assert not found


def test_torchrun_trains(tmp_path: Path) -> None:
    """Ranks are new interpreters here, as they are for readers."""
    words = ["--nproc-per-node", "2", "-m", "pipegrad", "train", str(TIED_GPT)]
    settings = ["--set", "train.device=cpu", "--set", "train.steps=2"]
    launched = Launched(tmp_path, torchrun, *words, *settings, anew=True)
    assert launched.wait() == 0, launched.errors
    assert "step     2  loss 5." in launched.printed
    assert "Warning" not in launched.errors
