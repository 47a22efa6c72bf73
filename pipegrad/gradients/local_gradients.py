"""Gradients that no other rank has: they stay where autograd adds to them, and are divided.

[Note: loose leaves] A loss may have parameters of its own, and a module may keep a tensor or a
layer in a list. Nobody divides or reduces their gradients, so they are refused. Nobody declares
them: they are looked for in autograd's graphs, in each loss, and in whole stages in the steps 1, 2,
4, 8 and so on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.weak import TensorWeakRef

from pipegrad.errors import StepError
from pipegrad.gradients.bucket import NOTHING, Hook, refuse_value, taking
from pipegrad.gradients.main_params import MainParameter
from pipegrad.gradients.norm import divide_
from pipegrad.gradients.parameter import Param
from pipegrad.model.dtensor import is_dtensor, local, redistribute_gradient
from pipegrad.model.main_grad import MainGrad, gradients_of, set_gradient, take_gradient
from pipegrad.model.wrappers import fsdp_modules

if TYPE_CHECKING:
    from pipegrad.gradients.sync import GradientSync


class LocalGradients:
    """The gradients of this rank that nobody reduces.

    Args:
        parameters: That are trained.
        main_grad: Where their gradients live; None for ``.grad``.
        divisors: Each gradient is divided by this, besides the divisor of each step.
    """

    def __init__(
        self,
        parameters: Sequence[Param],
        main_grad: MainGrad | None,
        divisors: Sequence[float],
    ) -> None:
        self.parameters = parameters
        self._main_grad = main_grad
        self._fixed_divisors = divisors
        self._main_shards = [p.apart for p in parameters]
        self._is_open = False
        self._before: list[torch.Tensor | None] | None = None
        self._divisor = 1.0
        # References to the results of the last step. Weak references: a gradient that the user
        # drops must be freed before the next step. Where a result and what the user sets are
        # treated alike, an id will do: it is cheaper, and used once more later.
        self._are_alike = not any(self._main_shards) and {*divisors} <= {1.0}
        self._results: list[TensorWeakRef | int | None] = []
        # Gradients that were there when the step began: they are where the user wants them.
        self._present: set[int] = set()
        self._adds: set[int] = set()  # the last result was not zeroed, and this step adds to it
        self._shown: dict[int, TensorWeakRef] = {}  # results that are in `main_grad`, too
        self.follow()

    def follow(self) -> None:
        """Takes the present tensors of the parameters."""
        self._live = [p.tensor for p in self.parameters]
        self._has_dtensors = any(map(is_dtensor, self._live))
        self._hooks = list[Hook]()
        for number, tensor in enumerate(self._live) if self._main_grad is not None else ():
            self._hooks.append(hook := Hook(tensor))
            hook.run(taking(number, weakref.ref(self)))

    def unfollow(self) -> None:
        """Removes all hooks."""
        self._hooks = []

    def take(self, number: int) -> None:
        """Adds a gradient to ``main_grad``."""
        if self._is_open and self._main_grad is not None:
            take_gradient(self._live[number], self._main_grad.dtype)

    def _set(self, number: int, gradient: torch.Tensor | None) -> None:
        set_gradient(self._live[number], gradient, self._main_grad)

    def check(self, *, continuing: bool) -> None:
        """Looks what is there of earlier steps; see `GradientBucket.check`."""
        present = gradients_of(self._live, self._main_grad)
        self._before = present if set(map(type, present)) != NOTHING else None
        if continuing:
            return
        if not self._are_alike:
            self._adds = {
                number
                for number in range(len(self._results))
                if self._is_last(number, self._result(number, present))
            }
        for number, shown in self._shown.items():
            if present[number] is not None and present[number] is shown():
                present[number] = None  # no gradient of this step

    def _result(self, number: int, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        main_shard = self._main_shards[number]
        return gradients[number] if main_shard is None else main_shard.tensor.grad

    def _is_last(self, number: int, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient is the result of the last step."""
        last = self._results[number]
        if gradient is None or last is None:
            return False
        return id(gradient) == last if isinstance(last, int) else gradient is last()

    def refuse_values(self) -> None:
        """Refuses gradients that this step would divide once more."""
        for number, gradient in enumerate(self._before or ()):
            if gradient is not None:
                refuse_value(self.parameters[number].record.key, gradient)

    def begin(self, divisor: float, *, continuing: bool) -> None:
        """Starts a step, or continues it; see `GradientBucket.begin`.

        Sync: on the current stream. It may scale gradients of earlier steps.
        """
        for number in self._shown if not continuing else ():
            if self._before is None or self._before[number] is None:
                self._set(number, None)
        self._shown = {} if not continuing else self._shown
        self._present = set()
        for number, gradient in enumerate(self._before or ()):
            if gradient is None:
                continue
            self._present.add(number)
            fixed = self._fixed_divisors[number]
            # A result was divided. One that the user has set is not divided by the step's divisor.
            before = fixed * self._divisor if continuing else 1.0 if number in self._adds else fixed
            if before != divisor * fixed:
                with torch.no_grad():
                    gradient.mul_(divisor * fixed / before)
        self._before, self._results, self._divisor, self._is_open = None, [], divisor, True

    def late(self) -> None:
        """Moves what was computed without hooks. Until the step ends, nothing here is too late."""
        for number, tensor in enumerate(self._live) if self._main_grad is not None else ():
            if tensor.grad is not None:
                self.take(number)
        for tensor in self._live if self._has_dtensors else ():
            redistribute_gradient(tensor)

    def finish(self, divisor: torch.Tensor | None) -> None:
        """Divides the gradients, and gives them to what the optimizer updates.

        Args:
            divisor: That of the whole step, if it is known only at its end.

        Sync: on the current stream.
        """
        self._is_open = False
        gradients = gradients_of(self._live, self._main_grad)
        by = {fixed: self._divisor * fixed for fixed in {*self._fixed_divisors}}
        if divisor is not None or any(factor != 1 for factor in by.values()):
            self._part(gradients)
            parts = [None if g is None else local(g) for g in gradients]
            if divisor is not None:
                divide_([part for part in parts if part is not None], divisor)
            for fixed, factor in by.items():
                some = zip(parts, self._fixed_divisors, strict=True)
                if factor != 1:
                    _divide([g for g, o in some if g is not None and o == fixed], factor)
        for number, main_shard in enumerate(self._main_shards):
            if main_shard is not None:
                self._give(number, main_shard, gradients[number])
        self.note_results()

    def _give(self, number: int, main_shard: MainParameter, gradient: torch.Tensor | None) -> None:
        """Gives a result to the main parameter, and leaves it in ``main_grad`` for users."""
        adds = number in self._adds
        main_shard.set_grad(gradient, adds=adds)
        if self._main_grad is None:
            self._set(number, None)
            return
        if adds and main_shard.tensor.grad is not None:
            gradient = main_shard.tensor.grad.detach().to(self._main_grad.dtype)
            self._set(number, gradient)
        if gradient is not None:
            self._shown[number] = TensorWeakRef(gradient)

    def _part(self, gradients: list[torch.Tensor | None]) -> None:
        """Copies gradients that share memory, before each is divided."""
        # Autograd may give two parameters, such as the terms of a sum, views of one gradient.
        taken = set[int]()
        for number, gradient in enumerate(gradients):
            if gradient is None or gradient.layout != torch.strided or is_dtensor(gradient):
                continue
            address = gradient.untyped_storage().data_ptr()
            if address in taken and number not in self._present:
                copied = gradients[number] = gradient.clone()
                self._set(number, copied)
            taken.add(address)

    def note_results(self) -> None:
        """Takes the gradients as they are now for those of the step."""
        present = gradients_of(self._live, self._main_grad)
        gradients = present
        if any(self._main_shards):
            gradients = [self._result(number, present) for number in range(len(present))]
        make = id if self._are_alike else TensorWeakRef
        self._results = [None if g is None else make(g) for g in gradients]

    def drop(self) -> None:
        """Sets all gradients to None, after a failed step: they may not be complete."""
        self._is_open, self._results, self._shown = False, [], {}
        for number, tensor in enumerate(self._live):
            self._set(number, None)
            tensor.grad = None
            if (main_shard := self._main_shards[number]) is not None:
                main_shard.set_grad(None)


def _divide(gradients: Sequence[torch.Tensor], by: float) -> None:
    dense = [gradient for gradient in gradients if gradient.layout == torch.strided]
    with torch.no_grad():
        if dense:
            torch._foreach_div_(dense, by)
        for gradient in gradients:
            if gradient.layout != torch.strided:
                gradient.div_(by)


_LEAF = "AccumulateGrad"  # the class of the node of a leaf


class LooseLeaves:
    """Refuses loose leaves; see [Note: loose leaves].

    Args:
        sync: Knows the parameters that the ranks agreed on.
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
            microbatches: Those whose backward begins here.
            roots: The results, or their gradient edges.
            passed: The arguments; a search ends at each.
        """
        if stage in self._unseen:
            return
        # Tensors of other classes may compute when they are asked for a graph, as logits of a cut.
        ends = (x for x in passed if isinstance(x, Tensor))
        for leaf in _leaves(roots, [x for x in ends if type(x) in (Tensor, nn.Parameter)]):
            if self._is_parameter(leaf):
                continue
            _, _, seen_in = self._seen.setdefault(id(leaf), (weakref.ref(leaf), stage, set()))
            seen_in.update(microbatches)

    def refuse(self, num_microbatches: int) -> None:
        """Refuses what was seen.

        Args:
            num_microbatches: A leaf that the first and the last one do not share is made in
                forward, and is theirs alone.

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
