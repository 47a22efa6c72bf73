"""Which failures are final."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public

from pipegrad.comm import failures
from pipegrad.comm.failures import FailureNotice
from pipegrad.comm.store import SignedStore


@pytest.mark.parametrize("final", [False, True])
def test_a_failure_is_final_only_if_that_is_said(
    monkeypatch: pytest.MonkeyPatch, *, final: bool
) -> None:
    board = SignedStore(HashStore())
    monkeypatch.setattr(failures, "store", lambda: board)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    notice = FailureNotice("sync 0")
    notice.post("boom", **({"final": True} if final else {}))
    assert notice.read() == "rank 3: boom"
    assert notice.read_final() == ("rank 3: boom" if final else None)
