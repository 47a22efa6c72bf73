"""A run outlives what is written of it."""

from __future__ import annotations

import io
import json
import resource
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from pipegrad.train.config import Config
from pipegrad.train.metrics import StepMetrics
from pipegrad.train.report import Report
from pipegrad.train.schema import Model


def metrics(number: int) -> StepMetrics:
    return StepMetrics(number, 5.0, 1.0, 0.1, 100.0, 2, 64, 0.0)


def test_metrics_on_a_full_disk_end_and_the_run_does_not(tmp_path: Path) -> None:
    """Issue 16, point 18. A full disk ended the run in 101 lines, and left half a line of JSON."""
    shown = io.StringIO()
    report = Report(Console(file=shown, width=160), Config(model=Model(factory="a:b")))
    report.begin(tmp_path, {})
    line = len(json.dumps(asdict(metrics(1)))) + 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (line * 5 // 2, limits[1]))
    try:
        with report.running():
            for number in range(1, 6):
                report.step(metrics(number))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(text)["step"] for text in lines] == [1, 2]
    told = f"step 3: {tmp_path}/metrics.jsonl cannot be written: "
    assert shown.getvalue().count(told) == 1
    report.close(tmp_path, "cpu", "bit-identical")
    assert "5 on cpu" in shown.getvalue()
