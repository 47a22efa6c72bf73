"""Loose leaves: tensors that get a gradient in a step, and that no stage's module holds.

[Note: loose leaves] A loss may have parameters of its own, and a module may keep a tensor or a
layer in a list. Nobody reduces their gradients, so they are refused where there are several
replicas. In one pipeline they are right as soon as they are divided as all others are. Nobody
declares them: they are found in autograd's graphs, in the steps 1, 2, 4, 8 and so on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipegrad.errors import StepError
from pipegrad.model.wrappers import fsdp_modules

if TYPE_CHECKING:
    from pipegrad.gradients.sync import GradientSync

_LEAF = "AccumulateGrad"  # the class of the node of a leaf


class LooseLeaves:
    """Divides the gradients of loose leaves; see [Note: loose leaves].

    Args:
        sync: Knows the parameters that the ranks agreed on.
        modules: Stage -> module, for the stages of this rank.
    """

    def __init__(self, sync: GradientSync, modules: Mapping[int, nn.Module]) -> None:
        self._sync = sync
        # FSDP2 exchanges parameters while a stage computes.
        self._unseen = {stage for stage, parts in fsdp_modules(modules).items() if parts}
        self._num_steps = 0
        self._known = weakref.WeakValueDictionary[int, Tensor]()  # by id
        self._seen = dict[int, tuple[weakref.ref[Tensor], int, int]]()  # stage, and how often
        self._own = set[int]()  # ids of parameters
        self._before = dict[int, tuple[weakref.ref[Tensor], Tensor | None]]()  # its gradient
        self.is_looking = False

    @property
    def is_empty(self) -> bool:
        """Whether no loose leaf is known."""
        return not self._known

    def begin(self, given: Iterable[object] = ()) -> None:
        """Begins a step; the gradients of known leaves are put aside, if they are not yet.

        Args:
            given: What the caller gives the step. Leaves among it are known, and this replica's.
        """
        self._num_steps += 1
        self._seen.clear()
        self.is_looking = not self._num_steps & (self._num_steps - 1)
        if self.is_looking:
            self._own = {id(self._sync.parameter(r)) for r in self._sync.records()}
        for value in given:
            if isinstance(value, Tensor) and value.is_leaf and value.requires_grad:
                self._known[id(value)] = value
        for leaf in self._known.values():
            self._put_aside(leaf)

    def look(self, stage: int, roots: Sequence[Tensor], given: Iterable[Tensor]) -> None:
        """Looks for loose leaves of a stage, before a backward.

        Args:
            stage: The stage.
            roots: Where the backward begins.
            given: What the stage and its loss were given.
        """
        if stage in self._unseen:
            return
        others = {*self._own, *map(id, given)}
        for leaf in _leaves(roots):
            if id(leaf) in others:
                continue
            reference, _, number = self._seen.get(id(leaf), (weakref.ref(leaf), 0, 0))
            self._seen[id(leaf)] = reference, stage, number + 1
            self._put_aside(leaf)

    def refuse(self, num_microbatches: int) -> None:
        """Takes what was seen for loose; refuses it if there are replicas.

        Args:
            num_microbatches: A leaf that fewer have is made in forward, and is theirs alone.

        Raises:
            StepError: Names the stage, and the shape.
        """
        for reference, stage, number in self._seen.values():
            leaf = reference()  # None if only the graph has held it
            is_whole = leaf is not None and number >= num_microbatches and leaf.grad is not None
            if leaf is None or not is_whole or id(leaf) in self._known:
                continue
            if len(self._sync.topology.pipelines) > 1:
                raise StepError(
                    f"stage {stage}, or its loss, has a tensor of shape {tuple(leaf.shape)} that "
                    f"gets a gradient and was no parameter of its module at the beginning, so "
                    f"nobody reduces it over the replicas: make it a parameter of the module "
                    f"before the Scheduler is made; or freeze it, if nothing steps it"
                )
            self._known[id(leaf)] = leaf

    def end(self, divisor: Tensor | float) -> None:
        """Divides the gradients of a step, and adds what was there before.

        Sync: on the current stream.
        """
        for reference, before in self._before.values():
            leaf = reference()
            if leaf is None:
                continue
            if leaf.grad is not None and id(leaf) in self._known:
                leaf.grad = leaf.grad / divisor
            if before is not None:
                leaf.grad = before if leaf.grad is None else before + leaf.grad
        self._before.clear()

    def drop(self) -> None:
        """Drops the gradients of a step that failed, and what was there before."""
        for reference, _ in self._before.values():
            if (leaf := reference()) is not None:
                leaf.grad = None
        self._before.clear()

    def _put_aside(self, leaf: Tensor) -> None:
        if id(leaf) not in self._before:
            self._before[id(leaf)] = weakref.ref(leaf), leaf.grad
            leaf.grad = None


def _leaves(roots: Sequence[Tensor]) -> list[Tensor]:
    """Returns the leaves of a graph that get a gradient."""
    stack: list[Any] = [get_gradient_edge(root).node for root in roots if root.requires_grad]
    seen, leaves = set(stack), list[Tensor]()
    while stack:
        node = stack.pop()
        if type(node).__name__ == _LEAF:
            leaves.append(node.variable)
        for successor, _ in node.next_functions:
            if successor is not None and successor not in seen:
                seen.add(successor)
                stack.append(successor)
    return leaves
