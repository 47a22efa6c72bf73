"""The uncut model of a rank that trains some of its stages: its other layers stay as they were."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NoReturn, Self

from torch import nn

from pipegrad.errors import StepError


class _Refusal:
    """A hook that refuses what would read layers of other ranks.

    Args:
        model: The uncut model. Its copies, and the modules of its stages, may run.
        words: Why, and what to do.
    """

    def __init__(self, model: nn.Module, words: str) -> None:
        self._model = weakref.ref(model)
        self._words = words

    def __call__(self, module: nn.Module, *_: object) -> None:
        """Raises StepError if it is the uncut model."""
        if module is self._model():
            raise StepError(self._words)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:  # torch.save(model)
        raise StepError(self._words)


def refuse_uncut(model: nn.Module, held: Sequence[int]) -> None:
    """Makes a model refuse to run and to be saved.

    Args:
        model: The uncut model.
        held: The stages of this rank.
    """
    refusal = _Refusal(
        model,
        f"the {type(model).__name__} was cut, and this rank trains its stage "
        f"{', '.join(map(str, held))} alone: the other layers are trained on other ranks, and are "
        f"here as they were before. Train by scheduler.step(), evaluate by scheduler.evaluate(), "
        f"and save the stages of every rank: here cut.modules[{held[0]}].state_dict()",
    )
    # The modules of stages have the same tables of hooks.
    for table in ("_forward_pre_hooks", "_state_dict_pre_hooks"):
        setattr(model, table, getattr(model, table).copy())
    model.register_forward_pre_hook(refusal)
    model.register_state_dict_pre_hook(refusal)
