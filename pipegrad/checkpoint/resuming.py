"""Resuming: continues a run from a checkpoint, after all ranks have verified it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from pipegrad.checkpoint.files import Files
from pipegrad.checkpoint.folders import find_checkpoint
from pipegrad.checkpoint.state import HANDLERS, OPTIMIZER, State
from pipegrad.comm.agreement import agree, agree_keeping
from pipegrad.errors import CheckpointError, MessageError, PlanError

_READ_SECONDS = 600.0  # timeout for the slowest rank to read its part
T = TypeVar("T")


class Resumed(NamedTuple):
    """Facts about a run, from its checkpoint.

    Attributes:
        step: Number of steps before it.
        run: Values of the run that wrote it, by name.
        notes: Lines about state that starts afresh.
    """

    step: int
    run: Mapping[str, str]
    notes: tuple[str, ...]


def resume(folder: str | Path | None, state: State, *, options: bool = True) -> Resumed:
    """Continues from a checkpoint of any layout. Every rank must call it, between two steps.

    For example, ``resume("runs/first", state).step`` is the number of steps before it. A checkpoint
    that is damaged or does not fit changes nothing, because all bytes are verified first.

    Args:
        folder: The checkpoint, or the folder of a run: then its newest checkpoint is taken. None,
            which `newest` returns for a new run, raises CheckpointError.
        state: The state of this rank, which gets the values of the checkpoint.
        options: True to take the options of the optimizer too, such as its learning rate.

    Raises:
        CheckpointError: If the checkpoint is damaged, cannot be read, or is of another version,
            model or optimizer; on all ranks.
    """
    if folder is None:
        raise CheckpointError("there is no checkpoint to resume from: begin with step 0 instead")
    rank, num_ranks, named = dist.get_rank(), dist.get_world_size(), Path(folder)
    # The first rank decides for all, because the folder of a run may change at any time.
    folder = Path(agree("the checkpoint", lambda: str(find_checkpoint(named)))[0])
    # Checks go from cheap to expensive. Parameters change only after all checks have passed on all
    # ranks, because a refused checkpoint must leave no rank half loaded.
    files = _together(folder, lambda: Files(folder))
    _together(folder, lambda: files.verify(rank, num_ranks))
    keys = {key for of_rank in agree("the model", lambda: list(state.tensors())) for key in of_rank}
    _together(folder, lambda: state.check(files, keys))
    is_other_layout = files.index.layout != state.layout
    extra_keys = [key for key in files.index.tensors if key.startswith("extra.")]
    has_handlers = any(key.endswith(f".{HANDLERS}") for key in extra_keys)

    def read() -> tuple[dict[str, Any], Any]:
        names = [*state.extra, *[OPTIMIZER] * (state.optimizer is not None)]
        names += [HANDLERS] * (not is_other_layout)
        extra = {name: state.read_extra(files, name) for name in names}
        state.check_optimizer(extra.get(OPTIMIZER), options=options)
        return extra, state.read(files)

    extra, (tensors, values) = _together(folder, read)
    state.load(tensors, values, extra.get(OPTIMIZER) if options else None)

    def load_extra() -> None:
        for name, each in state.extra.items():
            try:
                if extra[name] is not None:
                    each.load_state_dict(extra[name])
            except Exception as error:
                raise CheckpointError(
                    f"has another kind of state of {name!r}: {error!r}"
                ) from error

    _together(folder, load_extra)
    # All ranks go on with their error feedback, or none, because it would be wrong on some alone.
    reason = "it is of another plan, as the layout is another one" * (
        has_handlers and is_other_layout
    )
    try:
        state.source.load_state_dict(extra.get(HANDLERS) or {})
    except PlanError as error:
        reason = str(error)
    if reason and state.sync.plan.independent_axes:
        raise CheckpointError(
            f"{folder} replicas that train alone cannot go on: {reason}; choose the layout, the "
            f"handlers and the bucket_bytes of the run that wrote it"
        )
    notes = [
        f"{name!r} starts afresh: it is not saved" for name in state.extra if extra[name] is None
    ]
    notes += [f"error feedback starts afresh: {reason}"] if reason else []
    return Resumed(files.index.step, files.index.run, tuple(notes))


def _together(folder: Path, function: Callable[[], T]) -> T:
    """Calls a function on all ranks; returns the result of this rank.

    Raises:
        CheckpointError: The first one of all ranks; on all ranks.
    """

    def complain() -> tuple[T | None, str]:
        try:
            return function(), ""
        except (CheckpointError, MessageError) as error:
            return None, str(error)

    # One rank alone may find damage, as on another machine.
    result, complaints = agree_keeping("the checkpoint", complain, timeout_seconds=_READ_SECONDS)
    if complaint := min(filter(None, complaints), default=""):
        raise CheckpointError(f"{folder} {complaint}")
    return result  # type: ignore[return-value]  # without a complaint there is one
