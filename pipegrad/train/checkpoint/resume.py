"""Resume: continues a run from a checkpoint, after all ranks have verified it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from pipegrad.comm.agreement import agree, agree_keeping
from pipegrad.errors import PlanError
from pipegrad.pipeline.scheduler import Scheduler
from pipegrad.train.checkpoint.storage import (
    Contents,
    DamageError,
    damage_of,
    damaged,
    failure_message,
    read_contents,
    step_of,
)
from pipegrad.train.checkpoint.training_state import TrainingState
from pipegrad.train.config import Config, path_of

_VERIFY_SECONDS = 600.0  # timeout for the slowest rank to read its pieces


def resume(
    config: Config,
    state: TrainingState,
    scheduler: Scheduler,
    folder: Path,
    *,
    state_names: Sequence[set[str]],
    run: Mapping[str, str],
) -> tuple[int, list[str]]:
    """Loads a checkpoint; returns the number of its step, and notes. Every rank must call it.

    Args:
        config: The configuration.
        state: The state of this rank, which takes the values of the checkpoint.
        scheduler: Takes the state of handlers and codecs.
        folder: The checkpoint.
        state_names: Names of the state that each part of the optimizer keeps for a matrix.
        run: Values of this run, as text.

    Raises:
        ConfigError: If the checkpoint is damaged, cannot be read, or is of another model; on all
            ranks.
    """
    # Checks go from cheap to expensive. Parameters change only when all checks have passed on all
    # ranks, so a refused checkpoint leaves no rank half loaded.
    contents = _verified(config, folder)
    keys = {key for of_rank in agree("the model", lambda: list(state.tensors())) for key in of_rank}
    agree("the checkpoint", lambda: state.check(config, contents, state_names, keys))
    try:
        num_steps = state.load(folder, contents)
        state.restore(num_steps)
    except CheckpointException as error:
        complaint = f"{_named(config, folder)}cannot be read: {failure_message(error)}"
        config.refuse("train.resume", complaint.partition("\n")[0], cause=error)
    except DamageError as error:
        complaint = f"{_named(config, folder)}{damage_of([str(error)])}"
        config.refuse("train.resume", complaint, cause=error)
    if step_of(folder) not in (None, num_steps):
        config.refuse(
            "train.resume",
            f"{_named(config, folder)}is the checkpoint of step {num_steps} by what it has: give "
            f"the folder the name checkpoint-{num_steps} again",
        )
    notes = _differences(contents.run, run)
    return num_steps, [*notes, *_resume_handlers(config, state, scheduler)]


def _differences(saved: Mapping[str, str], run: Mapping[str, str]) -> list[str]:
    """Returns a note on differences between this run and the one that wrote a checkpoint."""
    changed = [
        f"{key} was {saved.get(key, '(default)')}, and is {run.get(key, '(default)')}"
        for key in sorted(saved.keys() | run.keys())
        # A checkpoint of an older version lacks keys that are new. They had no value then.
        if saved.get(key, "None") != run.get(key, "None")
    ]
    words = "train.resume: this is not the run that wrote the checkpoint: "
    return [words + "; ".join(changed)] if changed else []


def _verified(config: Config, folder: Path) -> Contents:
    """Returns what a checkpoint has; refuses, on all ranks, what a rank finds damaged."""

    def read() -> tuple[Contents | None, str]:
        try:
            return read_contents(folder), ""
        except DamageError as error:
            return None, str(error)

    # One rank alone may find the damage, as on another machine.
    contents, complaints = agree_keeping("the checkpoint", read, timeout_seconds=_VERIFY_SECONDS)
    complaint = min(filter(None, complaints), default="")
    if contents is not None and not complaint:
        # All ranks together read each file once.
        mine = list(contents.checksums.items())[dist.get_rank() :: dist.get_world_size()]
        replies = agree(
            "the checksums", lambda: damaged(folder, mine), timeout_seconds=_VERIFY_SECONDS
        )
        messages = sorted({message for of_rank in replies for message in of_rank})
        complaint = damage_of(messages) if messages else ""
    if complaint:
        config.refuse("train.resume", f"{_named(config, folder)}{complaint}")
    assert contents is not None
    return contents


def _named(config: Config, folder: Path) -> str:
    """Returns the folder for a message, unless the value of the key is the folder."""
    return "" if folder == path_of(config.train.resume or "") else f"{folder}: "


def _resume_handlers(config: Config, state: TrainingState, scheduler: Scheduler) -> list[str]:
    """Restores the state of handlers and codecs on all ranks, or on none; returns notes.

    Raises:
        ConfigError: If it cannot be restored, and replicas train alone: the state has the
            parameters of each of them.
    """
    # Error feedback of some ranks alone would be wrong. So if one rank cannot read its part, all
    # ranks start without.
    handler_state, replies = agree_keeping("the state of handlers", state.handler_state)
    reasons = [reason for reason in replies if reason]
    try:
        scheduler.load_state_dict({} if reasons else handler_state)
    except PlanError as error:
        reasons = [str(error)]
    if reasons and scheduler.sync.plan.independent_axes:
        config.refuse(
            "train.resume",
            f"replicas that train alone cannot go on: {reasons[0]}; choose the [parallel], the "
            f"gradient_handlers and the gradients.bucket_bytes of the run that wrote it",
        )
    return [f"train.resume: error feedback starts afresh: {reasons[0]}"] if reasons else []
