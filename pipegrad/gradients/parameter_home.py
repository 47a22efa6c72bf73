"""The modules that hold a parameter. In each step it is looked up there, and checked."""

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
    """Properties of a parameter that may not change after the ranks have agreed."""

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
        homes: Local stage -> its modules, and the full name there. All are the same object.
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

        If FSDP2 has replaced a shard by a gathered parameter, this returns `live`.

        Args:
            live: The tensor at the beginning of the present step; before the first step any.
        """
        tree, name = self._homes[0]
        return _unless_gathered(tree.walk(name), live)

    def first(self) -> nn.Parameter:
        """Returns the tensor that is in its module now, also if FSDP2 has gathered it."""
        tree, name = self._homes[0]
        return tree.walk(name)

    def look_up(self, live: nn.Parameter) -> nn.Parameter:
        """Returns the parameter at the beginning of a step. Call `ModuleTree.check` before.

        Args:
            live: The tensor at the beginning of the last step.

        Raises:
            StepError: If the parameter is gone, or is no longer what the ranks agreed on.
        """
        # A user may replace parameters between two steps, for example by another initialisation.
        # That is allowed as long as nothing changes on which the plan depends.
        tree, name = self._homes[0]
        try:
            present = tree.parameter(name)
        except AttributeError as error:
            raise StepError(
                f"{self._key!r} is no parameter of its module any more: {error}. "
                f"weight_norm, prune and parametrize replace a parameter by others: call them "
                f"before the GradientSync is made, or make a new one on all ranks"
            ) from error
        parameter = present if present is live else _unless_gathered(present, live)
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
        # An accessor may set the dtype in which autograd makes the gradient. So this call is also
        # needed for a new parameter.
        gradient_dtype = self._accessor.dtype(parameter)
        return Traits(parameter.shape, parameter.dtype, gradient_dtype, parameter.requires_grad)


def _unless_gathered(present: nn.Parameter, live: nn.Parameter) -> nn.Parameter:
    """Returns `present`, or `live` if FSDP2 has gathered `present` from the shard `live`."""
    if present is live or not is_dtensor(live):
        return present
    # A gathered parameter is a plain tensor, or a DTensor of a smaller mesh (with tensor
    # parallelism).
    shard: Any = live
    is_shard = is_dtensor(present) and present.device_mesh == shard.device_mesh
    return present if is_shard else live
