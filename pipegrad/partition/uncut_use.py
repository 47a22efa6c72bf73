"""Makes the uncut model raise on a rank that trains only some of its stages.

Its other layers keep their old values, because other ranks train them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import NoReturn, Self

from torch import nn

from pipegrad.errors import StepError
from pipegrad.model.wrappers import is_imported_kind

# Methods of peft that would exchange modules that stages share.
_MERGING = ("merge_adapter", "unmerge_adapter", "merge_and_unload", "unload")


class _Refusal:
    """A hook that raises before code reads layers of other ranks."""

    def __init__(self, module: nn.Module, words: str) -> None:
        self._module = weakref.ref(module)
        self._words = words

    def __call__(self, module: nn.Module, *_: object) -> None:
        """Raises StepError if `module` is the uncut model's own, and not a copy of it."""
        if module is self._module():
            raise StepError(self._words)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:  # torch.save(model)
        raise StepError(self._words)


def refuse_uncut(
    model: nn.Module, stages: Mapping[int, nn.Module], held: Sequence[int], *, is_saved: bool
) -> None:
    """Makes the forward and the ``state_dict`` of a model raise, as a whole and module by module.

    Modules with layers of other ranks raise, too, because tools go past the outer model: peft's
    ``generate`` runs the model inside of it.

    Args:
        model: The uncut model.
        stages: All stages.
        held: Indices of this rank's stages.
        is_saved: True if ``save_pretrained`` of the cut writes the model.
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
