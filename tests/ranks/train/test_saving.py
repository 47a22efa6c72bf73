"""A run saves while it goes on, ends when it is asked to, and goes on where it was."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from rich.console import Console
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from pipegrad.errors import PipegradError
from pipegrad.testing import run_ranks
from pipegrad.train.checkpoint.checksums import CheckedWriter
from pipegrad.train.checkpoint.folders import checkpoints
from pipegrad.train.config import load
from pipegrad.train.reporters.report import Report
from pipegrad.train.run.run import run
from pipegrad.train.trainer import Trainer
from tests.support.train import data_functions, restarts
from tests.support.train.jobs import with_job

JOB = """
[model]
factory = "factories:drawing"
[data]
dataset = "data_functions:endless"
[optimizer]
lr = 1e-2
schedule = {name = "OneCycleLR", max_lr = 1e-2, total_steps = 20}
[train]
device = "cpu"
steps = 8
trace = false
reporters = ["jsonl"]
"""
VEE = ["parallel.schedule={name='interleaved-1f1b', stages_per_rank=2}"]
Hook = Callable[[Trainer, int], None]


def trained(settings: list[str], after: Hook | None = None) -> dict[str, Any]:
    """Runs a job; returns the exit code or the error, what was printed, and the notes.

    Args:
        settings: Of the command line.
        after: Called after each step, with its number.
    """
    shown = io.StringIO()
    found: dict[str, Any] = {"notes": ()}
    try:
        trainer = Trainer(partial(load, Path("job.toml"), settings))
        found["notes"] = trainer.notes
        step = trainer.step

        def hooked(number: int) -> Any:
            metrics = step(number)
            if after is not None:
                after(trainer, number)
            return metrics

        with mock.patch.object(trainer, "step", hooked):
            found["code"] = run(trainer, Report(Console(file=shown, width=400), trainer.job))
        trainer.close()
    except PipegradError as error:
        found["error"] = str(error)
    lines = shown.getvalue().splitlines()
    said = [line for line in lines if "checkpoint" in line or "stopped" in line]
    found["lines"] = [line for line in said if not line.startswith(" ")]  # without the summary
    return found


def at(name: str, *settings: str) -> list[str]:
    return [f"train.output={name}", *settings]


def asked_to_end(number: int, step: int, trainer: Trainer, made: int) -> None:
    """Sends a signal to rank 1 alone, which must not end before all ranks do."""
    if dist.get_rank() == 1 and made == step:
        os.kill(os.getpid(), number)
        while not trainer.signals.received:
            pass


class Slow:
    """Lets no checkpoint be written before the training has gone on."""

    def __init__(self, until: int) -> None:
        self._until, self._has_come = until, threading.Event()
        self._write = CheckedWriter.write_data

    def after(self, trainer: Trainer, number: int) -> None:
        if number >= self._until:
            self._has_come.set()

    def write(self, writer: CheckedWriter, *arguments: Any) -> Any:
        assert self._has_come.wait(60)
        return self._write(writer, *arguments)


class Full:
    """Is the disk of rank 1 that is full when a step is saved."""

    def __init__(self, step: int) -> None:
        self._name = f"checkpoint-{step}.partial"
        self._write = FileSystemWriter.write_data

    def write(self, writer: FileSystemWriter, *arguments: Any) -> Any:
        if dist.get_rank() == 1 and Path(writer.path).name == self._name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(writer, *arguments)


def method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that a class binds; it leaves bound methods alone."""

    def bound(*arguments: Any) -> Any:
        return function(*arguments)

    return bound


def histories(folder: str) -> dict[str, Any]:
    os.chdir(folder)
    found: dict[str, Any] = {"through": trained(at("through", "train.save_every=3"))}
    slow = Slow(until=6)
    with mock.patch.object(CheckedWriter, "write_data", method(slow.write)):
        found["slow"] = trained(at("slow", "train.save_every=4", "train.keep_last=9"), slow.after)
    found["half"] = trained(at("half", "train.save_every=4"), stop_after(5))
    found["again"] = trained(at("half", "train.resume=half"))
    found["once more"] = trained(at("half", "train.resume=auto"))
    found["from nothing"] = trained(at("new", "train.resume=auto", "train.steps=1"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        hook = partial(asked_to_end, number, 3)
        found[number.name] = trained(at(number.name), hook)
    found["unsaved"] = trained(
        at("unsaved", "train.save=false"), partial(asked_to_end, signal.SIGTERM, 2)
    )
    every = ["train.save_every=1", "train.keep_last=2", "train.keep_every=3"]
    found["kept"] = trained(at("kept", *every))
    for name, step in {"full": 3, "full at last": 8}.items():
        with mock.patch.object(FileSystemWriter, "write_data", method(Full(step).write)):
            found[name] = trained(at(name, "train.save_every=3"))
    found["other layout"] = trained(["train.resume=half/checkpoint-8", "train.steps=9", *VEE])
    found["undrawn"] = trained(
        at("undrawn", "model.factory=factories:tied", "train.steps=1")
    ) | {"then": trained([
        "model.factory=factories:tied", "train.resume=undrawn/checkpoint-1", "train.steps=2",
        *VEE,
    ])}  # fmt: skip
    found["no room"] = no_room()
    found["apart"] = apart()
    return found


def stop_after(step: int) -> Hook:
    return partial(asked_to_end, signal.SIGUSR1, step)


def no_room() -> dict[str, Any]:
    with mock.patch("pipegrad.train.checkpoint.writer.space.free_bytes", return_value=20_000):
        ended = trained(at("no room", "train.save_every=4"))
        again = trained(at("no room", "train.resume=auto", "train.steps=9"))
    return ended | {"again": again}


def apart() -> dict[str, Any]:
    """Rank 1 is on a machine with other folders."""
    own = Path(f"machine-{dist.get_rank()}")
    own.mkdir()
    with_job(own, "job.toml", JOB)
    (own / "data_functions.py").write_text(Path(data_functions.__file__).read_text())
    os.chdir(own)
    refused, unsaved = trained(at("run")), trained(at("unsaved", "train.save=false"))
    os.chdir("..")
    return refused | {"unsaved": unsaved}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = with_job(tmp_path_factory.mktemp("saving"), "job.toml", JOB)
    (folder / "data_functions.py").write_text(Path(data_functions.__file__).read_text())
    return folder


@pytest.fixture(scope="module")
def replies(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(histories, 2, str(folder))


def rows(run: Path) -> list[tuple[int, float, float]]:
    """Returns number, loss and learning rate of each step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"], row["learning_rate"]) for row in lines]


def names(run: Path) -> list[str]:
    return [path.name for path in checkpoints(run)]


def equal(one: Path, other: Path) -> bool:
    """Whether two checkpoints have the same bits."""
    first, second = restarts.values(one), restarts.values(other)
    assert len(first) > 10
    return first.keys() == second.keys() and all(restarts.same(first[k], second[k]) for k in first)


@pytest.mark.usefixtures("replies")
def test_a_checkpoint_has_the_values_of_its_step_though_the_training_goes_on(folder: Path) -> None:
    """It was written after two more steps had been made; the other one at once."""
    assert names(folder / "slow") == ["checkpoint-8", "checkpoint-4"]
    assert rows(folder / "slow") == rows(folder / "through")
    assert equal(folder / "slow" / "checkpoint-8", folder / "through" / "checkpoint-8")
    assert equal(folder / "slow" / "checkpoint-4", folder / "SIGTERM" / "checkpoint-4")


def test_a_run_goes_on_in_its_folder_to_the_bit(
    replies: list[dict[str, Any]], folder: Path
) -> None:
    """Model and data draw from the generators of Python, numpy and torch."""
    for reply in replies:
        assert (reply["half"]["code"], reply["again"]["code"]) == (138, 0)
        assert reply["again"]["notes"] == ()
    assert rows(folder / "half") == rows(folder / "through")
    assert equal(folder / "half" / "checkpoint-8", folder / "through" / "checkpoint-8")
    launches = json.loads((folder / "half" / "manifest.json").read_text())["launches"]
    assert [launch["first_step"] for launch in launches] == [1, 7, 9]
    assert [launch["checkpoint"] for launch in launches] == [
        None,
        "half/checkpoint-6",
        "half/checkpoint-8",
    ]


def test_what_is_complete_says_so(replies: list[dict[str, Any]]) -> None:
    assert [reply["once more"]["code"] for reply in replies] == [0, 0]
    assert replies[0]["once more"]["lines"] == [
        "all 8 steps are made already: half/checkpoint-8; for more, set train.steps higher"
    ]


def test_auto_without_a_run_begins_one(replies: list[dict[str, Any]], folder: Path) -> None:
    assert replies[0]["from nothing"]["code"] == 0
    assert names(folder / "new") == ["checkpoint-1"]


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138)])
def test_a_signal_ends_all_ranks_after_one_step(
    replies: list[dict[str, Any]], folder: Path, name: str, code: int
) -> None:
    """It came to rank 1 alone, after step 3."""
    assert [reply[name]["code"] for reply in replies] == [code, code]
    assert names(folder / name) == ["checkpoint-4"]
    assert rows(folder / name) == rows(folder / "through")[:4]
    (line,) = replies[0][name]["lines"]
    assert line.startswith(f"stopped by {name} after step 4; saved {name}/checkpoint-4; go on with")
    assert line.endswith(f" train.resume = '{name}'")
    assert replies[1][name]["lines"] == []


def test_who_saves_nothing_is_told(replies: list[dict[str, Any]], folder: Path) -> None:
    assert replies[0]["unsaved"]["code"] == 143
    assert replies[0]["unsaved"]["lines"] == [
        "stopped by SIGTERM after step 3; nothing is saved, as train.save = false"
    ]
    assert names(folder / "unsaved") == []


@pytest.mark.usefixtures("replies")
def test_old_checkpoints_are_removed(folder: Path) -> None:
    assert names(folder / "kept") == [f"checkpoint-{step}" for step in (8, 7, 6, 3)]


def test_a_full_disk_ends_the_save_and_not_the_run(
    replies: list[dict[str, Any]], folder: Path
) -> None:
    assert [reply["full"]["code"] for reply in replies] == [0, 0]
    (line,) = replies[0]["full"]["lines"]
    assert line.startswith(
        "the checkpoint of step 3 cannot be written into full/checkpoint-3: rank 1: OSError(28, "
    )
    assert line.endswith("the run goes on without this checkpoint")
    assert replies[1]["full"]["lines"] == []
    assert names(folder / "full") == ["checkpoint-8", "checkpoint-6"]
    assert list((folder / "full").glob("*partial*")) == []
    assert rows(folder / "full") == rows(folder / "through")


def test_a_full_disk_at_the_end_is_an_error(replies: list[dict[str, Any]], folder: Path) -> None:
    first, second = (reply["full at last"]["error"] for reply in replies)
    assert first == second
    assert "\n" not in first
    assert "the last checkpoint of this run is lost: the checkpoint of step 8 cannot be" in first
    assert names(folder / "full at last") == ["checkpoint-6", "checkpoint-3"]
    assert list((folder / "full at last").glob("*partial*")) == []


def test_generators_start_again_on_another_layout(replies: list[dict[str, Any]]) -> None:
    for reply in replies:
        (note,) = reply["other layout"]["notes"]
        assert note.startswith("train.resume: the generators of Python and numpy start from")
        assert reply["undrawn"]["then"]["notes"] == ()
        assert reply["undrawn"]["then"]["code"] == 0


def test_a_disk_that_is_too_small_is_told_early(
    replies: list[dict[str, Any]], folder: Path
) -> None:
    first, *later = replies[0]["no room"]["lines"]
    assert first.startswith("2 checkpoints of about ")
    assert first.endswith(
        "20,000 bytes are free there: make room, or set train.keep_last lower or "
        "train.save_every higher"
    )
    assert [line.split(" of ")[0] for line in later] == ["a checkpoint"] * 2
    # One that is there says how large they are, and makes room when the next is whole.
    nbytes = sum(path.stat().st_size for path in (folder / "no room" / "checkpoint-8").iterdir())
    again = replies[0]["no room"]["again"]["lines"]
    assert [line.split(" will not ")[0] for line in again] == [
        f"a checkpoint of about {nbytes:,} bytes"
    ] * 2


def test_ranks_that_do_not_see_the_folder_are_refused(
    replies: list[dict[str, Any]], folder: Path
) -> None:
    first, second = (reply["apart"]["error"] for reply in replies)
    assert first == second
    assert "\n" not in first
    assert "train.output = 'run': ranks [1] on " in first
    assert "do not see run, which rank 0 on " in first
    assert not (folder / "machine-0" / "run").exists()
    assert [reply["apart"]["unsaved"]["code"] for reply in replies] == [0, 0]
