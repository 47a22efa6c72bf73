"""What the tests of the trainer share: a small job in a folder, and how a rank runs it."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler

from pipegrad.cli import main
from pipegrad.errors import PipegradError
from pipegrad.train.config import load
from pipegrad.train.loop import Trainer
from pipegrad.train.reporters.reporter import StepMetrics
from tests.support.ranked import gathered

SMALL = """
[model]
factory = "factories:tied"
[data]
batch_size = 8
sequence_length = 16
[train]
device = "cpu"
steps = 12
"""
EXAMPLES = Path(__file__).parents[3] / "examples"


def with_job(folder: Path, name: str = "small.toml", text: str = SMALL) -> Path:
    """Writes a job, and the modules that jobs can name, into a folder; returns the folder."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    for module in ("factories.py", "data_functions.py"):
        (folder / module).write_text(Path(__file__).with_name(module).read_text())
    (folder / "prepared.py").write_text((EXAMPLES / "prepared.py").read_text())
    return folder


class Trained(NamedTuple):
    """What a rank knows of a job that it trained: metrics, its tensors by name, notes."""

    steps: list[StepMetrics]
    values: dict[str, Tensor]
    notes: tuple[str, ...]

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    def goes_on(self, first: Trained, second: Trained) -> None:
        """Raises unless this run is the other two, one after the other, to the bit."""
        assert first.losses + second.losses == self.losses
        assert self.values.keys() == second.values.keys()
        assert [k for k in self.values if not torch.equal(self.values[k], second.values[k])] == []


def started(factory: Callable[[], nn.Module]) -> nn.Module:
    """Returns the uncut model of a factory, with the values with which jobs of seed 0 start it."""
    torch.manual_seed(0)
    return factory()


def by_hand(
    batches: Iterable[Any],
    loss_of: Callable[[Any], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    clip: float = math.inf,
    schedule: LRScheduler | None = None,
) -> list[tuple[float, float]]:
    """Trains an uncut model in one process; returns loss and gradient norm of each step."""
    found, parameters = [], [p for group in optimizer.param_groups for p in group["params"]]
    for batch in batches:
        loss = loss_of(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        found.append((loss.item(), norm.item()))
    return found


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def trainer_of(job: Path, *settings: str) -> Trainer:
    """Returns the trainer of a job; every rank must call it in the folder of the job."""
    return Trainer(partial(load, job, settings))


def trained(job: Path, *settings: str, until: int, save: str = "") -> Trained:
    """Trains a job, in its folder, until a step, and saves it there; every rank must call it."""
    [run] = trained_to(job, *settings, ends=[until], saves={until: save} if save else {})
    return run


def trained_to(
    job: Path, *settings: str, ends: Sequence[int], saves: Mapping[int, str]
) -> list[Trained]:
    """Trains a job as `trained`; returns what is known at several steps, and saves at some."""
    found, steps = [], list[StepMetrics]()
    with contextlib.chdir(job.parent):
        trainer = trainer_of(job, *settings)
        for end in ends:
            steps += [trainer.step(n) for n in range(trainer.first_step + len(steps), end + 1)]
            if end in saves:
                trainer.saving.write(saves[end], end)
            trainer.sync.wait_parameters()
            values = {name: tensor.clone() for name, tensor in trainer._state.tensors().items()}
            found.append(Trained([*steps], values, trainer.notes))
        trainer.close()
    return found


def refusal(job: Path, *settings: str, until: int = 1, save: str = "") -> str:
    """Returns in which words a job is refused, the same on every rank."""
    with pytest.raises(PipegradError) as caught:
        trained(job, *settings, until=until, save=save)
    said = gathered(str(caught.value))
    assert len(set(said)) == 1, said
    return said[0]


def command(*words: str) -> tuple[object, str]:
    """Returns the exit code of the command line, and what it prints."""
    printed, code = io.StringIO(), None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = main([*words], standalone_mode=False)
        except SystemExit as ended:
            code = ended.code
    return code, printed.getvalue()
