"""Who is the cause of a stall where several ranks wait for nobody, and which failures are final."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public

from pipegrad.comm import failures
from pipegrad.comm.failures import FailureNotice
from pipegrad.comm.store import SignedStore
from pipegrad.comm.watch.processes import Processes, ProcessId
from tests.unit.comm.test_failure_report import computing, report, waiting


def test_a_free_rank_for_which_others_wait_comes_before_one_that_is_slower() -> None:
    found = report([waiting(0, 3), computing(1, 50.0), waiting(2, 3), computing(3)], alarm="LATE")
    assert found.cause.startswith("rank 3 was in step 3, compute 2F1, for 9.0 s")


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


def test_a_process_that_ended_is_lost_unless_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    board, own = SignedStore(HashStore()), ProcessId.own()
    processes = Processes(board, "job", 0)
    for rank, other in ((1, own), (2, own._replace(began="1"))):  # 2: its number is used again
        board.add_line(f"job/machine/{own.machine}", f"{rank} {other.dumped()}")
    processes.learn()
    assert processes.pause_seconds == 0
    assert (processes.has_lost(), processes.lost(), processes.is_first()) == (True, [2], True)
    board.set("job/left/2", "")
    assert (processes.has_lost(), processes.lost()) == (False, [])


def test_processes_are_read_a_hundred_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    processes = Processes(SignedStore(HashStore()), "job", 0)
    pauses = []
    for _ in range(12):
        processes.learn()
        pauses.append(processes.pause_seconds > 0)
    assert pauses == [True] * 10 + [False] * 2
