"""Kept: how many checkpoints a run keeps."""

from __future__ import annotations

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


def kept(config: Config, first_step: int) -> int:
    """Returns how many checkpoints a run has at the same time, at most.

    The one that is written counts, since an older one is removed only after it.
    """
    train = config.train
    steps = [s for s in range(first_step, train.steps + 1) if train.saves_after(s)]
    last = steps[-train.keep_last - 1 :]
    every = train.keep_every
    return len(last) + sum(every is not None and s % every == 0 for s in steps[: -len(last)])
