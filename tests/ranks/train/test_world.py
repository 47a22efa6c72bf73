"""Processes that cannot be joined into a world say so in one line, and train nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipegrad.cli import main
from pipegrad.errors import ConfigError
from pipegrad.train import process
from pipegrad.train.config import load
from pipegrad.train.job import Job
from tests.support.train.jobs import with_job
from tests.support.train.launched import Launched, pipegrad

SET_BY_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "TORCHELASTIC_USE_AGENT_STORE"),
)
WHOLE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
START = "Start the ranks by `torchrun --nproc-per-node N -m pipegrad train CONFIG`"
CASES: dict[str, tuple[Mapping[str, str], str]] = {
    "Slurm": ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS is 4, but RANK is not set: each process would"),
    "Open MPI": ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2, but RANK is not set"),
    "MPICH": ({"PMI_SIZE": "2"}, "PMI_SIZE is 2, but RANK is not set"),
    "no rank": ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set"),
    "a rank alone": ({"RANK": "0"}, "RANK is set, but WORLD_SIZE, MASTER_ADDR, MASTER_PORT not."),
    "a word": ({**WHOLE, "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', expected a number"),
    "a negative rank": ({**WHOLE, "RANK": "-1"}, "RANK is '-1', expected a number"),
    "a rank too high": ({**WHOLE, "RANK": "1"}, "RANK is 1, expected less than WORLD_SIZE, 1"),
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in SET_BY_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return with_job(tmp_path) / "small.toml"


@pytest.fixture
def port() -> Iterator[str]:
    """A port of this machine that somebody listens at."""
    with closing(socket.create_server(("localhost", 0))) as server:
        yield str(server.getsockname()[1])


def said(job: Path, environment: Mapping[str, str]) -> str:
    found = CliRunner().invoke(main, ["train", str(job)], env=dict(environment))
    assert found.exit_code == 1
    assert not (job.parent / "runs").exists()
    return found.output


@pytest.mark.parametrize("name", CASES)
def test_variables_that_torchrun_would_not_set(job: Path, name: str) -> None:
    """Four Slurm tasks trained alone, four times; other variables ended in 28 to 43 lines."""
    environment, says = CASES[name]
    [line] = said(job, environment).splitlines()
    assert line.startswith(f"Error: {says}")
    assert START in line


def test_a_port_in_use_is_one_line(job: Path, port: str) -> None:
    """A port in use ended in 30 lines of traceback."""
    [line] = said(job, {**WHOLE, "MASTER_PORT": port}).splitlines()
    assert "EADDRINUSE" in line


def test_ranks_that_do_not_come_are_waited_for_in_words(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WORLD_SIZE = 2 with one process waited half an hour without a word."""
    monkeypatch.setattr(process, "_JOIN_SECONDS", 2.0)
    monkeypatch.setattr(process, "_SILENT_SECONDS", 0.1)
    # The system chooses a port that is free. Of another, somebody may have taken it meanwhile.
    output = said(job, {**WHOLE, "WORLD_SIZE": "2", "MASTER_PORT": "0"})
    waits, error = output.splitlines()
    assert waits == "rank 0 waits for all 2 ranks (WORLD_SIZE) to come to localhost:0"
    assert error.startswith("Error: rank 0 of 2 (WORLD_SIZE) cannot join the others at localhost:0")


def test_a_layer_that_exits_in_a_step_ends_the_run_badly(job: Path) -> None:
    """``sys.exit(0)`` in anybody's code ended with code 0 and no output."""
    setting = "model.factory=factories:exits_later"
    ran = Launched(job.parent, pipegrad, "train", job.name, "--set", setting)
    assert ran.wait() == 1
    assert "Error: the run was ended by SystemExit(0) (factories.py:" in ran.errors


def test_one_process_is_told_the_command(job: Path) -> None:
    """``pipeline = 2`` without torchrun never named torchrun."""
    with pytest.raises(
        ConfigError,
        match=r"pipeline = 2: this is one rank of 4: start them by `torchrun --nproc-per-node 4 -m "
        r"pipegrad train /.*small.toml`",
    ):
        Job(load(job, ["parallel.pipeline=2", "parallel.data=2"]), 1)
    assert "RANK" not in os.environ
