"""FSDP2 inside stages: gathers in the first forward, reduces in the last backward."""

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
    """Tells FSDP2 which backward of a stage is its last: that one reduces, and reshards.

    So a stage has one reduce-scatter of each of its groups in a step, under its last backward, and
    FSDP2's hooks tell the `GradientSync` of each parameter as it is reduced.

    Args:
        modules: This rank's, by stage.
        sync: Asked whether a step only adds up: then no backward is the last.
    """

    def __init__(self, modules: Mapping[int, nn.Module], sync: GradientSync) -> None:
        self._parts = {stage: parts for stage, parts in fsdp_modules(modules).items() if parts}
        self._sync = sync
        self._modules = modules
        self._own = frozenset[int]()  # what the ranks agreed on, in a step

    def reduces(self, stage: int, parameter: nn.Parameter) -> bool:
        """Whether a parameter of a stage is FSDP2's, gathered or not."""
        return stage in self._parts and (is_dtensor(parameter) or id(parameter) not in self._own)

    def gathered(self, stage: int) -> list[nn.Parameter]:
        """Returns what stands in the place of shards now: autograd adds to its gradients."""
        if stage not in self._parts:
            return []
        return [p for p in self._modules[stage].parameters() if id(p) not in self._own]

    def begin(self) -> None:
        """Starts a step: backwards add up, until one is the last."""
        if self._parts:
            self._own = frozenset(id(self._sync.parameter(r)) for r in self._sync.records())
        for parts in self._parts.values():
            _tell(parts, is_last=False)

    def begin_evaluation(self) -> None:
        """Lets go of what an earlier forward has left gathered, for it may be out of date."""
        for parts in self._parts.values():
            reshard(parts)

    def last_backward(self, stage: int) -> None:
        """Says that the next backward of a stage is its last."""
        if stage in self._parts and not self._sync.is_accumulating:
            _tell(self._parts[stage], is_last=True)

    def forget(self) -> None:
        """Lets go of what is left of a step that failed: nobody may add to it."""
        for parts in self._parts.values():
            forget_backwards(parts)

    def without_backward(self, stage: int) -> None:
        """Ends a backward that had nothing to begin with: what adds up may have to be reduced."""
        for part in self._parts.get(stage, ()):
            end_backward(part)


def _tell(parts: list[FSDPModule], *, is_last: bool) -> None:
    for part in parts:
        part.set_is_last_backward(is_last)
        part.set_reshard_after_backward(is_last, recurse=False)
        part.set_requires_gradient_sync(is_last, recurse=False)
