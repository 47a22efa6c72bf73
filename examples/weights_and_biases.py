"""A reporter of `pipegrad train` for Weights & Biases.

pip install wandb, and with this file beside the configuration:

    [train]
    reporters = ["jsonl", "terminal", { name = "weights_and_biases:Run", project = "my-project" }]
"""

from __future__ import annotations

import json
from pathlib import Path

import wandb

from pipegrad.train.config import Config
from pipegrad.train.reporters.reporter import Reporter, StepMetrics


class Run(Reporter):
    """A run of Weights & Biases."""

    def __init__(self, project: str) -> None:
        self._project = project

    def open(self, folder: Path, config: Config) -> None:
        """Begins the run."""
        manifest = json.loads((folder / "manifest.json").read_text())  # it has no secrets
        self._run = wandb.init(project=self._project, dir=folder, config=manifest["config"])

    def report(self, metrics: StepMetrics) -> None:
        """Takes the metrics of a step."""
        self._run.log(metrics.known(), step=metrics.step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()
