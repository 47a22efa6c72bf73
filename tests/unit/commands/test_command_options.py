"""Options of every command that has timelines; what a launcher says of the first failure."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from pipegrad.commands.command_options import Drawing, draws
from pipegrad.commands.run_commands import _cause
from tests.support.picture.timelines import SMALL


@click.command()
@click.option("--ranks", type=int, default=2)
@draws
def command(drawing: Drawing, ranks: int) -> None:
    """Draw something."""
    click.echo(f"{ranks} ranks, wanted: {drawing.is_wanted}")
    drawing.write([SMALL])


def invoked(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)))


def test_what_is_named_is_written(tmp_path: Path) -> None:
    assert invoked("--ranks", "3").stdout == "3 ranks, wanted: False\n"
    page, figure, trace = (tmp_path / name for name in ("page.html", "figure.svg", "trace.json"))
    result = invoked("--html", page, "--svg", figure, "--perfetto", trace)
    assert result.exit_code == 0, result.output
    assert result.stdout == "2 ranks, wanted: True\n"
    assert result.stderr == f"wrote {page}\nwrote {figure}\nwrote {trace}\n"
    assert page.read_text().startswith("<!doctype html>")
    assert figure.read_text().startswith("<svg")
    assert json.loads(trace.read_text())["traceEvents"]


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
    assert _cause(1, failure, None) == "rank 1: ValueError: no such layer"


def test_a_rank_that_said_nothing_is_named_by_how_it_ended() -> None:
    def failed(code: int) -> Any:
        name = signal.Signals(-code).name if code < 0 else "<N/A>"
        return SimpleNamespace(error_file_data={}, exitcode=code, signal_name=lambda: name)

    assert (
        _cause(2, failed(3), None) == "rank 2 failed first (exit code 3): look at its output above"
    )
    where = _cause(2, failed(-signal.SIGSEGV), Path("logs"))
    assert where == "rank 2 failed first (killed by SIGSEGV): look at its output in logs"
    assert "for lack of memory" in _cause(2, failed(-signal.SIGKILL), None)
