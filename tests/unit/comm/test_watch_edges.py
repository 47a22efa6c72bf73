"""Who is the cause of a stall where several ranks wait for nobody, and which failures are final."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pipegrad.comm import failures
from pipegrad.comm.failures import FailureNotice
from tests.unit.comm.test_failure_report import computing, report, waiting


def test_a_free_rank_for_which_others_wait_comes_before_one_that_is_slower() -> None:
    found = report([waiting(0, 3), computing(1, 50.0), waiting(2, 3), computing(3)], alarm="LATE")
    assert found.cause.startswith("rank 3 was in step 3, compute 2F1, for 9.0 s")


@pytest.mark.parametrize("final", [False, True])
def test_a_failure_is_final_only_if_that_is_said(
    monkeypatch: pytest.MonkeyPatch, *, final: bool
) -> None:
    board = dist.HashStore()
    monkeypatch.setattr(failures, "store", lambda: board)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    notice = FailureNotice("sync 0")
    notice.post("boom", **({"final": True} if final else {}))
    assert notice.read() == "rank 3: boom"
    assert notice.read_final() == ("rank 3: boom" if final else None)
