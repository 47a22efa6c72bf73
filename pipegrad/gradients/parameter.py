"""The parameters of this rank: where each is, what the ranks agreed on, what is updated for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from operator import attrgetter, eq, is_
from typing import Any, NamedTuple

import torch
from torch import nn

from pipegrad.errors import StepError
from pipegrad.gradients.main_params import MainShard
from pipegrad.model.dtensor import is_dtensor, local
from pipegrad.model.main_grad import MainGrad, gradient_dtype
from pipegrad.plan.buckets import Bucket
from pipegrad.plugins.handler import ParameterRecord, Placement

_TRAITS = tuple(map(attrgetter, ("requires_grad", "dtype", "grad_dtype", "shape")))


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


class ParameterBuffer:
    """The parameters of a bucket side by side, in the layout of the bucket.

    Args:
        bucket: The bucket.
        device: Of the memory.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        # The memory is not zeroed: nobody reads the gaps. On a CPU, untouched memory costs nothing,
        # so parameters can move here one by one.
        self.flat = torch.empty(bucket.payload_numel, dtype=bucket.parameter_dtype, device=device)
        self.views = {
            slot.key: self.flat.as_strided(slot.shape, slot.stride, slot.offset)
            for slot in bucket.slots
        }

    def make_view(self, key: str, parameter: nn.Parameter) -> None:
        """Makes a parameter a view of the buffer, which frees its old memory."""
        view = self.views[key]
        if parameter.data_ptr() != view.data_ptr():
            with torch.no_grad():
                view.copy_(parameter)
            # The object stays the same: optimizers, ties and hooks of users have it.
            parameter.data = view

    def shard(self, key: str, begin: int, end: int) -> torch.Tensor:
        """Returns the elements ``begin:end`` of a parameter, flat, in the order of memory."""
        offset = self.views[key].storage_offset()
        return self.flat[offset + begin : offset + end]


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
    """One parameter of this rank, and its main parameter. Its gradient is in bucket.py.

    Args:
        record: The parameter, as the ranks agreed on it.
        homes: Local stage -> its modules, and the full name there. All are the same object.
        main_grad: Where its gradient lives; None for ``.grad``.
        is_reduced: Whether a bucket has its gradient.
        has_result: Whether this rank has its reduced gradient, or a shard of it.
        buffer: The memory of the parameter, if a parameter sync may write to it.
        main_shard: What the optimizer steps instead of the parameter.

    Attributes:
        live: The tensor at the beginning of this step.
        homes: The modules that hold it, and its names there.
        agreed: What may not change.
        is_sharded: Whether its gradient is reduced with SHARD. With WHOLE it is like with OWNER.
        is_replaced: Whether an optimizer may not step the parameter itself on this rank.
        is_updated_elsewhere: Whether its values come from a parameter sync or a master copy.
        is_elsewhere: Whether other ranks reduce its gradient too, or the optimizer has something
            else.
    """

    def __init__(
        self,
        record: ParameterRecord,
        homes: Mapping[int, tuple[ModuleTree, str]],
        main_grad: MainGrad | None,
        *,
        is_reduced: bool,
        has_result: bool = True,
        buffer: ParameterBuffer | None = None,
        main_shard: MainShard | None = None,
    ) -> None:
        self.record = record
        self.stages = frozenset(homes)
        self.has_result = has_result
        self.main_shard = main_shard
        self.is_sharded = buffer is not None and any(
            step.placement is Placement.SHARD for step in buffer.bucket.route
        )
        self.is_replaced = main_shard is not None or self.is_sharded
        self.is_updated_elsewhere = main_shard is not None or buffer is not None
        self.is_elsewhere = is_reduced or main_shard is not None
        self.homes = list(homes.values())
        self._main_grad = main_grad
        self._buffer = buffer
        # Updated values are written to this address, and a master copy was made from this version.
        # `check_memory` compares both: a parameter that a user has replaced would never be updated.
        self._address: int | None = None
        self._version: int | None = None
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
    def main_parameter(self) -> nn.Parameter | None:
        """What this rank's optimizer steps; None if another rank steps it, or it is frozen."""
        if self.main_shard is not None:
            return self.main_shard.tensor
        is_whole = self.record.requires_grad and self.has_result and not self.is_sharded
        return self.parameter if is_whole else None

    @property
    def main_gradient(self) -> torch.Tensor | None:
        """The gradient of the main parameter."""
        if self.main_shard is not None:
            return self.main_shard.tensor.grad
        gradient = self.live.grad
        return None if gradient is None else local(gradient)

    def move(self) -> None:
        """Moves the parameter into its buffer, and its values into the main parameter.

        Sync: on the current stream.
        """
        # The buffer comes first: the main shard is a view of it, so that nothing is copied in step
        # 9 of the journey of a gradient.
        parameter = self.parameter
        if self._buffer is not None:
            self._buffer.make_view(self.record.key, parameter)
        if self.main_shard is not None:
            main_range, source = self.main_shard.main_range, parameter.data
            if main_range.sharded and self._buffer is not None:
                source = self._buffer.shard(main_range.key, main_range.begin, main_range.end)
            self.main_shard.take_values(source)
        self._address = parameter.data_ptr() if self.is_updated_elsewhere else None
        is_copied = self.main_shard is not None and self.main_shard.copied
        self._version = parameter._version if is_copied else None

    def check_memory(self) -> None:
        """Refuses a parameter that updated values would not reach.

        Raises:
            StepError: If its memory was replaced, or if it was changed and its master copy was not.
        """
        if self._address is not None and self._address != self.live.data_ptr():
            raise StepError(
                f"the memory of {self.record.key!r} was replaced, and what is stepped for it would "
                f"not arrive there: call sync.synchronize_parameters() on all ranks; if it is "
                f"another parameter now, make the optimizer again, by sync.optimizer(); if another "
                f"Scheduler of the same model replaced it, make one Scheduler with both losses"
            )
        if self._version is not None and self._version != self.live._version:
            raise StepError(
                f"{self.record.key!r} was changed, and its stored copy, which is what is stepped, "
                f"was not: call sync.synchronize_parameters() on all ranks, outside of a step"
            )

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
                f"weight_norm, prune, parametrize and peft replace a parameter by others: call "
                f"them before the cut, or make a new GradientSync on all ranks"
            ) from error
        parameter = present if present is self.live else _unless_gathered(present, self.live)
        traits = self._traits(parameter)
        if traits != self.agreed:
            advice = "make a new GradientSync on all ranks"
            if traits.requires_grad != self.agreed.requires_grad:
                advice = (
                    "call get_peft_model(), requires_grad_() and what else freezes parameters "
                    "before the cut, or make a new Scheduler on all ranks. To train parts in "
                    "turn, as in a GAN, freeze nothing: make an optimizer for each part, and call "
                    "zero_grad() of all of them before each step"
                )
            raise StepError(
                f"{key!r} was {self.agreed} when the ranks agreed, now it is {traits}: {advice}"
            )
        for other_tree, other_name in self.homes[1:]:
            if other_tree.parameter(other_name) is not parameter:
                raise StepError(
                    f"{key!r} was one parameter on stages {sorted(self.stages)}, now "
                    f"{other_name!r} is another: make them one again"
                )
        self.live = parameter

    def _traits(self, parameter: nn.Parameter) -> Traits:
        dtype = gradient_dtype(parameter, self._main_grad)
        return Traits(parameter.shape, parameter.dtype, dtype, parameter.requires_grad)


def _unless_gathered(present: nn.Parameter, live: nn.Parameter) -> nn.Parameter:
    """Returns `present`, or `live` if FSDP2 has gathered `present` from the shard `live`."""
    if present is live or not is_dtensor(live):
        return present
    # A gathered parameter is a plain tensor, or a DTensor of a smaller mesh (with tensor
    # parallelism).
    shard: Any = live
    is_shard = is_dtensor(present) and present.device_mesh == shard.device_mesh
    return present if is_shard else live


class LiveParameters:
    """All parameters of this rank, which are looked up at once when a step begins.

    Args:
        by_key: The parameters.
        trees: Find them, by stage.

    Attributes:
        by_key: The same.
        trees: The same.
    """

    def __init__(
        self,
        by_key: Mapping[str, LiveParameter],
        trees: Mapping[int, ModuleTree],
    ) -> None:
        self.by_key = by_key
        self.trees = trees
        self._updated_elsewhere = [p for p in by_key.values() if p.is_updated_elsewhere]
        self._stepped = dict[str, weakref.ref[nn.Parameter]]()
        self._locate()

    def note_stepped(self) -> None:
        """Takes the main parameters as they are now for those of an optimizer."""
        mains = {key: p.main_parameter for key, p in self.by_key.items()}
        self._stepped = {
            key: weakref.ref(main)
            for key, main in mains.items()
            if main is not None and not self.by_key[key].is_updated_elsewhere
        }

    def look_up(self, follow: Callable[[], object]) -> None:
        """Looks up all parameters for a step.

        Args:
            follow: Called if any of them is another tensor now.

        Raises:
            StepError: If one is gone, or is no longer what the ranks agreed on, or if updated
                values would not reach it.
        """
        replaced = [tree for tree in self.trees.values() if not tree.check()]
        # This is done for each parameter in each step, so without bytecode for each. No list of
        # shapes is made: it would be garbage that Python counts, and looks through.
        present = map(dict.get, self._tables, self._names)
        is_as_agreed = (
            not replaced
            and all(map(is_, present, self._held))
            and all(
                all(map(eq, map(get, self._live), agreed))
                for get, agreed in zip(_TRAITS, self._agreed, strict=True)
            )
        )
        if not is_as_agreed:
            before = self._live
            for parameter in self.by_key.values():
                parameter.look_up()
            self._refuse_unstepped()
            self._locate()
            if not all(map(is_, before, self._live)):
                follow()
        for parameter in self._updated_elsewhere:
            parameter.check_memory()

    def _refuse_unstepped(self) -> None:
        for key, reference in self._stepped.items():
            stepped = reference()  # None if the optimizer is gone
            if stepped is not None and stepped is not self.by_key[key].live:
                raise StepError(
                    f"{key!r} is another tensor than the optimizer steps, as after "
                    f"load_state_dict(assign=True): load without assign, or make the optimizer "
                    f"again, by sync.optimizer()"
                )

    def _locate(self) -> None:
        """Remembers where all parameters are, and what was agreed on them."""
        parameters = self.by_key.values()
        homes = [(p, tree, name) for p in parameters for tree, name in p.homes]
        owners = [tree.owner(name) for _, tree, name in homes]
        self._tables, self._names = [table for table, _ in owners], [name for _, name in owners]
        self._held = [p.live for p, *_ in homes]
        self._live = [p.live for p in parameters]
        self._agreed = [list(map(get, self._live)) for get in _TRAITS]
