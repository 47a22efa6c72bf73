"""One parameter of this rank: where it is, what the ranks agreed on, and what is stepped for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from pipegrad.errors import StepError
from pipegrad.gradients.main_params import MainShard
from pipegrad.gradients.param_sync import ParameterBuffer
from pipegrad.gradients.placed_parameter import PlacedParameter
from pipegrad.model.dtensor import is_dtensor
from pipegrad.model.gradient_storage import GradientAccessor
from pipegrad.model.module_tree import ModuleTree
from pipegrad.plugins.handler import ParameterRecord


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


class LiveParameter:
    """One parameter of this rank. Its gradient is in bucket.py.

    Args:
        record: The parameter, as the ranks agreed on it.
        homes: Local stage -> its modules, and the full name there. All are the same object.
        accessor: Where its gradient lives.
        is_reduced: Whether a bucket has its gradient.
        has_result: Whether this rank has its reduced gradient, or a shard of it.
        parameter_buffer: The memory of the parameter, if a parameter sync may write to it.
        main_shard: What the optimizer steps instead of the parameter.

    Attributes:
        live: The tensor at the beginning of this step.
        placed: The parameter and its main parameter.
        homes: The modules that hold it, and its names there.
        agreed: What may not change.
    """

    def __init__(
        self,
        record: ParameterRecord,
        homes: Mapping[int, tuple[ModuleTree, str]],
        accessor: GradientAccessor,
        *,
        is_reduced: bool,
        has_result: bool = True,
        parameter_buffer: ParameterBuffer | None = None,
        main_shard: MainShard | None = None,
    ) -> None:
        self.record = record
        self.stages = frozenset(homes)
        self.has_result = has_result
        self.placed = PlacedParameter(
            record.key,
            is_trained=record.requires_grad,
            has_result=has_result,
            buffer=parameter_buffer,
            main_shard=main_shard,
        )
        # Whether other ranks reduce its gradient too, or something else is stepped for it.
        self.is_elsewhere = is_reduced or main_shard is not None
        self.homes = list(homes.values())
        self._accessor = accessor
        tree, name = self.homes[0]
        # If FSDP2 has gathered it, this is the gathered one.
        self.live = tree.walk(name)
        self.agreed = self._traits(self.live)

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter, looked up in its module now; `live` if FSDP2 has gathered it."""
        tree, name = self.homes[0]
        return _unless_gathered(tree.walk(name), self.live)

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient of `live`, in the accessor."""
        return self._accessor.read(self.live)

    @property
    def main_parameter(self) -> nn.Parameter | None:
        """What this rank's optimizer steps; None if another rank steps it, or it is frozen."""
        return self.placed.tensor(self.parameter)

    @property
    def main_gradient(self) -> torch.Tensor | None:
        """The gradient of the main parameter."""
        main_shard = self.placed.main_shard
        return self.gradient if main_shard is None else main_shard.tensor.grad

    def settle(self) -> None:
        """Moves the parameter into its buffer, and its values into the main shard."""
        self.placed.settle(self.parameter)

    def look_up(self) -> None:
        """Looks up the parameter at the beginning of a step. Call `ModuleTree.check` before.

        Raises:
            StepError: If the parameter is gone, or is no longer what the ranks agreed on.
        """
        # A user may replace parameters between two steps, for example by another initialisation.
        # That is allowed as long as nothing changes on which the plan depends.
        key, (tree, name) = self.record.key, self.homes[0]
        try:
            present = tree.parameter(name)
        except AttributeError as error:
            raise StepError(
                f"{key!r} is no parameter of its module any more: {error}. "
                f"weight_norm, prune and parametrize replace a parameter by others: call them "
                f"before the GradientSync is made, or make a new one on all ranks"
            ) from error
        parameter = present if present is self.live else _unless_gathered(present, self.live)
        traits = self._traits(parameter)
        if traits != self.agreed:
            raise StepError(
                f"{key!r} was {self.agreed} when the ranks agreed, now it is {traits}: "
                f"make a new GradientSync on all ranks"
            )
        for other_tree, other_name in self.homes[1:]:
            if other_tree.parameter(other_name) is not parameter:
                raise StepError(
                    f"{key!r} was one parameter on stages {sorted(self.stages)}, now "
                    f"{other_name!r} is another: make them one again"
                )
        self.live = parameter

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
