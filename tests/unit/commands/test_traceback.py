"""--traceback shows where an error came from. Without it one line does, with a hint."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipegrad.cli import main
from tests.support.train.jobs import with_job

FAILING = ["--set", "model.factory=factories:fails"]
HINT = " (--traceback prints where)"


@pytest.fixture
def job(tmp_path: Path) -> str:
    return str(with_job(tmp_path) / "small.toml")


def plan(*words: str) -> list[str]:
    result = CliRunner().invoke(main, ["plan", *words])
    assert result.exit_code == 1
    return result.output.splitlines()


def test_an_error_of_the_users_code_is_one_line_and_the_whole_traceback_if_asked_for(
    job: str,
) -> None:
    [line] = plan(job, *FAILING)
    assert line.startswith("Error: --set model.factory=factories:fails: model = ")
    assert line.endswith(HINT)
    lines = plan(job, *FAILING, "--traceback")
    assert lines[0] == "Traceback (most recent call last):"
    assert any('factories.py", line ' in line for line in lines)
    assert "RuntimeError: no such checkpoint" in lines
    assert lines[-1].startswith("Error: --set model.factory=factories:fails: model = ")
    assert not lines[-1].endswith(HINT)


def test_an_error_of_the_configuration_has_nothing_more_to_show(job: str) -> None:
    [line] = plan(job, "--set", "train.stpes=3")
    assert not line.endswith(HINT)
    [line] = plan("nowhere.toml")
    assert line == "Error: nowhere.toml: there is no such file: give the path of a TOML file"
