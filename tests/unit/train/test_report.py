"""A run outlives what is written of it."""

from __future__ import annotations

import gc
import io
import json
import math
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from rich.console import Console

from pipegrad.errors import ConfigError
from pipegrad.train.config import Config
from pipegrad.train.job import Job
from pipegrad.train.report import Report
from pipegrad.train.reporters.reporter import Reporter, StepMetrics
from pipegrad.train.schema import Model, Named, Train

NAME = "weights_and_biases:Run"


def metrics(number: int, **evaluated: Any) -> StepMetrics:
    measured = (5.0, 1.0, 0.1, 100.0, 2, 64, 0.0, 1e-3, 100 * number, 0.1 * number, 2**20)
    return StepMetrics(number, *measured, **evaluated)


def config(*reporters: str) -> Config:
    train = Train(reporters=[Named(name=name) for name in reporters]) if reporters else Train()
    return Config(model=Model(factory="a:b"), train=train)


@contextmanager
def running(folder: Path, *reporters: str) -> Iterator[tuple[Report, io.StringIO]]:
    """Gives a report of a run that begins in a folder, and what it prints; ends the run."""
    shown = io.StringIO()
    run = Report(Console(file=shown, width=160), Job(config(*reporters)))
    run.begin(folder, {})
    with run.running:
        yield run, shown
    run.close(folder, {"device": "cpu"}, "equal, bit by bit")


def rows(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_on_a_full_disk_end_and_the_run_does_not(tmp_path: Path) -> None:
    """A full disk ended the run in 101 lines, and left half a line of JSON."""
    line = len(json.dumps(metrics(1).known())) + 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (line * 5 // 2, limits[1]))
    try:
        with running(tmp_path) as (run, shown):
            for number in range(1, 6):
                run.step(metrics(number))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    told = "step 3: the reporter 'jsonl' ends here, the run goes on: "
    assert shown.getvalue().count(told) == 1
    assert "5 steps on cpu" in shown.getvalue()


def test_a_number_that_json_has_not_is_null(tmp_path: Path) -> None:
    with running(tmp_path) as (run, _):
        run.step(replace(metrics(1), loss=math.nan, grad_norm=math.inf))
    assert [rows(tmp_path)[0][name] for name in ("loss", "grad_norm", "step")] == [None, None, 1]


def num_metrics() -> int:
    gc.collect()
    return sum(type(thing) is StepMetrics for thing in gc.get_objects())


def test_a_long_run_keeps_few_metrics(tmp_path: Path) -> None:
    """Rank 0 kept the metrics of all steps: 0.5 KB each, so weeks of steps filled its memory."""
    before = num_metrics()  # of other tests
    with running(tmp_path) as (run, shown):
        for number in range(1, 2502):
            seconds = 9.0 if number < 2001 else 0.1 if number % 2 else 0.3
            run.step(replace(metrics(number), loss=float(number), step_seconds=seconds))
        assert num_metrics() - before == 1001  # the first, and the last 1000
    said = shown.getvalue()
    assert "1.0000 to 2501.0000, 2501 steps on cpu" in said
    assert "  300 ms, 100 tokens/s" in said  # of the last 1000 steps; the last 1250 have 9 s


@pytest.mark.parametrize(("num_steps", "median"), [(1, "1.00 s"), (2, "2.00 s"), (5, "4.00 s")])
def test_times_are_of_the_second_half_of_a_run(tmp_path: Path, num_steps: int, median: str) -> None:
    with running(tmp_path) as (run, shown):
        for number in range(1, num_steps + 1):
            run.step(replace(metrics(number), step_seconds=float(number)))
    assert f"a step     {median}, " in shown.getvalue()


def test_what_was_not_measured_is_left_out_of_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path) as (run, _):
        run.step(metrics(1))
        run.step(metrics(2, held_out_loss=1.0, perplexity=2.718, sample="a\nb", note="skipped: x"))
        lines = capsys.readouterr().out.splitlines()
    first, second = rows(tmp_path)
    assert {*second} - {*first} == {"held_out_loss", "perplexity", "sample", "note"}
    assert first["skipped"] == 0
    assert lines[-3:] == [
        "step     2  skipped: x",
        "step     2  held-out loss 1.0000, perplexity 2.72",
        r"step     2  sample: 'a\nb'",
    ]


class Odd(Reporter):
    """Notes what it is told, and fails in the second step."""

    told: ClassVar[list[str]] = []

    def open(self, folder: Path, config: Config) -> None:
        self.told.append(f"open {folder.name} {config.train.steps}")

    def report(self, metrics: StepMetrics) -> None:
        self.told.append(f"step {metrics.step}")
        if metrics.step == 2:
            raise KeyError("no such run")

    def close(self) -> None:
        self.told.append("close")


def test_a_reporter_that_fails_ends_alone(tmp_path: Path) -> None:
    """Somebody else's reporter, and what it opened is closed although the run fails."""
    name = f"{__name__}:Odd"
    with suppress(RuntimeError), running(tmp_path, name) as (run, shown):
        for number in (1, 2, 3):
            run.step(metrics(number))
        raise RuntimeError("a stage fails")
    assert Odd.told == [f"open {tmp_path.name} 100", "step 1", "step 2", "close"]
    assert f"step 2: the reporter {name!r} ends here, the run goes on: KeyError" in shown.getvalue()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_tensorboard_is_an_extra() -> None:
    if find_spec("tensorboard") is None:
        with pytest.raises(ConfigError, match=r"reporters\[0\] = 'tensorboard': .*pip install"):
            Job(config("tensorboard"))


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with running(tmp_path, "tensorboard") as (run, _):
        run.step(metrics(1, sample="abc"))
        run.step(metrics(2, held_out_loss=1.5))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("tokens_seen")] == [100, 200]
    assert [event.step for event in events.Scalars("held_out_loss")] == [2]
    assert "sample/text_summary" in events.Tags()["tensors"]


def test_the_example_for_weights_and_biases_logs_every_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    run = SimpleNamespace(log=lambda values, step: told.append((step, values["loss"])))
    run.finish = lambda: told.append("end")

    def init(**options: Any) -> SimpleNamespace:
        told.append(options["project"])
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    train = Train(reporters=[Named.model_validate({"name": NAME, "project": "p"})])
    job = Job(Config(model=Model(factory="a:b"), train=train))
    report = Report(Console(file=io.StringIO()), job)
    report.begin(tmp_path, {"config": {}})
    with report.running:
        report.step(metrics(1))
    assert told == ["p", (1, 5.0), "end"]
