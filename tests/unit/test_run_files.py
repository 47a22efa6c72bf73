"""Why a file was not written is said in words, and advice follows the cause."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipegrad import run_files

# torch's own words for any write that fails.
OF_TORCH = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")


def full(number: int) -> OSError:
    return OSError(number, os.strerror(number), "data.bin")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_with_advice(tmp_path: Path, number: int) -> None:
    error = RuntimeError("cannot write")
    error.__cause__ = full(number)
    said = run_files.why_not_written(tmp_path, error)
    assert said.startswith(f"the disk is full ({os.strerror(number)}; ")
    assert said.endswith(" bytes are free there): make room")


def test_torch_does_not_say_why_so_the_disk_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_files.why_not_written(tmp_path, OF_TORCH).startswith("RuntimeError('[enforce fail")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4096))
    said = run_files.why_not_written(tmp_path, OF_TORCH)
    assert said.startswith("the disk is full (RuntimeError('[enforce fail")
    assert said.endswith("; 4,096 bytes are free there): make room")


@pytest.mark.parametrize(
    ("error", "says"),
    [(ValueError("mine"), "ValueError('mine')"), (full(errno.EACCES), "Permission denied; ")],
)
def test_no_other_error_is_told_to_make_room(tmp_path: Path, error: Exception, says: str) -> None:
    said = run_files.why_not_written(tmp_path, error)
    assert said.startswith(says)
    assert "make room" not in said
    of_state = run_files.why_not_written(tmp_path / "not made yet", ValueError("mine"))
    assert of_state == "ValueError('mine')"
