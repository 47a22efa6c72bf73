"""`pipegrad audit` prints and saves a report, and its exit code says what was found."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch.distributed as dist
from click.testing import CliRunner, Result

from pipegrad.audit.report import Finding, Report
from pipegrad.audit.script import Run
from pipegrad.cli import main
from pipegrad.errors import ConfigError
from pipegrad.train import process

TARGET = "script.py:audited"
RIGHT = Report((), ("a note",), (), num_steps=2, num_ranks=4, seconds=1.0)
WRONG = Report((Finding("stale"), Finding("missing")), (), (), 2, 4, 1.0)


@pytest.fixture(autouse=True)
def outside_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


class Ranks:
    """Stands for ranks: their report, or their error."""

    def __init__(self) -> None:
        self.result: Report | BaseException = RIGHT
        self.started: list[tuple[Run, int, float]] = []

    def report(self) -> Report:
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    ranks = Ranks()

    def in_ranks(run: Run, num_ranks: int, timeout_seconds: float) -> Report:
        ranks.started.append((run, num_ranks, timeout_seconds))
        return ranks.report()

    monkeypatch.setattr(Run, "in_ranks", in_ranks)
    return ranks


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["audit", TARGET, *arguments])


@pytest.mark.parametrize(("report", "code"), [(RIGHT, 0), (WRONG, 1)], ids=["right", "wrong"])
def test_a_report_is_printed_and_saved_and_the_exit_code_says_what_was_found(
    ranks: Ranks, tmp_path: Path, report: Report, code: int
) -> None:
    ranks.result, path = report, tmp_path / "report.json"
    result = run("--json", str(path))
    assert result.exit_code == code
    assert path.read_text() == report.as_json()
    assert json.loads(path.read_text())["is_right"] is report.is_right
    result = run()
    assert (result.exit_code, result.stdout) == (code, f"{report}\n")


def test_options_are_given_to_the_ranks_and_by_default_4_compare_all_steps(ranks: Ranks) -> None:
    run()
    run("-n", "2", "--steps", "3", "--tolerance", "0.5", "--timeout", "9")
    run("--variant", "packing", "--variant", "Muon")
    assert ranks.started == [
        (Run(TARGET), 4, 600.0),
        (Run(TARGET, 3, 0.5), 2, 9.0),
        (Run(TARGET, variants=("packing", "Muon")), 4, 600.0),
    ]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConfigError("there is no file"), "there is no file"),
        (TimeoutError("too late"), "too late"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_an_audit_that_cannot_be_run_has_the_exit_code_2(
    ranks: Ranks, error: BaseException, says: str
) -> None:
    ranks.result = error
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {says}")
    assert "Traceback" not in result.stderr


def test_an_error_of_the_users_code_names_rank_and_line(ranks: Ranks) -> None:
    ranks.result = KeyError("missing key")
    ranks.result.add_note(
        "First failure on rank 1. Traceback (most recent call last):\n"
        '  File "/home/someone/mine.py", line 33, in step\n'
        '  File "/site-packages/torch/nn/modules/module.py", line 7, in forward\n'
        "KeyError: 'missing key'"
    )
    said = "Error: KeyError: 'missing key' (rank 1, mine.py:33) (--traceback prints all)\n"
    assert run().stderr == said
    # Stacks of ranks that hang are shown, and the traceback that was asked for.
    ranks.result = TimeoutError("too late")
    ranks.result.add_note("rank 1 waits in all_reduce")
    assert "rank 1 waits in all_reduce" in run().stderr
    ranks.result = ConfigError("there is no file")
    assert "Traceback" in run("--traceback").stderr


@pytest.mark.parametrize("words", ["--steps 0", "--tolerance 0", "--ranks 257", "--timeout 0"])
def test_numbers_out_of_range_are_refused(ranks: Ranks, words: str) -> None:
    result = run(*words.split())
    assert result.exit_code == 2
    assert "is not in the range" in result.stderr.splitlines()[-1]
    assert ranks.started == []


@pytest.mark.usefixtures("ranks")
def test_a_folder_that_does_not_exist_has_the_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "report"
    result = run("--json", str(path))
    assert result.exit_code == 2
    assert f"Error: --json {path}: No such file or directory" in result.stderr
    assert not path.parent.exists()


def test_a_file_that_is_missing_has_the_exit_code_2() -> None:
    result = CliRunner().invoke(main, ["audit", "nowhere.py:audited"])
    assert result.exit_code == 2
    assert "Error: nowhere.py cannot be imported" in result.stderr


@pytest.fixture
def in_torchrun(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> Ranks:
    """The ranks are those of torchrun, so none are started."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(process, "process_group", contextlib.nullcontext)
    monkeypatch.setattr(Run, "here", lambda _: ranks.report())
    return ranks


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("report", "code"), [(RIGHT, 0), (WRONG, 1)], ids=["right", "wrong"])
def test_in_torchrun_the_first_rank_prints_and_others_print_nothing(
    in_torchrun: Ranks, monkeypatch: pytest.MonkeyPatch, report: Report, code: int, rank: int
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    in_torchrun.result = report
    result = run()
    assert (result.exit_code, result.output) == (code, "" if rank else f"{report}\n")
    assert in_torchrun.started == []
    if rank == 0:
        in_torchrun.result = ConfigError("there is no file")
        result = run()
        assert (result.exit_code, result.stderr) == (2, "Error: there is no file\n")
