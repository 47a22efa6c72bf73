"""Resume: continues a run from a checkpoint, after all ranks have verified it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from pipegrad.comm.agreement import agree
from pipegrad.errors import PlanError, in_words
from pipegrad.gradients.sync import GradientSync
from pipegrad.train.checkpoint.checkpoint import TrainingState
from pipegrad.train.checkpoint.checksums import CHECKSUMS, Checksums
from pipegrad.train.checkpoint.validate import refuse_damaged, verify
from pipegrad.train.config import Config, path_of

_VERIFY_SECONDS = 600.0  # timeout for the slowest rank to read its pieces


def resume(
    config: Config,
    state: TrainingState,
    sync: GradientSync,
    *,
    state_names: set[str],
    run: Mapping[str, str],
) -> tuple[int, list[str]]:
    """Loads the checkpoint ``train.resume``; every rank must call it.

    Args:
        config: The configuration.
        state: The state of this rank, which takes the values of the checkpoint.
        sync: The gradient layer, which takes the state of handlers.
        state_names: Names of the state that the optimizer keeps for a matrix.
        run: Values of this run, as text.

    Returns:
        How many steps the checkpoint has made, and notes for the user.

    Raises:
        ConfigError: If the checkpoint is damaged, cannot be read, or is of another model; on all
            ranks.
    """
    # Checks go from cheap to expensive. Parameters change only when all checks have passed on all
    # ranks, so a refused checkpoint leaves no rank half loaded.
    keys = {key for own in agree("what is held", state.keys) for key in own}
    folder = path_of(config.train.resume or "")
    metadata, checksums = agree("the checkpoint", lambda: state.check(config, state_names, keys))[0]
    notes = _verify(config, folder, checksums, run)
    try:
        num_steps = state.load(folder, metadata)
    except CheckpointException as error:
        config.refuse("train.resume", f"cannot be read: {failure_message(error)}", cause=error)
    return num_steps, [*notes, *_resume_handlers(state, sync)]


def _verify(
    config: Config, folder: Path, checksums: Checksums | None, run: Mapping[str, str]
) -> list[str]:
    """Refuses a checkpoint whose bytes have changed; returns notes on differences of this run."""
    if checksums is None:
        note = f"train.resume: {folder} has no {CHECKSUMS}, so its bytes were not verified: "
        return [f"{note}an older version wrote it, or the file was removed"]
    replies = agree(
        "the checksums", lambda: verify(folder, checksums), timeout_seconds=_VERIFY_SECONDS
    )
    if messages := sorted({message for of_rank in replies for message in of_rank}):
        refuse_damaged(config, messages)
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


def _resume_handlers(state: TrainingState, sync: GradientSync) -> list[str]:
    """Restores the state of the handlers of all ranks, or of none; returns notes."""
    # Error feedback of some ranks alone would be wrong. So if one rank cannot read its own, all
    # ranks start without.
    replies = agree("what handlers kept", state.unpack_handler_state)
    reasons = [reason for reason in replies if reason]
    try:
        sync.load_state_dict({} if reasons else state.handler_state)
    except PlanError as error:
        reasons = [str(error)]
    return [f"train.resume: error feedback starts afresh: {reasons[0]}"] if reasons else []


def failure_message(error: CheckpointException) -> str:
    """Returns the message of the first rank that failed.

    Raises:
        KeyboardInterrupt: If that rank was interrupted.
    """
    rank, (cause, _) = min(error.failures.items(), key=lambda failed: failed[0])
    if isinstance(cause, KeyboardInterrupt):
        raise cause from error
    return f"rank {rank}: {in_words(cause)}"
