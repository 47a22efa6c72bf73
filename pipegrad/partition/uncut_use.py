"""The uncut model of a rank that trains some of its stages: its other layers stay as they were."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any, NoReturn, Self

from torch import nn

from pipegrad.errors import StepError, level_of_caller
from pipegrad.partition.weights.adapter import refuse_merging

# Of transformers and peft. They write a configuration before they ask for values.
_SAVING = ("save_pretrained", "push_to_hub")


class _Refusal:
    """A hook that refuses what would read layers of other ranks.

    Args:
        modules: Those of the uncut model with such layers. Their copies, and the modules of stages,
            may run.
        words: Why, and what to do.
    """

    def __init__(self, modules: Iterable[nn.Module], words: str) -> None:
        self._modules = weakref.WeakSet(modules)
        self._words = words

    def __call__(self, module: nn.Module, *_: object) -> None:
        """Raises StepError if it is a module of the uncut model."""
        if module in self._modules:
            raise StepError(self._words)

    def forget(self, module: nn.Module) -> None:
        """Lets a module run: a stage of a later cut has it."""
        self._modules.discard(module)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:  # torch.save(model)
        raise StepError(self._words)


def refuse_uncut(
    model: nn.Module, stages: Mapping[int, nn.Module], held: Sequence[int], *, is_saved: bool
) -> None:
    """Makes a model refuse to run and to be saved, as a whole and module by module.

    Tools go past the model itself: peft's ``generate`` runs the model inside of it, and what
    ``merge_and_unload`` returns is that model.

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
    # Stages have twins of the modules around layers. What is inside of a layer they share.
    shared = {id(part) for stage in stages.values() for part in stage.modules()}
    here = {id(p) for stage in held for p in stages[stage].parameters()}
    for part in (part for stage in held for part in stages[stage].modules()):
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, _Refusal):  # of an earlier cut of the model
                hook.forget(part)
    modules = [
        module
        for module in model.modules()
        if module is model
        or (id(module) not in shared and any(id(p) not in here for p in module.parameters()))
    ]
    refusal = _Refusal(modules, words)
    for module in modules:
        # Twins have the same tables of hooks.
        for table in ("_forward_pre_hooks", "_state_dict_pre_hooks"):
            setattr(module, table, getattr(module, table).copy())
        module.register_forward_pre_hook(refusal)
        module.register_state_dict_pre_hook(refusal)
        for name in _SAVING:
            if method := getattr(type(module), name, None):
                vars(module)[name] = MethodType(_refusing(method, refusal), module)
    refuse_merging(model, words)


def _refusing(method: Callable[..., Any], refusal: _Refusal) -> Callable[..., Any]:
    """Returns a method that refuses before it writes, unless it is given the values to save."""

    @wraps(method)
    def refusing(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if kwargs.get("state_dict") is None:
            refusal(module)
        return method(module, *args, **kwargs)

    return refusing


@dataclass(frozen=True)
class _OtherStage:
    """Warns in one line of a state of another stage: torch lists all names, in strict mode alone.

    Attributes:
        stage: Of the module.
        names: Of the parameters of all stages.
    """

    stage: int
    names: tuple[frozenset[str], ...]

    def __call__(
        self, _: nn.Module, state: Mapping[str, object], prefix: str, *others: object
    ) -> None:
        """Warns if the state has all of another stage, and nothing that only this one has."""
        held = {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
        for stage, names in enumerate(self.names):
            only = self.names[self.stage] - names
            if names and names <= held and only and only.isdisjoint(held):
                warnings.warn(
                    f"the state has layers of stage {stage}, and this module is stage "
                    f"{self.stage}: load what a rank of stage {self.stage} has saved",
                    stacklevel=level_of_caller(),
                )
                return


def warn_of_other_stages(modules: Mapping[int, nn.Module]) -> None:
    """Makes the modules of stages warn when they load the parameters of another stage.

    Args:
        modules: Of all stages.
    """
    names = tuple(
        frozenset(name for name, _ in module.named_parameters(remove_duplicate=False))
        for module in modules.values()
    )
    for stage, module in modules.items():
        table = "_load_state_dict_pre_hooks"  # stages of one model have the same one
        setattr(module, table, getattr(module, table).copy())
        module.register_load_state_dict_pre_hook(_OtherStage(stage, names))
