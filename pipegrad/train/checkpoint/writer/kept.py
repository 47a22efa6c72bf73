"""Kept: how many checkpoints a run keeps."""

from __future__ import annotations

from collections.abc import Sequence

from pipegrad.train.config import Config


def check_kept(config: Config) -> None:
    """Refuses keys of ``[train]`` about checkpoints that have no effect.

    Raises:
        ConfigError: For the first of them.
    """
    train = config.train
    if not train.save:
        for name in ("save_every", "keep_last", "keep_every"):
            if name in train.model_fields_set and getattr(train, name) is not None:
                config.refuse(f"train.{name}", "has no effect: train.save = false saves nothing")
    if train.keep_every is not None and train.save_every is None:
        config.refuse("train.keep_every", "has no effect without train.save_every")
    if train.keep_every is not None and train.keep_every % (train.save_every or 1):
        config.refuse(
            "train.keep_every",
            f"should be a multiple of train.save_every, {train.save_every}: no checkpoint is "
            f"written after other steps",
        )


def num_new(config: Config, first_step: int, present: Sequence[int] = ()) -> int:
    """Returns for how many checkpoints more than now a run needs room, at most.

    The one that is written counts, since an older one is removed only after it.

    Args:
        config: The configuration.
        first_step: Number of the first step that is made.
        present: Steps of the checkpoints that are there.
    """
    train = config.train
    new = [s for s in range(first_step, train.steps + 1) if train.saves_after(s)]
    if not new:
        return 0
    steps = [*sorted(step for step in present if step < first_step), *new]
    last = steps[-train.keep_last - 1 :]
    every = train.keep_every
    kept = sum(every is not None and s % every == 0 for s in steps[: -len(last)])
    # The first one is written before any older one is removed.
    return max(1, len(last) + kept - len(present))
