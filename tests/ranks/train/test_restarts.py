"""torchrun starts a run again after its ranks were killed, and it ends as if nobody had."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from pipegrad.train.checkpoint.folders import checkpoints
from tests.support.train import restarts

STEPS = 24


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody kills."""
    folder = restarts.job(tmp_path_factory.mktemp("restarts") / "whole", STEPS)
    assert restarts.torchrun(folder).wait(200) == 0, (folder / "log.txt").read_text()
    return folder


def test_a_killed_run_ends_with_the_same_bits(whole: Path, tmp_path: Path) -> None:
    """The ranks that torchrun started again found addresses of killed ranks in its store."""
    folder = restarts.job(tmp_path / "killed", STEPS)
    code, kills = restarts.killed_run(
        folder, steps=STEPS, kills=3, while_writing=1, seed=0, timeout=250
    )
    assert code == 0, (folder / "log.txt").read_text()
    assert len(kills) == 3
    assert any(kill.while_writing for kill in kills)
    assert restarts.losses(folder) == restarts.losses(whole)
    assert restarts.differences(folder, whole) == []
    assert sorted(path.name for path in folder.glob("run*")) == ["run"]


def test_a_restart_that_rank_0_does_not_see_goes_on(whole: Path, tmp_path: Path) -> None:
    """The torchrun of rank 0 had counted no restart, so the run began again in a new folder.

    Both jobs have one --rdzv-id, and the second one is no restart of the first.
    """
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    launcher = ["--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint=localhost:{port}"]
    folder = restarts.job(tmp_path / "two", STEPS)
    launched = [
        restarts.torchrun(folder, restarts=1, launcher=[*launcher, "--rdzv-id=job"])
        for _ in range(2)
    ]
    try:
        deadline = time.monotonic() + 100
        assert restarts.waits(lambda: restarts.num_rows(folder) > 8, launched[0], deadline)
        ranks = {
            restarts.variable(rank, "RANK"): rank
            for process in launched
            for rank in restarts.children(process.pid)
        }
        os.kill(ranks["RANK=1"], signal.SIGKILL)
        codes = [process.wait(100) for process in launched]
    finally:
        for process in launched:
            process.terminate()
    assert codes == [0, 0], (folder / "log.txt").read_text()
    assert restarts.losses(folder) == restarts.losses(whole)
    assert sorted(path.name for path in folder.glob("run*")) == ["run"]
    assert restarts.torchrun(folder, launcher=["--rdzv-id=job"]).wait(100) == 0
    assert len(list((folder / "run-2").glob("checkpoint-*"))) == 2


def test_torchrun_passes_a_signal_on(whole: Path, tmp_path: Path) -> None:
    """The ranks save, and the next launch goes on in the same folder."""
    folder = restarts.job(tmp_path / "ended", 10**6)
    process = restarts.torchrun(folder)
    deadline = time.monotonic() + 100
    assert restarts.waits(lambda: restarts.num_rows(folder) > 5, process, deadline)
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) != 0
    log = (folder / "log.txt").read_text()
    saved = checkpoints(folder / "run")[0]
    assert f"stopped by SIGTERM after step {saved.name.partition('-')[2]}; saved run/" in log
    assert log.count("Traceback") == log.count("SignalException: Process")  # torchrun's own alone
    steps = [number for number, _ in restarts.losses(folder)]
    again = restarts.torchrun(
        folder, "--set", "train.resume=auto", "--set", f"train.steps={steps[-1] + 2}"
    )
    assert again.wait(200) == 0, (folder / "log.txt").read_text()
    losses = restarts.losses(folder)
    assert [number for number, _ in losses] == list(range(1, steps[-1] + 3))
    assert losses[:STEPS] == restarts.losses(whole)[: len(losses)]
