"""torchrun starts a run again after its ranks were killed, and it ends as if nobody had."""

from __future__ import annotations

import os
import random
import signal
import socket
from contextlib import closing
from pathlib import Path

import pytest

from pipegrad.testing import run_ranks
from pipegrad.train.checkpoint.folders import checkpoints
from tests.support.train import restarts

pytestmark = pytest.mark.timeout(900)
STEPS = 24


def test_a_killed_run_and_one_that_torchrun_was_asked_to_end_have_the_same_bits(
    tmp_path: Path,
) -> None:
    """The ranks that torchrun started again found addresses of killed ranks in its store."""
    folder = restarts.job(tmp_path / "killed")
    launched = restarts.start(folder, "--max-restarts=1", steps=10**6)
    try:
        launched.until(lambda: restarts.num_rows(folder) > 8)
        restarts.kill_one(launched, folder, random.Random(0), writing=True)
        rows = restarts.num_rows(folder)
        launched.until(lambda: restarts.num_rows(folder) > rows + 4)
        os.kill(launched.pid, signal.SIGTERM)
        assert launched.wait() != 0
    finally:
        launched.kill()
    log = launched.printed + launched.errors
    saved = checkpoints(folder / "run")[0]
    number = int(saved.name.partition("-")[2])
    assert f"stopped by SIGTERM after step {number}; saved run/" in log
    assert log.count("Traceback") == log.count("SignalException: Process")  # torchrun's own alone
    # The next launch goes on in the same folder.
    run_ranks(restarts.in_ranks, 2, str(folder), f"train.steps={number + 2}", "train.resume=auto")
    whole = restarts.whole(tmp_path / "whole", number + 2)
    assert restarts.losses(folder) == restarts.losses(whole)
    assert [step for step, _ in restarts.losses(folder)] == list(range(1, number + 3))
    last, last_of_whole = (checkpoints(f / "run")[0] for f in (folder, whole))
    assert restarts.differences(last, last_of_whole) == []
    assert sorted(path.name for path in folder.glob("run*")) == ["run"]


def test_a_restart_that_rank_0_does_not_see_goes_on(tmp_path: Path) -> None:
    """The torchrun of rank 0 had counted no restart, so the run began again in a new folder.

    Both jobs have one --rdzv-id, and the second one is no restart of the first.
    """
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    one = ["--nproc-per-node=1", "--rdzv-id=job"]
    two = [*one, "--nnodes=2", "--max-restarts=1", f"--rdzv-endpoint=localhost:{port}"]
    folder = restarts.job(tmp_path / "two")
    both = [restarts.start(folder, *two, steps=STEPS) for _ in range(2)]
    try:
        both[0].until(lambda: restarts.num_rows(folder) > 8)
        of_rank_1 = [
            process
            for launched in both
            for process in launched.ranks()
            if b"\0RANK=1\0" in Path(f"/proc/{process}/environ").read_bytes()
        ]
        os.kill(*of_rank_1, signal.SIGKILL)
        assert [launched.wait() for launched in both] == [0, 0], both[0].errors + both[1].errors
    finally:
        for launched in both:
            launched.kill()
    assert restarts.losses(folder) == restarts.losses(restarts.whole(tmp_path / "whole", STEPS))
    assert sorted(path.name for path in folder.glob("run*")) == ["run"]
    assert restarts.start(folder, *one, steps=STEPS).wait() == 0
    assert len(list((folder / "run-2").glob("checkpoint-*"))) == 2
