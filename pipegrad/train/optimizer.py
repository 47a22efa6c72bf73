"""The optimizer of a rank and its learning-rate schedules, by torch's names."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from pipegrad.plugins.options import closest_first, complaints_of
from pipegrad.train.config import Config
from pipegrad.train.schema import LearningRate


def make_optimizer(
    config: Config, make: Callable[..., torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """Returns the configured optimizer.

    Args:
        config: The configuration.
        make: Takes a class of torch.optim and its options, and returns an optimizer.

    Raises:
        ConfigError: If torch has no such optimizer, or if it does not take these options.
    """
    choice = config.optimizer
    known = _classes(torch.optim, torch.optim.Optimizer)
    if choice.name not in known:
        config.refuse("optimizer.name", f"torch.optim has none; {_known(choice.name, known)}")
    if choice.name == "LBFGS":
        config.refuse("optimizer.name", "it evaluates the loss itself: choose a first-order one")
    kind = known[choice.name]
    if complaint := complaints_of(kind, choice.options, given=("params",)):
        config.refuse("optimizer", f"{choice.name} {complaint}")
    for option, value in choice.options.items():
        if option == "lr" and isinstance(value, bool):  # Python would count it as a number
            config.refuse("optimizer.lr", "should be a finite number")
        if isinstance(value, float) and not math.isfinite(value):
            config.refuse(f"optimizer.{option}", "should be a finite number")
    # An option that has no effect is an error: the user believes that it works.
    decay = "weight_decay" in inspect.signature(kind).parameters
    if not (choice.decay_norms_and_biases or decay):
        config.refuse("optimizer.decay_norms_and_biases", f"{choice.name} has no weight decay")
    # torch checks values of options itself, with many kinds of errors.
    try:
        optimizer = make(kind, **choice.options)
    except Exception as error:  # noqa: BLE001 - whatever torch says of an option
        config.refuse("optimizer", f"{choice.name} will not take that: {error}", cause=error)
    return optimizer


def state_numel(config: Config) -> int:
    """Returns how many elements the optimizer keeps for each element of a large parameter.

    It is measured by one step of a small matrix.
    """
    probe = nn.Parameter(torch.ones(8, 8))
    probe.grad = torch.ones_like(probe)
    optimizer = make_optimizer(config, lambda kind, **options: kind([probe], **options))
    try:
        optimizer.step()
    except Exception as error:  # noqa: BLE001 - whatever torch says of an option
        config.refuse("optimizer", f"its first step fails: {error!r}", cause=error)
    values = optimizer.state[probe].values()
    # What is smaller, such as a counter, does not grow with the parameter.
    return sum(torch.is_tensor(v) and v.numel() == probe.numel() for v in values)


def group_of(config: Config, _: str, parameter: nn.Parameter) -> dict[str, Any]:
    """Returns the options of a parameter's group: no weight decay for norms and biases, if set."""
    decays = config.optimizer.decay_norms_and_biases or parameter.ndim > 1
    return {} if decays else {"weight_decay": 0.0}


def make_learning_rate(config: Config, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """Returns the configured learning-rate schedules as one; None if none is configured.

    Raises:
        ConfigError: If torch has no such schedule, or if it does not take these options.
    """
    parts = config.optimizer.schedule
    if not parts:
        return None
    # All schedules are made first, so the error of a single schedule comes before that of the list.
    schedulers = [_scheduler(config, index, part, optimizer) for index, part in enumerate(parts)]
    for index, part in enumerate(parts):
        if (part.steps is None) != (index == len(parts) - 1):
            config.refuse(
                f"optimizer.schedule[{index}]",
                "every schedule but the last needs 'steps', and the last has none",
            )
    if len(schedulers) == 1:
        return schedulers[0]
    milestones = list(accumulate(part.steps or 0 for part in parts[:-1]))
    return SequentialLR(optimizer, schedulers, milestones)


def _scheduler(
    config: Config, index: int, part: LearningRate, optimizer: torch.optim.Optimizer
) -> LRScheduler:
    known = _classes(lr_scheduler, LRScheduler)
    key = f"optimizer.schedule[{index}]"
    if part.name not in known:
        hint = _known(part.name, known)
        config.refuse(key, f"torch.optim.lr_scheduler has none; {hint}")
    kind = known[part.name]
    if issubclass(kind, ReduceLROnPlateau | SequentialLR | lr_scheduler.ChainedScheduler):
        config.refuse(key, "it cannot be given by name and plain options: list others in a row")
    if complaint := complaints_of(kind, part.options, given=("optimizer",)):
        config.refuse(key, f"it {complaint}")
    try:
        scheduler: LRScheduler = kind(optimizer, **part.options)
    except Exception as error:  # noqa: BLE001 - whatever torch says of an option
        config.refuse(key, f"torch will not take that: {error!r}", cause=error)
    return scheduler


def _classes(module: Any, base: type) -> dict[str, Any]:  # noqa: ANN401 - modules, and their classes
    classes = {n: c for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, base)}
    return {name: c for name, c in classes.items() if c is not base and not name.startswith("_")}


def _known(name: str, known: dict[str, Any]) -> str:
    return f"known, closest first: {closest_first(name, known)}"
