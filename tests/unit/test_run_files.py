"""Why a file was not written is said in words, and advice follows the cause."""

from __future__ import annotations

import errno
import os

import pytest

from pipegrad import run_files


def full(number: int) -> OSError:
    return OSError(number, os.strerror(number), "data.bin")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (full(errno.ENOSPC), "the disk is full (No space left on device): make room"),
        (full(errno.EDQUOT), "the disk is full (Disk quota exceeded): make room"),
        (full(errno.EACCES), "Permission denied"),
        (ValueError("mine"), "ValueError('mine')"),
    ],
)
def test_a_full_disk_is_said_with_advice(error: Exception, says: str) -> None:
    assert run_files.why_not_written(error) == says
