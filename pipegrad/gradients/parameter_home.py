"""Where a parameter lives: looked up in its modules in each step, and checked there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from pipegrad.errors import StepError
from pipegrad.model.dtensor import is_dtensor
from pipegrad.model.gradient_storage import GradientAccessor
from pipegrad.model.module_tree import ModuleTree


class Traits(NamedTuple):
    """Properties of a parameter that may not change once the ranks have agreed."""

    shape: torch.Size
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return (
            f"{tuple(self.shape)} {self.dtype}, gradient {self.gradient_dtype}, "
            f"requires_grad={self.requires_grad}"
        )


class ParameterHome:
    """The modules of this rank that hold one parameter.

    Args:
        key: Of the parameter, for messages.
        homes: Local stage -> the modules it is in, and its full name there; all one object.
        accessor: Where its gradient lives.
    """

    def __init__(
        self, key: str, homes: Mapping[int, tuple[ModuleTree, str]], accessor: GradientAccessor
    ) -> None:
        self._key = key
        self._stages = sorted(homes)
        self._homes = list(homes.values())
        self._accessor = accessor
        tree, name = self._homes[0]
        self._agreed = self._traits(tree.walk(name))

    def walk(self, live: nn.Parameter) -> nn.Parameter:
        """Returns the parameter, looked up in its module now.

        FSDP2 puts what it has gathered in the place of a shard. Then this returns `live`.

        Args:
            live: The tensor that the step at hand began with; before the first one any.
        """
        tree, name = self._homes[0]
        return _unless_gathered(tree.walk(name), live)

    def first(self) -> nn.Parameter:
        """Returns the tensor that is in its module now, whatever it is."""
        tree, name = self._homes[0]
        return tree.walk(name)

    def look_up(self, live: nn.Parameter) -> nn.Parameter:
        """Returns the parameter for a step that begins; its `ModuleTree` was checked before.

        Args:
            live: The tensor that the step before began with.

        Raises:
            StepError: If the parameter is gone, or is no longer what the ranks agreed on.
        """
        tree, name = self._homes[0]
        try:
            found = tree.parameter(name)
        except AttributeError as error:
            raise StepError(
                f"{self._key!r} is no parameter of its module any more: {error}. "
                f"weight_norm, prune and parametrize replace a parameter by others: call them "
                f"before the GradientSync is made, or make a new one on all ranks"
            ) from error
        parameter = _unless_gathered(found, live)
        traits = self._traits(parameter)
        if traits != self._agreed:
            raise StepError(
                f"{self._key!r} was {self._agreed} when the ranks agreed, now it is {traits}: "
                f"make a new GradientSync on all ranks"
            )
        for other_tree, other_name in self._homes[1:]:
            if other_tree.parameter(other_name) is not parameter:
                raise StepError(
                    f"{self._key!r} was one parameter on stages {self._stages}, now "
                    f"{other_name!r} is another: make them one again"
                )
        return parameter

    def _traits(self, parameter: nn.Parameter) -> Traits:
        # Asking for the gradient's dtype also tells autograd that of a parameter that is new.
        gradient_dtype = self._accessor.dtype(parameter)
        return Traits(parameter.shape, parameter.dtype, gradient_dtype, parameter.requires_grad)


def _unless_gathered(found: nn.Parameter, live: nn.Parameter) -> nn.Parameter:
    """Returns `found`, but `live` where FSDP2 has gathered `found` of the shard `live`."""
    if found is live or not is_dtensor(live):
        return found
    shard: Any = live
    return found if is_dtensor(found) and found.device_mesh == shard.device_mesh else live
