"""Loose leaves: tensors that get a gradient, and that no stage's module holds.

[Note: loose leaves] A loss may have parameters, and a module may keep a tensor or a layer in a
list. They raise an error, because no code divides or reduces their gradients. Autograd's graphs are
searched for them, because no user declares them: in each loss, and in whole stages in the steps 1,
2, 4, 8 and so on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipegrad.errors import StepError
from pipegrad.model.wrappers import fsdp_modules

if TYPE_CHECKING:
    from pipegrad.gradients.sync import GradientSync

_LEAF = "AccumulateGrad"  # the class of the node of a leaf


class LooseLeaves:
    """Refuses loose leaves; see [Note: loose leaves].

    Args:
        sync: Has the parameters that the ranks agreed on.
        modules: Stage -> module, for the stages of this rank.
    """

    def __init__(self, sync: GradientSync, modules: Mapping[int, nn.Module]) -> None:
        self._sync = sync
        # FSDP2 exchanges parameters while a stage computes.
        self._unseen = {stage for stage, parts in fsdp_modules(modules).items() if parts}
        self._num_steps = 0
        self._seen = dict[int, tuple[weakref.ref[Tensor], int, set[int]]]()  # stage, microbatches
        self._parameter_ids = set[int]()
        self.is_looking = False

    def begin(self) -> None:
        """Begins a step."""
        self._num_steps += 1
        self._seen.clear()
        self._parameter_ids.clear()  # between two steps a user may replace parameters
        self.is_looking = not self._num_steps & (self._num_steps - 1)

    def look(
        self,
        stage: int,
        microbatches: Iterable[int],
        roots: Sequence[object],
        passed: Iterable[object],
    ) -> None:
        """Looks for loose leaves between the results of a stage, or its loss, and their arguments.

        Args:
            stage: The stage.
            microbatches: Microbatches whose backward begins here.
            roots: The results, or their gradient edges.
            passed: The arguments; a search ends at each.
        """
        if stage in self._unseen:
            return
        # Only plain tensors, because others may compute when their graph is read, as logits of a
        # cut do.
        ends = (x for x in passed if isinstance(x, Tensor))
        for leaf in _leaves(roots, [x for x in ends if type(x) in (Tensor, nn.Parameter)]):
            if self._is_parameter(leaf):
                continue
            _, _, seen_in = self._seen.setdefault(id(leaf), (weakref.ref(leaf), stage, set()))
            seen_in.update(microbatches)

    def refuse(self, num_microbatches: int) -> None:
        """Refuses the leaves that were seen.

        Args:
            num_microbatches: Count of microbatches. A leaf that the first and the last one do not
                share is allowed, because forward makes it.

        Raises:
            StepError: Names the stage, and the shape.
        """
        for reference, stage, seen_in in self._seen.values():
            leaf = reference()  # None if only the graph has held it
            if leaf is None or leaf.grad is None:
                continue
            if seen_in.issuperset((0, num_microbatches - 1)):
                raise StepError(
                    f"stage {stage}, or its loss, has a tensor of shape {tuple(leaf.shape)} that "
                    f"gets a gradient and was no parameter of its module at the beginning, so "
                    f"nobody divides or reduces it: make it a parameter of the module before the "
                    f"Scheduler is made; or freeze it, if nothing steps it"
                )

    def _is_parameter(self, leaf: Tensor) -> bool:
        if not self._parameter_ids:
            self._parameter_ids = {id(self._sync.parameter(r)) for r in self._sync.records()}
        return id(leaf) in self._parameter_ids


def _leaves(roots: Sequence[object], ends: Sequence[Tensor]) -> list[Tensor]:
    """Returns the leaves of a graph that get a gradient; does not look beyond some tensors."""
    seen: set[Any] = {get_gradient_edge(end).node for end in ends if end.requires_grad}
    nodes = [root.node for root in roots if isinstance(root, GradientEdge)]
    nodes += [get_gradient_edge(x).node for x in roots if isinstance(x, Tensor) and x.requires_grad]
    stack: list[Any] = [node for node in nodes if node not in seen]
    seen, leaves = seen.union(stack), list[Tensor]()
    while stack:
        node = stack.pop()
        if type(node).__name__ == _LEAF:
            leaves.append(node.variable)
        for successor, _ in node.next_functions:
            if successor is not None and successor not in seen:
                seen.add(successor)
                stack.append(successor)
    return leaves
