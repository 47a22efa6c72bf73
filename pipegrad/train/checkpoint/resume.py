"""Resume: continues a run from a checkpoint, after all ranks have verified it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from pipegrad.comm.agreement import agree
from pipegrad.errors import PlanError
from pipegrad.pipeline.scheduler import Scheduler
from pipegrad.train.checkpoint.checkpoint import TrainingState
from pipegrad.train.checkpoint.checksums import Checksums, DamageError, ReadError
from pipegrad.train.checkpoint.folders import step_of
from pipegrad.train.checkpoint.validate import damage_of, read_metadata, verify
from pipegrad.train.checkpoint.writer.saver import failure_message
from pipegrad.train.config import Config, path_of

_VERIFY_SECONDS = 600.0  # timeout for the slowest rank to read its pieces


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from.

    Attributes:
        num_steps: How many steps the checkpoint has made.
        folder: Of the checkpoint.
        notes: For the user.
        damaged: Newer checkpoints, which are damaged.
    """

    num_steps: int
    folder: Path
    notes: tuple[str, ...]
    damaged: tuple[Path, ...]


def resume(
    config: Config,
    state: TrainingState,
    scheduler: Scheduler,
    folders: Sequence[Path],
    *,
    state_names: Sequence[set[str]],
    run: Mapping[str, str],
) -> Resumed:
    """Loads a checkpoint; every rank must call it.

    Args:
        config: The configuration.
        state: The state of this rank, which takes the values of the checkpoint.
        scheduler: Takes the state of handlers and codecs.
        folders: The checkpoint, and those before it. They are read only with ``train.fallback``, if
            the first is damaged.
        state_names: Names of the state that each part of the optimizer keeps for a matrix.
        run: Values of this run, as text.

    Raises:
        ConfigError: If the checkpoint is damaged, cannot be read, or is of another model; on all
            ranks.
    """
    # Checks go from cheap to expensive. Parameters change only when all checks have passed on all
    # ranks, so a refused checkpoint leaves no rank half loaded.
    folder, metadata, checksums, notes = _first_whole(config, folders)
    damaged = tuple(folders[: folders.index(folder)])
    keys = {key for own in agree("what is held", state.keys) for key in own}
    agree("the checkpoint", lambda: state.check(config, metadata, state_names, keys))
    notes += _differences(checksums, run)
    try:
        num_steps = state.load(folder, metadata)
        notes += state.restore(num_steps)
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
    notes += _resume_handlers(config, state, scheduler)
    return Resumed(num_steps, folder, tuple(notes), damaged)


def _first_whole(
    config: Config, folders: Sequence[Path]
) -> tuple[Path, Metadata, Checksums, list[str]]:
    """Returns the first checkpoint that is whole, what it has, and notes on those before it."""
    notes = list[str]()
    for folder, before in zip(folders, [*folders[1:], None], strict=True):
        read: list[tuple[Metadata, Checksums]] = []
        try:
            complaint = _damage(folder, read)
        except ReadError as error:
            config.refuse(
                "train.resume",
                f"{error}: this says nothing of its bytes, so no older checkpoint is taken: make "
                f"the file readable, or name another checkpoint",
                cause=error,
            )
        if not complaint:
            return folder, *read[0], notes
        if not config.train.fallback or before is None:
            more = "" if before is None else "; or set train.fallback = true"
            config.refuse("train.resume", f"{_named(config, folder)}{complaint}{more}")
        notes.append(f"train.resume: {folder} {complaint}; this run goes on from {before}")
    raise AssertionError("there is a checkpoint to read")


def _damage(folder: Path, read: list[tuple[Metadata, Checksums]]) -> str:
    """Verifies a checkpoint on all ranks; returns the damage, the same on all ranks, or "".

    Args:
        folder: The checkpoint.
        read: Takes its metadata and checksums.

    Raises:
        ReadError: If a rank cannot read it; on all ranks.
    """

    def complaint() -> list[str]:
        try:
            read.append(read_metadata(folder))
        except DamageError as error:
            return [str(error)]
        return []

    # One rank alone may find the damage, as on another machine.
    if complaints := _of_all_ranks("the checkpoint", complaint):
        return complaints[0]
    checksums = read[0][1]
    messages = _of_all_ranks("the checksums", lambda: verify(folder, checksums))
    return damage_of(messages) if messages else ""


def _of_all_ranks(what: str, check: Callable[[], list[str]]) -> list[str]:
    """Returns the messages of all ranks about a checkpoint, each once.

    Raises:
        ReadError: If a rank cannot read it; on all ranks.
    """

    def caught() -> tuple[list[str], str]:
        try:
            return check(), ""
        except ReadError as error:
            return [], str(error)

    replies = agree(what, caught, timeout_seconds=_VERIFY_SECONDS)
    if unreadable := [message for _, message in replies if message]:
        raise ReadError(unreadable[0])
    return sorted({message for messages, _ in replies for message in messages})


def _named(config: Config, folder: Path) -> str:
    """Returns the folder for a message, unless the value of the key is the folder."""
    return "" if folder == path_of(config.train.resume or "") else f"{folder}: "


def _differences(checksums: Checksums, run: Mapping[str, str]) -> list[str]:
    """Returns notes on differences between this run and the one that wrote a checkpoint."""
    saved = checksums.run
    changed = [
        f"{key} was {saved.get(key, '(default)')}, and is {run.get(key, '(default)')}"
        for key in sorted(saved.keys() | run.keys())
        # A checkpoint of an older version lacks keys that are new. They had no value then.
        if saved.get(key, "None") != run.get(key, "None")
    ]
    if not changed:
        return []
    return [f"train.resume: this is not the run that wrote the checkpoint: {'; '.join(changed)}"]


def _resume_handlers(config: Config, state: TrainingState, scheduler: Scheduler) -> list[str]:
    """Restores what handlers and codecs kept on all ranks, or on none; returns notes.

    Raises:
        ConfigError: If it cannot be restored, and replicas train alone: the state has the
            parameters of each of them.
    """
    # Error feedback of some ranks alone would be wrong. So if one rank cannot read its own, all
    # ranks start without.
    replies = agree("what handlers kept", state.unpack_handler_state)
    reasons = [reason for reason in replies if reason]
    try:
        scheduler.load_state_dict({} if reasons else state.handler_state)
    except PlanError as error:
        reasons = [str(error)]
    if reasons and scheduler.sync.plan.independent_axes:
        config.refuse(
            "train.resume",
            f"replicas that train alone cannot go on: {reasons[0]}; choose the [parallel], the "
            f"gradient_handlers and the gradients.bucket_bytes of the run that wrote it",
        )
    return [f"train.resume: error feedback starts afresh: {reasons[0]}"] if reasons else []
