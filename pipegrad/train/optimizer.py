"""The optimizer of a rank, its learning-rate schedules, and the update at the end of a step."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from pipegrad.errors import StepError
from pipegrad.gradients.grad_scaler import GradScaler
from pipegrad.gradients.norm import NonFinite, in_a_sentence
from pipegrad.gradients.sync import GradientSync
from pipegrad.plugins.registry import closest_first, complaints_of
from pipegrad.train.config import Config
from pipegrad.train.schema import LearningRate, Named

# Classes of torch that no configuration can name, and why.
_IN_A_ROW = "it cannot be given by name and plain options: list others in a row"
_UNFIT = {
    "LBFGS": "it evaluates the loss itself: choose a first-order one",
    **dict.fromkeys(("ReduceLROnPlateau", "SequentialLR", "ChainedScheduler"), _IN_A_ROW),
}
MOST_SKIPPED = 100  # steps in a row: a run that only skips ends in nothing


def make_optimizer(
    config: Config, make: Callable[..., torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """Returns the configured optimizer.

    Args:
        config: The configuration.
        make: Takes a class of torch.optim, options, and `others` if they are set, and returns an
            optimizer; see `GradientSync.optimizer`.

    Raises:
        ConfigError: If torch has no such optimizer, or if it does not take these options.
    """
    choice = config.optimizer
    kind, others = kinds(config)
    names = choice.name if choice.others is None else f"{choice.name} with {choice.others.name}"
    beside = {} if others is None else {"others": others}
    # torch checks values of options itself, with many kinds of errors.
    with config.refusing("optimizer", f"{names} will not take that: ", say=str):
        return make(kind, **beside, **choice.options)


def kinds(config: Config) -> tuple[type, Callable[..., torch.optim.Optimizer] | None]:
    """Returns the class of the optimizer, and the factory of the others' optimizer, if any.

    Raises:
        ConfigError: If torch has no such optimizer, or if it does not take these options.
    """
    choice = config.optimizer
    kind = _kind(config, "optimizer", choice)
    if choice.others is None:
        of_vectors, others = kind, None
    else:
        of_vectors = _kind(config, "optimizer.others", choice.others)
        others = partial(of_vectors, **choice.others.options)
    # An option without effect is an error, because the user believes that it works.
    decay = "weight_decay" in inspect.signature(of_vectors).parameters
    if not (choice.decay_norms_and_biases or decay):
        name = of_vectors.__name__
        config.refuse("optimizer.decay_norms_and_biases", f"{name} has no weight decay")
    return kind, others


def _kind(config: Config, key: str, choice: Named) -> type:
    """Returns a class of torch.optim that takes the options of a choice."""
    kind = _class_of(config, key, torch.optim, torch.optim.Optimizer, choice)
    for option, value in choice.options.items():
        is_flag = option == "lr" and isinstance(value, bool)  # Python would count it as a number
        if is_flag or (isinstance(value, float) and not math.isfinite(value)):
            config.refuse(f"{key}.{option}", "should be a finite number")
    return kind


def _class_of(config: Config, key: str, module: Any, base: type, choice: Named) -> type:  # noqa: ANN401
    """Returns the class of a module of torch that a choice names, if it takes these options."""
    classes = {n: c for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, base)}
    known = {n: c for n, c in classes.items() if c is not base and not n.startswith("_")}
    if choice.name not in known:
        hint = f"known, closest first: {closest_first(choice.name, known)}"
        config.refuse(f"{key}.name", f"{module.__name__} has none; {hint}")
    if complaint := _UNFIT.get(choice.name):
        config.refuse(f"{key}.name", complaint)
    kind: type = known[choice.name]
    if complaint := complaints_of(kind, choice.options, given=("params", "optimizer")):
        config.refuse(key, f"{choice.name} {complaint}")
    return kind


def try_out_optimizer(config: Config, device: torch.device | str) -> None:
    """Makes a step of the optimizer, and some of its learning rate, on small matrices.

    Raises:
        ConfigError: If torch accepts options and fails with them later. It names the part.
    """
    choice = config.optimizer
    if choice.others is not None:
        _step(config, "optimizer.others", choice.others, device)
    optimizer = _step(config, "optimizer", choice, device)
    make_learning_rate(config, optimizer)
    left = config.train.steps
    for index, schedule in enumerate(choice.schedule):
        # In a row a schedule ends a step before the next one begins.
        last = left if schedule.steps is None else min(left, schedule.steps - 1)
        _try_out(config, _scheduler(config, index, schedule, optimizer), last)
        left -= schedule.steps or 0
        if left < 0:
            break


def _step(
    config: Config, key: str, part: Named, device: torch.device | str
) -> torch.optim.Optimizer:
    """Returns an optimizer that has made a step."""
    probe = nn.Parameter(torch.ones(2, 2, device=device))
    probe.grad = torch.ones_like(probe)
    kind = _kind(config, key, part)
    with config.refusing(key, f"{part.name} will not take that: ", say=str):
        optimizer: torch.optim.Optimizer = kind([probe], **part.options)
    with config.refusing(key, "its first step fails: "):
        optimizer.step()
    return optimizer


def _try_out(config: Config, schedule: LRScheduler, last: int) -> None:
    """Makes the first steps of a learning-rate schedule, and its last one, to find its errors."""
    words = f"fails within {config.train.steps} steps: "
    with config.refusing("optimizer.schedule", words), warnings.catch_warnings():
        advance(schedule, min(last, 2))
        warnings.simplefilter("ignore")  # torch would rather make all steps
        schedule.step(last)
    rate = float(schedule.optimizer.param_groups[0]["lr"])
    if not math.isfinite(rate):
        config.refuse("optimizer.schedule", f"comes to the learning rate {rate}")


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
    # Make all schedules first, because an error of one must come before an error of the list.
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


def advance(learning_rate: LRScheduler, num_steps: int) -> None:
    """Makes steps of a schedule without any of the optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the optimizer makes no step between them
        for _ in range(num_steps):
            learning_rate.step()


def _scheduler(
    config: Config, index: int, part: LearningRate, optimizer: torch.optim.Optimizer
) -> LRScheduler:
    key = f"optimizer.schedule[{index}]"
    kind = _class_of(config, key, lr_scheduler, LRScheduler, part)
    with config.refusing(key, "torch will not take that: "):
        scheduler: LRScheduler = kind(optimizer, **part.options)
    return scheduler


class Updated(NamedTuple):
    """The result of an update, the same on all ranks.

    Attributes:
        grad_norm: Norm of all gradients before clipping.
        learning_rate: The largest of all parameter groups.
        note: A line about a skipped step; None if it was not skipped, or if many before it were.
    """

    grad_norm: float
    learning_rate: float
    note: str | None = None


class Update:
    """Updates the parameters at the end of each step. Every rank must call it.

    Attributes:
        skipped: Steps of this run that changed nothing, because gradients were not finite.
    """

    def __init__(
        self,
        config: Config,
        sync: GradientSync,
        optimizer: torch.optim.Optimizer,
        learning_rate: LRScheduler | None,
        scaler: GradScaler | None = None,
    ) -> None:
        clip = config.gradients.clip_norm
        self.skipped = 0
        self._most_norm = math.inf if clip is None else clip
        self._skips = config.gradients.non_finite == "skip" or scaler is not None
        self._sync = sync
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._scaler = scaler
        self._in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint. All ranks have the same."""
        return {
            "skipped": self.skipped,
            "in_a_row": self._in_a_row,
            "scaler": {} if self._scaler is None else self._scaler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the state of a checkpoint. A run without a loss scale leaves the scale out."""
        self.skipped, self._in_a_row = state["skipped"], state["in_a_row"]
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])

    def follow(self, num_steps: int) -> None:
        """Makes the steps of the learning-rate schedule that were made before a checkpoint.

        It depends on their number alone. A skipped step was none for it.
        """
        if self._learning_rate is not None:
            advance(self._learning_rate, num_steps - self.skipped)

    def make(self, number: int) -> Updated:
        """Updates the parameters with the gradients of a step, or skips that on all ranks.

        Raises:
            StepError: If the gradients are not finite and are not to be skipped, or if too many
                steps in a row were. On all ranks, and parameters are unchanged.
        """
        norm = self._sync.clip_grad_norm_(self._most_norm).item()
        learning_rate = max(float(group["lr"]) for group in self._optimizer.param_groups)
        if not math.isfinite(norm):
            return Updated(norm, learning_rate, self._skip(number, norm))
        self._in_a_row = 0
        # Parameters are sent as soon as they are stepped. They arrive during the next forwards.
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._optimizer.zero_grad()
        if self._learning_rate is not None:
            self._learning_rate.step()
        return Updated(norm, learning_rate)

    def _skip(self, number: int, norm: float) -> str | None:
        """Drops the gradients; returns a line about it, or None if there were many before."""
        # All ranks come here, or none, because the norm has the same bits on all ranks.
        found = self._sync.non_finite()
        if not self._skips:
            raise _refusal(number, norm, found)
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= MOST_SKIPPED:
            raise _refusal(number, norm, found, in_a_row=self._in_a_row)
        lowered = ""
        if self._scaler is not None:
            self._scaler.update()  # clipping has looked for overflows
            lowered = f", and the loss scale is {self._scaler.get_scale():g} now"
        self._sync.drop_gradients()
        if self._in_a_row & (self._in_a_row - 1):  # a line for the 1st, 2nd, 4th, 8th ... in a row
            return None
        row = f", {self._in_a_row} in a row" if self._in_a_row > 1 else ""
        return f"skipped{row}: {in_a_sentence(found)}{lowered}"


def _refusal(
    number: int, norm: float, found: tuple[NonFinite, ...], *, in_a_row: int = 0
) -> StepError:
    skipped = f" after {in_a_row - 1} steps that were skipped for that" if in_a_row else ""
    return StepError(
        f"step {number}: the norm of the gradients is {norm}{skipped}: {in_a_sentence(found)}. "
        f"This update would destroy the parameters: lower optimizer.lr, set gradients.clip_norm, "
        f"warm up, look at what the handlers send, or leave out single steps by "
        f"gradients.non_finite = 'skip'"
    )
