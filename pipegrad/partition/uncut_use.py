"""The uncut model of a rank that trains some of its stages: its other layers stay as they were."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import NoReturn, Self

from torch import nn

from pipegrad.errors import StepError
from pipegrad.model.wrappers import is_imported_kind

# Of peft: they would exchange what stages share.
_MERGING = ("merge_adapter", "unmerge_adapter", "merge_and_unload", "unload")


class _Refusal:
    """A hook that refuses what would read layers of other ranks."""

    def __init__(self, module: nn.Module, words: str) -> None:
        self._module = weakref.ref(module)
        self._words = words

    def __call__(self, module: nn.Module, *_: object) -> None:
        """Raises StepError if it is the module of the uncut model."""
        if module is self._module():
            raise StepError(self._words)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:  # torch.save(model)
        raise StepError(self._words)


def refuse_uncut(
    model: nn.Module, stages: Mapping[int, nn.Module], held: Sequence[int], *, is_saved: bool
) -> None:
    """Makes a model refuse to run and to give its state, as a whole and module by module.

    Tools go past the model itself: peft's ``generate`` runs the model inside of it.

    Args:
        model: The uncut model.
        stages: All stages.
        held: The stages of this rank.
        is_saved: Whether ``save_pretrained`` of the cut writes it.
    """
    save = (
        "save by cut.save_pretrained(), and generate from what it wrote"
        if is_saved
        else f"save the stages of every rank: here cut.modules[{held[0]}].state_dict()"
    )
    words = (
        f"the {type(model).__name__} was cut, and this rank trains its stage "
        f"{', '.join(map(str, held))} alone: the other layers are trained on other ranks, and are "
        f"here as they were before. Train by scheduler.step(), evaluate by scheduler.evaluate(), "
        f"and {save}"
    )
    here = {id(p) for stage in held for p in stages[stage].parameters()}

    def refuse(*_: object, **__: object) -> NoReturn:
        raise StepError(words)

    for module in model.modules():
        if is_imported_kind(module, "peft.tuners.tuners_utils", "BaseTuner"):
            vars(module).update(dict.fromkeys(_MERGING, refuse))
        if module is model or any(id(p) not in here for p in module.parameters()):
            refusal = _Refusal(module, words)
            module.register_forward_pre_hook(refusal)
            module.register_state_dict_pre_hook(refusal)
