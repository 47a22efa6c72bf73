"""The parameters of this rank: their modules, agreed traits, main parameters and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from pipegrad.errors import StepError
from pipegrad.gradients.main_params import MainParameter
from pipegrad.model.dtensor import is_dtensor
from pipegrad.plan.buckets import Bucket
from pipegrad.plugins.handler import ParameterRecord

_TRAITS = attrgetter("shape", "dtype", "grad_dtype", "requires_grad")  # may not change


class ParameterBuffer:
    """The parameters of a bucket side by side, in the layout of the bucket."""

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        # Do not zero the memory, because no code reads the gaps. Parameters can move here one by
        # one, because untouched memory costs nothing on a CPU.
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
            # Keep the object, because optimizers, ties and hooks of users have it.
            parameter.data = view

    def shard(self, key: str, begin: int, end: int) -> torch.Tensor:
        """Returns the elements ``begin:end`` of a parameter, flat, in the order of memory."""
        offset = self.views[key].storage_offset()
        return self.flat[offset + begin : offset + end]


@dataclass(eq=False)
class Param:
    """One parameter of this rank. Its gradient is in bucket.py.

    Attributes:
        record: The parameter, as the ranks agreed on it.
        tensor: The tensor itself; with FSDP2 the shard, also while the module has the gathered one.
        homes: Local stage -> its module, and the full name there. All hold the same tensor.
        is_reduced: Whether a bucket with a reduction has its gradient.
        main: The main parameter; None if it is frozen, or another rank steps it.
        buffer: The memory of the parameter, if a parameter sync may write to it.
    """

    record: ParameterRecord
    tensor: nn.Parameter
    homes: Mapping[int, tuple[nn.Module, str]]
    is_reduced: bool
    main: MainParameter | None = None
    buffer: ParameterBuffer | None = None
    # Updated values are written to this address, and a master copy was made from this version.
    _address: int | None = field(default=None, init=False)
    _version: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.agreed = _TRAITS(self.tensor)

    @property
    def apart(self) -> MainParameter | None:
        """The main parameter, if it is another tensor: a shard or a copy."""
        return None if self.main is None or self.main.tensor is self.tensor else self.main

    @property
    def result(self) -> torch.Tensor | None:
        """The gradient that an optimizer gets, between two steps."""
        return (self.tensor if self.main is None else self.main.tensor).grad

    @property
    def is_written_by_sync(self) -> bool:
        """True if its values come from a parameter sync, or from a main parameter that is apart."""
        return self.buffer is not None or self.apart is not None

    def entries(self) -> Iterator[tuple[dict[str, Any], str, object]]:
        """Yields the entries of modules that lead to the parameter: table, name and value."""
        for root, full in self.homes.values():
            *path, name = full.split(".")
            owner = root
            for step in path:
                yield owner._modules, step, owner._modules[step]
                owner = owner.get_submodule(step)
            yield owner._parameters, name, self.tensor

    def move(self) -> None:
        """Moves the parameter into its buffer, and its values into the main parameter.

        Sync: on the current stream.
        """
        # The buffer comes first, because a shard is a view of it: step 9 of the journey of a
        # gradient copies nothing then.
        if self.buffer is not None:
            self.buffer.make_view(self.record.key, self.tensor)
        main = self.apart
        if main is not None:
            main.bind(main.source if main.sharded else self.tensor)
        self._address = self.tensor.data_ptr() if self.is_written_by_sync else None
        self._version = self.tensor._version if main is not None and main.copied else None

    def check_memory(self) -> None:
        """Refuses a parameter that updated values would not reach.

        Raises:
            StepError: If its memory was replaced, or if it was changed and its master copy was not.
        """
        if self._address is not None and self._address != self.tensor.data_ptr():
            raise StepError(
                f"the memory of {self.record.key!r} was replaced, so updates would not reach it: "
                f"call sync.synchronize_parameters() on all ranks. If another Scheduler of the "
                f"same model replaced it, make one Scheduler with both losses"
            )
        if self._version is not None and self._version != self.tensor._version:
            raise StepError(
                f"{self.record.key!r} was changed, and its stored copy, which is what is stepped, "
                f"was not: call sync.synchronize_parameters() on all ranks, outside of a step"
            )

    def check_held(self) -> None:
        """Refuses a parameter if modules hold another one now.

        Raises:
            StepError: If it is gone, differs from the agreed parameter, or was replaced.
        """
        key = self.record.key
        try:
            held = [module.get_parameter(name) for module, name in self.homes.values()]
        except AttributeError as error:
            raise StepError(
                f"{key!r} is no parameter of its module any more: {error}. "
                f"weight_norm, prune, parametrize and peft replace a parameter by others: call "
                f"them before the cut, or make a new GradientSync on all ranks"
            ) from error
        tensor, *others = [_unless_gathered(present, self.tensor) for present in held]
        traits = _TRAITS(tensor)
        if traits != self.agreed:
            raise StepError(
                f"{key!r} was {_in_words(*self.agreed)} when the ranks agreed, now it is "
                f"{_in_words(*traits)}: call get_peft_model(), requires_grad_() and what else "
                f"changes it before the cut, or make a new Scheduler or GradientSync on all ranks. "
                f"To train parts in turn, as in a GAN, freeze nothing: make an optimizer for each "
                f"part, and call zero_grad() of all of them before each step"
            )
        if any(other is not tensor for other in others):
            raise StepError(
                f"{key!r} was one parameter on stages {sorted(self.homes)}, and is several now: "
                f"make them one again"
            )
        if tensor is not self.tensor:
            raise StepError(
                f"{key!r} is another parameter now, as after load_state_dict(assign=True), so its "
                f"gradient would reach neither other ranks nor the optimizer: load without assign, "
                f"which copies into the one before; or make a new Scheduler or GradientSync on all "
                f"ranks, and its optimizer"
            )


def _in_words(
    shape: torch.Size, dtype: torch.dtype, grad_dtype: torch.dtype | None, requires_grad: object
) -> str:
    return f"{tuple(shape)} {dtype}, gradient {grad_dtype}, requires_grad={requires_grad}"


def _unless_gathered(present: nn.Parameter, shard: nn.Parameter) -> nn.Parameter:
    """Returns `present`, or `shard` if FSDP2 has gathered `present` from it."""
    # A gathered parameter is a plain tensor, or a DTensor of a smaller mesh (with tensor
    # parallelism).
    meshes = [tensor.device_mesh for tensor in (present, shard) if is_dtensor(tensor)]
    return shard if is_dtensor(shard) and meshes != [shard.device_mesh] * 2 else present


class Parameters:
    """All parameters of this rank, and the entries of modules that held them last."""

    def __init__(self, by_key: Mapping[str, Param]) -> None:
        self.by_key = by_key
        self._written = [p for p in by_key.values() if p.is_written_by_sync]
        self._remember()

    def _remember(self) -> None:
        parameters = self.by_key.values()
        # Parameters of one module have most of their entries in common.
        found = {(id(t), n): (t, n, value) for p in parameters for t, n, value in p.entries()}
        self._entries = list(found.values())
        self._tensors = [p.tensor for p in parameters]
        self._agreed = [p.agreed for p in parameters]

    def check_memory(self) -> None:
        """Refuses a step if updated values would not reach a parameter.

        Raises:
            StepError: As `Param.check_memory`.
        """
        for parameter in self._written:
            parameter.check_memory()

    def check_held(self) -> None:
        """Refuses a step that would use another tensor than the ranks and optimizers.

        Raises:
            StepError: As `Param.check_held`.
        """
        # Walk down no modules, because this runs for each parameter in each step.
        others = [name for table, name, value in self._entries if table.get(name) is not value]
        if others or [*map(_TRAITS, self._tensors)] != self._agreed:
            for parameter in self.by_key.values():
                parameter.check_held()
            self._remember()  # another module holds them now
