"""One parameter of this rank: where it is, what the ranks agreed on, and what is stepped for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from pipegrad.errors import StepError
from pipegrad.gradients.main_params import MainShard
from pipegrad.gradients.param_sync import ParameterBuffer
from pipegrad.model.dtensor import is_dtensor
from pipegrad.model.gradient_storage import GradientAccessor
from pipegrad.plugins.handler import ParameterRecord, Placement


class ModuleTree:
    """Finds parameters of a module by their full names.

    The module that has a parameter is looked up once, and remembered. `check` drops everything that
    is remembered if a module was replaced. It looks at each module once.

    Args:
        root: The module in which all names begin.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._children: dict[tuple[int, str], tuple[nn.Module, nn.Module]] = {}

    def check(self) -> bool:
        """Drops all remembered modules if one was replaced; returns whether none was.

        Call it before a series of look-ups.
        """
        for (_, name), (parent, child) in self._children.items():
            if parent._modules.get(name) is not child:
                self._owners, self._children = {}, {}
                return False
        return True

    def owner(self, full: str) -> tuple[dict[str, nn.Parameter | None], str]:
        """Returns the table of parameters that has this one, and its name there."""
        if full not in self._owners:
            self._owners[full] = self._find(full)
        owner, name = self._owners[full]
        return owner._parameters, name

    def parameter(self, full: str) -> nn.Parameter:
        """Returns the parameter that has this name now.

        Raises:
            AttributeError: If no parameter has it.
        """
        # Only the module is remembered, not the parameter: FSDP2 exchanges the parameter objects
        # of a module in each step.
        if full not in self._owners:
            self._owners[full] = self._find(full)
        owner, name = self._owners[full]
        parameter = owner._parameters.get(name)
        return self.walk(full) if parameter is None else parameter

    def walk(self, full: str) -> nn.Parameter:
        """Returns the parameter that has this name now. Needs no `check`, but is slower."""
        return self._root.get_parameter(full)

    def _find(self, full: str) -> tuple[nn.Module, str]:
        """Returns the module that has a parameter, and its name there."""
        *path, name = full.split(".")
        owner = self._root
        for step in path:
            child = owner.get_submodule(step)
            self._children[id(owner), step] = owner, child
            owner = child
        return owner, name


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


class PlacedParameter:
    """One parameter, and the tensor that this rank's optimizer steps for it.

    Args:
        key: Of the parameter, for messages.
        is_trained: Whether it requires a gradient.
        has_result: Whether this rank has its reduced gradient, or a shard of it.
        buffer: The memory of the parameter, if a parameter sync may write to it.
        main_shard: What the optimizer steps instead of the parameter.

    Attributes:
        main_shard: The same.
        is_sharded: Whether its gradient is reduced with SHARD. With WHOLE it is like with OWNER.
        is_replaced: Whether an optimizer may not step the parameter itself on this rank.
        is_updated_elsewhere: Whether its values come from a parameter sync or a master copy.
    """

    def __init__(
        self,
        key: str,
        *,
        is_trained: bool,
        has_result: bool,
        buffer: ParameterBuffer | None,
        main_shard: MainShard | None,
    ) -> None:
        self.main_shard = main_shard
        self._key = key
        self._buffer = buffer
        self.is_sharded = buffer is not None and any(
            step.placement is Placement.SHARD for step in buffer.bucket.route
        )
        self.is_replaced = main_shard is not None or self.is_sharded
        self.is_updated_elsewhere = main_shard is not None or buffer is not None
        self._is_whole = is_trained and has_result and not self.is_sharded
        # Updated values are written to this address, and a master copy was made from this version.
        # `check` compares both, since a parameter that a user has replaced would never be updated.
        self._address: int | None = None
        self._version: int | None = None

    def tensor(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Returns the main parameter; None if another rank steps it, or it is frozen."""
        if self.main_shard is not None:
            return self.main_shard.tensor
        return parameter if self._is_whole else None

    def settle(self, parameter: nn.Parameter) -> None:
        """Moves the parameter into its buffer, and its values into the main parameter.

        Sync: on the current stream.
        """
        # The buffer comes first: the main shard is a view of it, so that nothing is copied in step
        # 9 of the journey of a gradient.
        if self._buffer is not None:
            self._buffer.adopt(self._key, parameter)
        if self.main_shard is not None:
            main_range, source = self.main_shard.main_range, parameter.data
            if main_range.sharded and self._buffer is not None:
                source = self._buffer.shard(main_range.key, main_range.begin, main_range.end)
            self.main_shard.take_values(source)
        self._address = parameter.data_ptr() if self.is_updated_elsewhere else None
        is_copied = self.main_shard is not None and self.main_shard.copied
        self._version = parameter._version if is_copied else None

    def check(self, parameter: nn.Parameter) -> None:
        """Refuses a parameter that updated values would not reach.

        Raises:
            StepError: If its memory was replaced, or if it was changed and its master copy was not.
        """
        if self._address is not None and self._address != parameter.data_ptr():
            raise StepError(
                f"the memory of {self._key!r} was replaced, and what is stepped for it would "
                f"not arrive there: call sync.synchronize_parameters() on all ranks; if it is "
                f"another parameter now, make the optimizer again, by sync.optimizer()"
            )
        if self._version is not None and self._version != parameter._version:
            raise StepError(
                f"{self._key!r} was changed, and its stored copy, which is what is stepped, "
                f"was not: call sync.synchronize_parameters() on all ranks, outside of a step"
            )
