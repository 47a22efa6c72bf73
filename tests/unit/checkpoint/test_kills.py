"""A save that is killed at any instant leaves whole checkpoints, and the next one succeeds."""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path

import pytest
import torch

from pipegrad.checkpoint import newest
from pipegrad.checkpoint.folders import remove_unfinished
from tests.support.checkpoints import save_together, values

OLD, NEW = torch.zeros(64), torch.ones(64)


def killed_at(run: Path, number: int) -> bool:
    """Saves in a process that ends at the n-th file that it opens, moves, makes or removes."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    numbers = count(1)

    def kill(event: str, arguments: tuple[object, ...]) -> None:
        is_file = event == "open" or event.startswith(("os.", "shutil."))
        if is_file and str(run) in str(arguments) and next(numbers) == number:
            os._exit(9)

    sys.addaudithook(kill)
    save_together(run / "checkpoint-3", {"weight": NEW}, step=3)
    os._exit(0)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_kill_leaves_whole_checkpoints(tmp_path: Path, *, is_there: bool) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for number in count(1):
        for folder in run.iterdir():
            for path in (*folder.iterdir(), folder):
                path.rmdir() if path.is_dir() else path.unlink()
        save_together(run / "checkpoint-2", {"weight": OLD}, step=2)
        if is_there:
            save_together(run / "checkpoint-3", {"weight": OLD}, step=3)
        was_killed = killed_at(run, number)
        found = newest(run)
        assert found is not None
        assert values(found)["weight"].unique().numel() == 1  # all of it is old, or new
        remove_unfinished(run)
        save_together(run / "checkpoint-3", {"weight": NEW}, step=3)
        assert torch.equal(values(run / "checkpoint-3")["weight"], NEW)
        assert {path.name for path in run.iterdir()} == {"checkpoint-2", "checkpoint-3"}
        if not was_killed:
            break
    assert number > 8
