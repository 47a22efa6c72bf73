"""A job records its last steps: the file, the sentence at the end, and `pipegrad trace`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from click.testing import CliRunner, Result

from pipegrad.checkpoint import Saver
from pipegrad.cli import main
from pipegrad.observe import step_recorder
from pipegrad.simulation.timeline import Timeline
from tests.support.train.jobs import with_job

STEPS = 5


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(with_job(tmp_path))
    yield tmp_path
    if dist.is_initialized():  # a job that was refused ends with its process
        dist.destroy_process_group()


def train(*settings: str) -> Result:
    options = [option for setting in settings for option in ("--set", setting)]
    steps = ("--set", f"train.steps={STEPS}")
    result = CliRunner().invoke(main, ["train", "small.toml", *steps, *options])
    assert result.exit_code == 0, result.output
    return result


def test_a_job_writes_and_prints_where_its_last_steps_went(folder: Path) -> None:
    output = train().output
    timeline = Timeline.load(folder / "runs/run/timeline.json")
    assert timeline.source == "measured"
    assert len(timeline.step_ends) == 3
    for number in range(3):
        step = timeline.of_step(number)
        assert sum(s.seconds for s in step.on_rank(0)) == pytest.approx(step.seconds, rel=0.01)
        assert sum(s.kind == "optimizer" for s in step.spans) == 1
    (sentence,) = (line for line in output.splitlines() if line.startswith("a step takes "))
    assert output.splitlines()[-1].endswith("; where a step went: pipegrad trace runs/run")
    again = CliRunner().invoke(main, ["trace", "runs/run"]).output.splitlines()
    assert "measured, 3 steps" in again[0]
    assert again[1] == sentence
    assert any("What decided when it ended: " in line for line in again)


def test_what_follows_the_last_step_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is written at the end would look like time of the host."""
    save, ahead = Saver.save, [0.0]

    def slow(self: Saver, number: int, *, wait: bool = False) -> Path:
        ahead[0] = 1000.0 * wait
        return save(self, number, wait=wait)

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + ahead[0])
    monkeypatch.setattr(step_recorder, "time", clock)
    monkeypatch.setattr(Saver, "save", slow)
    train(f"train.save_every={STEPS}")
    assert ahead == [1000.0]
    timeline = Timeline.load(folder / "runs/run/timeline.json")
    assert timeline.of_step(2).seconds < 1000.0


def test_it_can_be_left_out(folder: Path) -> None:
    assert "pipegrad trace" not in train("train.trace=false").output
    assert not list(folder.rglob("timeline.json"))
