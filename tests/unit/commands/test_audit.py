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
from pipegrad.train.process import process

TARGET = "script.py:audited"
RIGHT = Report((), ("a note",), (), num_steps=2, num_ranks=4, seconds=1.0)
WRONG = Report((Finding("stale"), Finding("missing")), (), (), 2, 4, 1.0)

Started = list[tuple[Run, int, float]]


@pytest.fixture(autouse=True)
def outside_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


class Ranks:
    """Stands for ranks: their report, or their error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.result: Report | BaseException = RIGHT
        self.started: Started = []
        ranks = self

        def in_ranks(run: Run, num_ranks: int, timeout_seconds: float) -> Report:
            ranks.started.append((run, num_ranks, timeout_seconds))
            return ranks.report()

        monkeypatch.setattr(Run, "in_ranks", in_ranks)

    def report(self) -> Report:
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["audit", TARGET, *arguments])


@pytest.mark.usefixtures("ranks")
def test_a_right_report_is_printed_with_the_exit_code_0() -> None:
    result = run()
    assert (result.exit_code, result.stdout) == (0, f"{RIGHT}\n")


def test_a_wrong_report_is_printed_with_the_exit_code_1(ranks: Ranks) -> None:
    ranks.result = WRONG
    result = run()
    assert (result.exit_code, result.stdout) == (1, f"{WRONG}\n")


def test_by_default_4_ranks_compare_all_steps(ranks: Ranks) -> None:
    run()
    assert ranks.started == [(Run(TARGET), 4, 600.0)]


def test_options_are_given_to_the_ranks(ranks: Ranks) -> None:
    run("-n", "2", "--steps", "3", "--tolerance", "0.5", "--order", "--timeout", "9")
    assert ranks.started == [(Run(TARGET, 3, 0.5, checks_order=True), 2, 9.0)]


@pytest.mark.parametrize(
    "error",
    [ConfigError("there is no file"), RuntimeError("rank 2 has failed"), TimeoutError("too late")],
)
def test_an_audit_that_cannot_be_run_has_the_exit_code_2(ranks: Ranks, error: Exception) -> None:
    ranks.result = error
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    name = "RuntimeError: " if type(error) is RuntimeError else ""
    assert result.stderr.startswith(f"Error: {name}{error}")


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


def test_a_rank_that_exits_has_the_exit_code_2(ranks: Ranks) -> None:
    ranks.result = SystemExit(3)
    result = run()
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: SystemExit: 3")


def test_an_error_without_words_is_its_class(ranks: Ranks) -> None:
    ranks.result = ZeroDivisionError()
    assert "ZeroDivisionError" in run().stderr


def test_ranks_that_hang_are_shown_with_their_stacks(ranks: Ranks) -> None:
    ranks.result = TimeoutError("too late")
    ranks.result.add_note("rank 1 waits in all_reduce")
    assert "rank 1 waits in all_reduce" in run().stderr


def test_the_traceback_is_shown_if_it_is_wanted(ranks: Ranks) -> None:
    ranks.result = ConfigError("there is no file")
    assert "Traceback" not in run().stderr
    assert "Traceback" in run("--traceback").stderr


def test_a_file_that_is_missing_has_the_exit_code_2() -> None:
    result = CliRunner().invoke(main, ["audit", "nowhere.py:audited"])
    assert result.exit_code == 2
    assert "Error: nowhere.py cannot be imported" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "0"],
        ["--tolerance", "0"],
        ["--tolerance", "-1"],
        ["--ranks", "0"],
        ["--ranks", "257"],
        ["--timeout", "0"],
    ],
    ids=" ".join,
)
def test_numbers_out_of_range_are_refused(ranks: Ranks, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "not in the range" in result.stderr
    assert ranks.started == []


@pytest.mark.parametrize("report", [RIGHT, WRONG], ids=["right", "wrong"])
def test_the_report_is_saved_as_json(ranks: Ranks, tmp_path: Path, report: Report) -> None:
    ranks.result, path = report, tmp_path / "report.json"
    result = run("--json", str(path))
    assert result.exit_code == (0 if report.is_right else 1)
    assert path.read_text() == report.as_json()
    assert json.loads(path.read_text())["is_right"] is report.is_right


def test_the_report_is_saved_as_a_page(ranks: Ranks, tmp_path: Path) -> None:
    ranks.result, path = WRONG, tmp_path / "report.html"
    assert run("--html", str(path)).exit_code == 1
    text = path.read_text()
    assert text.startswith("<!doctype html>")
    assert "stale" in text


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_folder_that_does_not_exist_has_the_exit_code_2(tmp_path: Path, option: str) -> None:
    path = tmp_path / "nowhere" / "report"
    result = run(option, str(path))
    assert result.exit_code == 2
    assert f"Error: {option} {path}: No such file or directory" in result.stderr
    assert not path.parent.exists()


class TestInTorchrun:
    """The ranks are those of torchrun, so none are started."""

    @pytest.fixture(autouse=True)
    def started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr(process, "process_group", contextlib.nullcontext)
        monkeypatch.setattr(dist, "get_rank", lambda: 0)

    @pytest.fixture
    def here(self, monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> Ranks:
        monkeypatch.setattr(Run, "here", lambda _: ranks.report())
        return ranks

    @pytest.mark.parametrize(("report", "code"), [(RIGHT, 0), (WRONG, 1)])
    def test_the_first_rank_prints(self, here: Ranks, report: Report, code: int) -> None:
        here.result = report
        result = run()
        assert (result.exit_code, result.stdout) == (code, f"{report}\n")
        assert here.started == []

    @pytest.mark.parametrize(("report", "code"), [(RIGHT, 0), (WRONG, 1)])
    def test_other_ranks_print_nothing(
        self, here: Ranks, monkeypatch: pytest.MonkeyPatch, report: Report, code: int
    ) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda: 1)
        here.result = report
        result = run()
        assert (result.exit_code, result.output) == (code, "")

    def test_an_audit_that_cannot_be_run_has_the_exit_code_2(self, here: Ranks) -> None:
        here.result = ConfigError("there is no file")
        result = run()
        assert result.exit_code == 2
        assert result.stderr == "Error: there is no file\n"
