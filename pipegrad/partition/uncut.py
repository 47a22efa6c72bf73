"""The uncut model of a rank that trains some of its stages: its other layers stay as they were."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import nn

from pipegrad.errors import StepError


def refuse_uncut(model: nn.Module, held: Sequence[int]) -> None:
    """Makes a model refuse to run and to be saved.

    Args:
        model: The uncut model.
        held: The stages of this rank.
    """
    numbers = ", ".join(map(str, held))
    why = (
        f"the {type(model).__name__} was cut, and this rank trains its stage {numbers} alone: the "
        f"other layers are trained on other ranks, and are here as they were before. "
    )
    whole = weakref.ref(model)

    def refusing(advice: str) -> Callable[..., None]:
        def refuse(module: nn.Module, *_: object) -> None:
            if module is whole():
                raise StepError(why + advice)

        return refuse

    # The modules of stages have the same tables of hooks, and may run.
    for table in ("_forward_pre_hooks", "_state_dict_pre_hooks"):
        setattr(model, table, getattr(model, table).copy())
    model.register_forward_pre_hook(
        refusing("To train, call scheduler.step(); to evaluate, scheduler.evaluate()")
    )
    model.register_state_dict_pre_hook(
        refusing(f"Each rank saves its own stages: here cut.modules[{held[0]}].state_dict()")
    )
