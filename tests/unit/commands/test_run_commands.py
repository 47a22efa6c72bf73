"""What a launcher says of the rank that failed first."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipegrad.commands.run_commands import _cause


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
