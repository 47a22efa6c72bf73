"""Options of every command that has timelines; what a launcher says of the first failure."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from pipegrad.commands.command_options import draw, draws
from pipegrad.commands.run_commands import _cause
from tests.support.picture.timelines import SMALL


@click.command()
@click.option("--ranks", type=int, default=2)
@draws
def command(pictures: dict[str, Path], ranks: int) -> None:
    """Draw something."""
    click.echo(f"{ranks} ranks, wanted: {[*pictures]}")
    draw(pictures, [SMALL])


def invoked(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)))


def test_what_is_named_is_written(tmp_path: Path) -> None:
    assert invoked("--ranks", "3").stdout == "3 ranks, wanted: []\n"
    page, figure = tmp_path / "page.html", tmp_path / "figure.svg"
    result = invoked("--html", page, "--svg", figure)
    assert result.exit_code == 0, result.output
    assert result.stdout == "2 ranks, wanted: ['html', 'svg']\n"
    assert result.stderr == f"wrote {page}\nwrote {figure}\n"
    assert page.read_text().startswith("<!doctype html>")
    assert figure.read_text().startswith("<svg")


@pytest.mark.parametrize("file", ["", "no/page.html"])
def test_a_file_that_cannot_be_written_is_one_line(file: str, tmp_path: Path) -> None:
    result = invoked("--html", tmp_path / file)
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    assert str(tmp_path) in result.output


@pytest.mark.parametrize("nested", [False, True])
def test_of_a_message_of_several_lines_the_first_is_the_cause(*, nested: bool) -> None:
    message = "rank 1: ValueError: no such layer\n  a line of the user"
    content = {"message": {"message": message} if nested else message}
    failure: Any = SimpleNamespace(error_file_data=content, exitcode=1)
    assert _cause(1, failure) == "rank 1: ValueError: no such layer"


def test_a_rank_that_said_nothing_is_named_by_how_it_ended() -> None:
    def failed(code: int) -> Any:
        name = signal.Signals(-code).name if code < 0 else "<N/A>"
        return SimpleNamespace(error_file_data={}, exitcode=code, signal_name=lambda: name)

    assert _cause(2, failed(3)) == "rank 2 failed first (exit code 3): look at its output above"
    where = _cause(2, failed(-signal.SIGSEGV))
    assert where == "rank 2 failed first (killed by SIGSEGV): look at its output above"
    assert "for lack of memory" in _cause(2, failed(-signal.SIGKILL))
