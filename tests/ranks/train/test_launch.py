"""`pipegrad launch` and torchrun: ranks start, end, are killed and start again together."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.launcher import api

from pipegrad.checkpoint.folders import checkpoints
from pipegrad.cli import main
from pipegrad.comm.store import STORE_KEY
from pipegrad.testing import run_ranks
from tests.support.checkpoints import differences
from tests.support.train import restarts
from tests.support.train.jobs import with_job
from tests.support.train.launched import Launched, is_running, listening, pipegrad

Start = Callable[..., Launched]
SAVED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_job(tmp_path)


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder, and what a launcher sets of the environment."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    for name in ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PIPEGRAD_LAUNCHER"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv(STORE_KEY, "1")


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts launchers of a job with settings, in the folder; ends them."""
    started: list[Launched] = []

    def begin(settings: str, *words: str, job: str = "small.toml", anew: bool = False) -> Launched:
        changed = [word for setting in settings.split() for word in ("--set", setting)]
        words = ("launch", *words, job, *changed)
        started.append(Launched(folder, pipegrad, *words, anew=anew))
        return started[-1]

    yield begin
    for launched in started:
        launched.kill()


def num_rows(folder: Path) -> list[int]:
    """Returns how many steps each run in a folder has made."""
    return [path.read_bytes().count(b"\n") for path in folder.glob("runs/*/metrics.jsonl")]


def test_a_job_is_trained_and_its_first_rank_prints(start: Start, folder: Path) -> None:
    """Ranks are new interpreters here, as they are for readers."""
    launched = start("train.steps=2", "-n", "2", anew=True)
    assert (launched.wait(), launched.errors) == (0, "")
    assert len(re.findall(r"^step     2  loss ", launched.printed, re.MULTILINE)) == 1
    assert num_rows(folder) == [2]


def test_no_rank_imports_what_the_working_directory_calls_like_a_library(
    start: Start, folder: Path
) -> None:
    """Security, F5. A pipegrad.py there was run in the place of pipegrad.

    What the configuration names is imported from there all the same.
    """
    job = folder / "jobs" / "small.toml"
    job.parent.mkdir()
    job.write_text((folder / "small.toml").read_text())
    for name in ("pipegrad", "torch", "random", "click"):
        (folder / f"{name}.py").write_text(f"open('ran-{name}', 'w')\n")
    launched = start("train.steps=1", "-n", "1", job="jobs/small.toml", anew=True)
    assert (launched.wait(), launched.errors) == (0, "")
    assert list(folder.glob("ran-*")) == []
    assert num_rows(folder) == [1]


def test_ranks_that_are_started_again_find_each_other_and_one_that_is_killed_is_the_cause(
    start: Start, folder: Path
) -> None:
    """Each restart failed: torch keeps its store, and gloo found addresses of ranks that were gone.

    Rank 1 is killed after the fifth step of each start. Everything that the first ranks did is done
    again, as they saved nothing. Other ranks fail at once when it is gone, each with many lines.
    """
    launched = start(
        "model.factory=factories:dying train.trace=false", "-n", "2", "--max-restarts", "1"
    )
    assert launched.wait() == 128 + signal.SIGKILL
    last = launched.errors.splitlines()[-1]
    assert last.startswith("Error: rank 1 failed first (killed by SIGKILL)")
    assert "ChildFailedError" not in launched.errors
    assert min(num_rows(folder)) > 2
    assert launched.printed.count("step     1  loss ") == 2


def test_nothing_of_a_launch_on_one_machine_can_be_reached_from_outside(
    start: Start, folder: Path
) -> None:
    """torch's rendezvous, its store for the ranks and gloo listened on all interfaces."""
    launched = start("train.steps=100000 train.trace=false", "-n", "2")
    launched.until(lambda: any(num_rows(folder)))
    processes = [launched.pid, *launched.ranks()]
    assert [listening(process) for process in processes] == [{"0100007F"}] * 3


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGUSR1, 138), (signal.SIGHUP, 143), (signal.SIGKILL, -9)]
)
def test_no_rank_outlives_its_launcher(start: Start, folder: Path, number: int, code: int) -> None:
    launched = start("train.steps=100000 train.trace=false", "-n", "1")
    launched.until(lambda: any(num_rows(folder)))
    [rank] = launched.ranks()
    os.kill(launched.pid, number)
    assert launched.wait() == code
    launched.until(lambda: not is_running(rank), has_ended=True)


@pytest.mark.usefixtures("here")
def test_the_ranks_of_one_machine_get_a_key_that_no_other_launch_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = list[str]()

    def launch(_config: api.LaunchConfig, _program: str) -> Callable[..., object]:
        return lambda *_words: keys.append(os.environ.get(STORE_KEY, ""))

    monkeypatch.setattr(api, "elastic_launch", launch)
    for options in ([], [], ["--nodes", "2", "--rendezvous", "a:1"]):
        monkeypatch.delenv(STORE_KEY, raising=False)
        assert CliRunner().invoke(main, ["launch", "-n", "2", "small.toml", *options]).output == ""
    assert [len(key) for key in keys] == [64, 64, 0]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        *((SignalException("", number), 128 + number) for number in SAVED_BY),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_launcher_that_was_asked_to_end_has_the_code_of_a_shell(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def launch(config: api.LaunchConfig, _program: str) -> Callable[..., object]:
        assert config.signals_to_handle == "SIGTERM,SIGINT,SIGQUIT,SIGUSR1"
        return run

    def run(*_words: str) -> None:
        raise error

    monkeypatch.setattr(api, "elastic_launch", launch)
    result = CliRunner().invoke(main, ["launch", "small.toml"])
    assert (result.exit_code, result.output) == (code, "")


def test_an_error_of_all_ranks_is_said_once(start: Start) -> None:
    launched = start("optimizer.name=AdanW", "-n", "2", anew=True)
    assert launched.wait() == 1
    line, *more = launched.errors.splitlines()
    assert more == []
    assert line.startswith("Error: optimizer.name = 'AdanW': torch.optim has none; ")


def test_launchers_of_two_machines_meet(start: Start, folder: Path) -> None:
    with closing(socket.create_server(("localhost", 0))) as server:
        port = server.getsockname()[1]
    words = ["-n", "1", "--nodes", "2", "--rendezvous", f"localhost:{port}"]
    both = [start("train.steps=2", *words) for _ in range(2)]
    assert [launched.wait() for launched in both] == [0, 0], [each.errors for each in both]
    assert num_rows(folder) == [2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-n", "0"], "'0': expected auto, or a number from 1 to 4096"),
        (["--nodes", "2"], "--nodes 2 without --rendezvous"),
        (["--rendezvous", "here:1"], "--nodes 1 with --rendezvous"),
        (["--nodes", "2", "--rendezvous", "here"], "expected HOST:PORT"),
        (["--set", "train.stpes=3"], "unknown key 'stpes'"),
        (
            ["-n", "3", "--set", "parallel.pipeline=2"],
            "are 2 ranks, but there are 3",
        ),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_wrong_start_is_refused_before_there_are_ranks(
    monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.setattr("pipegrad.commands.run_commands._run", None)
    result = CliRunner().invoke(main, ["launch", "small.toml", *words])
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    [line] = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert says in line


@pytest.mark.parametrize(
    ("settings", "expected"),
    [([], 1), (["parallel.pipeline=3"], 3), (["parallel={data=2, dimensions={tp=2}}"], 4)],
)
@pytest.mark.usefixtures("here")
def test_auto_starts_as_many_ranks_as_the_file_names(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], expected: int
) -> None:
    started = []

    def run(config: object, words: list[str]) -> int:
        started.append((config.nproc_per_node, words[4:]))  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr("pipegrad.commands.run_commands._run", run)
    options = [word for setting in settings for word in ("--set", setting)]
    result = CliRunner().invoke(main, ["launch", "small.toml", *options, "--traceback"])
    assert result.exit_code == 0, result.output
    assert started == [(expected, ["train", "small.toml", *options, "--traceback"])]


pytestmark = pytest.mark.timeout(900)


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
    assert differences(last, last_of_whole) == []
    assert sorted(path.name for path in folder.glob("run*")) == ["run"]
