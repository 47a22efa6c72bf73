"""The reporter ``tensorboard``. It needs the package of this name: an extra of pipegrad."""

from __future__ import annotations

import secrets
from pathlib import Path

from pipegrad.train.config import Config
from pipegrad.train.reporters.reporter import Reporter, StepMetrics

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as missing:
    raise ImportError(
        "it needs the package tensorboard: pip install 'pipegrad[tensorboard]'"
    ) from missing


class TensorBoard(Reporter):
    """Writes events for TensorBoard into the run's folder."""

    def open(self, folder: Path, config: Config) -> None:
        # A name that nobody can guess; see [Note: who may write there].
        suffix = f".{secrets.token_hex(8)}"
        # TensorBoard hides events that an ended process wrote for the steps that are made again.
        self._writer = SummaryWriter(
            str(folder), purge_step=self.first_step, filename_suffix=suffix
        )

    def report(self, metrics: StepMetrics) -> None:
        for name, value in metrics.known().items():
            if isinstance(value, str):
                self._writer.add_text(name, value, metrics.step)
            elif name != "step":
                self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._writer.close()
