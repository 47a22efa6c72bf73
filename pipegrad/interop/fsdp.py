"""FSDP2 inside stages: it gathers in the first forward and reduces in the last backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.private import end_backward, forget_backwards
from pipegrad.model.dtensor import is_dtensor
from pipegrad.model.wrappers import fsdp_modules, reshard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class ShardedStages:
    """Marks the last backward of each stage for FSDP2. Only that backward reduces and reshards.

    For this reason each FSDP2 group of a stage has one reduce-scatter in a step, during the last
    backward. FSDP2's hooks call the `GradientSync` for each parameter when it is reduced.

    Args:
        modules: Stage -> module, for the stages of this rank.
        sync: The gradient layer. While it accumulates, no backward is the last.

    Attributes:
        stages: Stages with a part that FSDP2 shards.
    """

    def __init__(self, modules: Mapping[int, nn.Module], sync: GradientSync) -> None:
        self._parts = {stage: parts for stage, parts in fsdp_modules(modules).items() if parts}
        self.stages = frozenset(self._parts)
        self._sync = sync
        self._modules = modules
        # Parameters that the ranks agreed on, set in each step. FSDP2 puts other parameters
        # there while they are gathered.
        self._agreed_ids = frozenset[int]()

    def reduces(self, parameter: nn.Parameter) -> bool:
        """True if FSDP2 manages a parameter, gathered or not."""
        return is_dtensor(parameter) or id(parameter) not in self._agreed_ids

    def gathered(self, stage: int) -> list[nn.Parameter]:
        """Returns the gathered parameters of a stage; autograd adds to their gradients."""
        return [p for p in self._modules[stage].parameters() if id(p) not in self._agreed_ids]

    def begin(self, *, forward_only: bool) -> None:
        """Begins a step: backwards accumulate until the last one."""
        # Reshard before an evaluation, because it must not compute with old values: an earlier
        # forward may have left parameters gathered, and the optimizer has changed their shards.
        if forward_only:
            for parts in self._parts.values():
                reshard(parts)
            return
        self._agreed_ids = frozenset(id(self._sync.parameter(r)) for r in self._sync.records())
        for parts in self._parts.values():
            _set_last_backward(parts, is_last=False)

    def last_backward(self, stage: int) -> None:
        """Marks the next backward of a stage as its last, for the gradient layer too."""
        self._sync.stage_last_backward(stage)
        # While steps accumulate, no backward is the last for FSDP2, because it would reduce, and
        # the next steps would add to a reduced gradient.
        if not self._sync.is_accumulating:
            _set_last_backward(self._parts.get(stage, []), is_last=True)

    def forget(self) -> None:
        """Drops the gradients of a failed step, because the next step must not add to them."""
        for parts in self._parts.values():
            forget_backwards(parts)

    def without_backward(self, stage: int) -> None:
        """Ends a backward that had no gradient to start from. Accumulated gradients are reduced."""
        for part in self._parts[stage]:
            end_backward(part)


def _set_last_backward(parts: list[FSDPModule], *, is_last: bool) -> None:
    # A step gathers and reduces once for each group, not once for each microbatch, because before
    # the last backward parameters stay gathered and gradients are not reduced.
    for part in parts:
        part.set_is_last_backward(is_last)
        part.set_reshard_after_backward(is_last, recurse=False)
        part.set_requires_gradient_sync(is_last, recurse=False)
