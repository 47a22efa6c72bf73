"""A run saves while it goes on, ends when it is asked to, and goes on where it was."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from rich.console import Console

from pipegrad.checkpoint import files, saving
from pipegrad.checkpoint.folders import checkpoints
from pipegrad.errors import PipegradError
from pipegrad.train.loop import Trainer, run
from pipegrad.train.report import Report
from tests.support import checkpoints as checkpoints_of
from tests.support.ranked import gathered
from tests.support.train.jobs import trainer_of, with_job

pytestmark = pytest.mark.ranks(2)
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
VEE = "parallel.schedule={name='interleaved-1f1b', stages_per_rank=2}"
Hook = Callable[[Trainer, int], None]


@dataclass(frozen=True)
class Ran:
    """Exit code or error of a run, what each rank printed of checkpoints and stops, its notes."""

    code: int | None = None
    error: str = ""
    lines: tuple[str, ...] = ()
    lines_of_rank_1: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def ran(folder: Path, *settings: str, after: Hook = lambda *_: None) -> Ran:
    """Runs a job; a hook is called after each step, with its number."""
    shown, code, said = io.StringIO(), None, ""
    notes: tuple[str, ...] = ()
    try:
        with contextlib.chdir(folder):
            trainer = trainer_of(folder / "job.toml", *settings)
            notes, step = trainer.notes, trainer.step

            def hooked(number: int) -> Any:
                metrics = step(number)
                after(trainer, number)
                return metrics

            with mock.patch.object(trainer, "step", hooked):
                code = run(trainer, Report(Console(file=shown, width=400), trainer.job))
            trainer.close()
    except PipegradError as error:
        said = str(error)
    assert gathered((code, said)) == [(code, said)] * 2
    lines = [x for x in shown.getvalue().splitlines() if "checkpoint" in x or "stopped" in x]
    # Without the summary, and what a loaded machine adds.
    lines = [x for x in lines if " has metrics.jsonl" not in x and "still being written" not in x]
    first, second = gathered(tuple(lines))
    return Ran(code, said, first, second, notes)


def asked_to_end(number: int, after: int) -> Hook:
    """Sends a signal to rank 1 alone after a step; it must not end before all ranks do."""

    def hook(trainer: Trainer, step: int) -> None:
        if dist.get_rank() == 1 and step == after:
            os.kill(os.getpid(), number)
            while not trainer.signals.received:
                pass

    return hook


def full_disk(step: int) -> Any:
    """Is the disk of rank 1 that is full when a step is saved."""
    write = files.write

    def written(path: Path, *arguments: Any) -> Any:
        if dist.get_rank() == 1 and path.parent.name == f"checkpoint-{step}.partial":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *arguments)

    return mock.patch.object(saving, "write", written)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_job(tmp_path_factory.mktemp("saving"), "job.toml", JOB)


@cache
def through(folder: Path) -> Path:
    """Returns the folder of a run that nobody disturbed."""
    assert ran(folder, "train.output=through", "train.save_every=3").code == 0
    return folder / "through"


def rows(run: Path) -> list[tuple[int, float, float]]:
    """Returns number, loss and learning rate of each step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"], row["learning_rate"]) for row in lines]


def names(run: Path) -> list[str]:
    return [path.name for path in checkpoints(run)]


def check_equal(one: Path, other: Path) -> None:
    """Raises unless two checkpoints have the same bits."""
    assert len(checkpoints_of.values(one)) > 10
    assert checkpoints_of.differences(one, other) == []


def test_a_checkpoint_has_the_values_of_its_step_though_the_training_goes_on(folder: Path) -> None:
    """It is written after two more steps have been made; the other one at once."""
    write, has_come = files.write, threading.Event()

    def after(_: Trainer, number: int) -> None:
        if number >= 6:
            has_come.set()

    def slow(*arguments: Any) -> Any:
        assert has_come.wait(60)
        return write(*arguments)

    with mock.patch.object(saving, "write", slow):
        settings = ["train.output=slow", "train.save_every=4", "train.keep_last=9"]
        assert ran(folder, *settings, after=after).code == 0
    slowly, whole = folder / "slow", through(folder)
    assert names(slowly) == ["checkpoint-8", "checkpoint-4"]
    assert rows(slowly) == rows(whole)
    check_equal(slowly / "checkpoint-8", whole / "checkpoint-8")
    at_once = partial(ran, folder, "train.output=at once")
    assert at_once(after=asked_to_end(signal.SIGTERM, 3)).code == 143
    check_equal(slowly / "checkpoint-4", folder / "at once" / "checkpoint-4")


def test_a_run_goes_on_in_its_folder_to_the_bit_until_it_is_complete(folder: Path) -> None:
    """Model and data draw from the generators of Python, numpy and torch."""
    half = partial(ran, folder, "train.output=half")
    assert half("train.save_every=4", after=asked_to_end(signal.SIGUSR1, 5)).code == 138
    again = half("train.resume=half")
    assert (again.code, again.notes) == (0, ())
    run, whole = folder / "half", through(folder)
    assert rows(run) == rows(whole)
    check_equal(run / "checkpoint-8", whole / "checkpoint-8")
    complete = half("train.resume=auto")
    assert complete.code == 0
    assert complete.lines == (
        "all 8 steps are made already: half/checkpoint-8; for more, set train.steps higher",
    )
    assert ran(folder, "train.resume=half/checkpoint-8", "train.steps=9", VEE).notes == ()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138)])
def test_a_signal_ends_all_ranks_after_one_step(folder: Path, name: str, code: int) -> None:
    """It comes to rank 1 alone, after step 3."""
    stopped = ran(folder, f"train.output={name}", after=asked_to_end(signal.Signals[name], 3))
    assert (stopped.code, stopped.lines_of_rank_1) == (code, ())
    assert names(folder / name) == ["checkpoint-4"]
    assert rows(folder / name) == rows(through(folder))[:4]
    [line] = stopped.lines
    assert line.startswith(f"stopped by {name} after step 4; saved {name}/checkpoint-4; go on with")
    assert line.endswith(f" train.resume = '{name}'")


def test_who_saves_nothing_is_told(folder: Path) -> None:
    stop = asked_to_end(signal.SIGTERM, 2)
    stopped = ran(folder, "train.output=unsaved", "train.save=false", after=stop)
    assert stopped.code == 143
    assert stopped.lines == (
        "stopped by SIGTERM after step 3; nothing is saved, as train.save = false",
    )
    assert names(folder / "unsaved") == []
    # It begins again in its folder.
    assert ran(folder, "train.output=unsaved", "train.resume=auto").code == 0
    assert rows(folder / "unsaved") == rows(through(folder))
    assert '"save": true' in (folder / "unsaved" / "manifest.json").read_text()


def test_old_checkpoints_are_removed(folder: Path) -> None:
    kept = ["train.output=kept", "train.keep_last=2", "train.keep_every=3"]
    assert ran(folder, *kept, "train.save_every=1").code == 0
    assert names(folder / "kept") == [f"checkpoint-{step}" for step in (8, 7, 6, 3)]


def test_a_full_disk_ends_the_save_and_not_the_run(folder: Path) -> None:
    with full_disk(3):
        found = ran(folder, "train.output=full", "train.save_every=3")
    assert (found.code, found.lines_of_rank_1) == (0, ())
    [line] = found.lines
    assert line.startswith(
        "the checkpoint of step 3 cannot be written into full/checkpoint-3: rank 1: the disk is "
    )
    assert line.endswith("the run goes on without this checkpoint")
    assert names(folder / "full") == ["checkpoint-8", "checkpoint-6"]
    assert list((folder / "full").glob("*partial*")) == []
    assert rows(folder / "full") == rows(through(folder))


def test_a_full_disk_at_the_end_is_an_error(folder: Path) -> None:
    with full_disk(8):
        said = ran(folder, "train.output=full at last", "train.save_every=3").error
    assert "\n" not in said
    assert said.startswith("the checkpoint of step 8 cannot be written into full at last/checkpo")
    assert said.endswith("make room")
    assert names(folder / "full at last") == ["checkpoint-6", "checkpoint-3"]
    assert list((folder / "full at last").glob("*partial*")) == []


def test_a_folder_that_is_renamed_while_it_runs_gets_no_checkpoint(folder: Path) -> None:
    """A new folder of the old name had a checkpoint, and neither metrics nor manifest."""

    def hook(_trainer: Trainer, step: int) -> None:
        dist.barrier()
        if dist.get_rank() == 0 and step == 2:
            (folder / "before").rename(folder / "after")
        dist.barrier()

    said = ran(folder, "train.output=before", "train.save_every=3", after=hook).error
    assert "the run's folder was removed or renamed while it ran" in said
    assert names(folder / "after") == []
    assert not (folder / "before").exists()


def test_ranks_that_do_not_see_the_folder_are_refused(folder: Path) -> None:
    own = folder / f"machine-{dist.get_rank()}"
    own.mkdir()
    with_job(own, "job.toml", JOB)
    said = ran(own, "train.output=run").error
    assert "\n" not in said
    assert "train.output = 'run': ranks [1] on " in said
    assert "do not see run, which rank 0 on " in said
    assert not (folder / "machine-0" / "run").exists()
    assert ran(own, "train.output=unsaved", "train.save=false").code == 0
