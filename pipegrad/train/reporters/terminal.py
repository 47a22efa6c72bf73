"""The reporter ``terminal``: progress that people watch."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipegrad.tables import make_console
from pipegrad.train.config import Config
from pipegrad.train.reporters.reporter import Reporter, StepMetrics


class Terminal(Reporter):
    """Shows a bar on a terminal; elsewhere it prints a line every few steps."""

    def open(self, folder: Path, config: Config) -> None:
        self._config = config
        self._console: Console = make_console()
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            TimeRemainingColumn(),
            TextColumn("{task.fields[line]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=config.train.steps, line="")
        self._progress.start()

    def report(self, metrics: StepMetrics) -> None:
        line = (
            f"loss {metrics.loss:.4f}  grad norm {metrics.grad_norm:.3f}  "
            f"{metrics.tokens_per_second:,.0f} tokens/s"
        )
        self._progress.update(self._task, completed=metrics.step, line=line)
        train = self._config.train
        is_due = metrics.step in (1, train.steps) or metrics.step % train.log_every == 0
        if is_due and not self._console.is_terminal:
            self._print(f"step {metrics.step:5}  {line}")
        if metrics.note is not None:
            self._print(f"step {metrics.step:5}  {metrics.note}")
        if metrics.held_out_loss is not None:
            perplexity = metrics.perplexity
            words = "" if perplexity is None else f", perplexity {perplexity:,.2f}"
            self._print(f"step {metrics.step:5}  held-out loss {metrics.held_out_loss:.4f}{words}")
        if metrics.sample is not None:
            self._print(f"step {metrics.step:5}  sample: {metrics.sample!r}")

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()
