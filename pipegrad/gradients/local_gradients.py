"""Gradients that no other rank has: they stay where autograd adds to them, and are divided.

[Note: loose leaves] A loss may have parameters of its own, and a module may keep a tensor or a
layer in a list. Nobody divides or reduces their gradients, so they are refused. Nobody declares
them: they are looked for in autograd's graphs, in each loss, and in whole stages in the steps 1, 2,
4, 8 and so on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import TensorWeakRef

from pipegrad.errors import StepError
from pipegrad.gradients.bucket import NOTHING, Hook, refuse_value
from pipegrad.gradients.careful import ShownResults
from pipegrad.gradients.norm import divide_
from pipegrad.gradients.parameter import LiveParameter
from pipegrad.model.dtensor import is_dtensor, is_misplaced, redistribute_gradient
from pipegrad.model.gradient_storage import GradAttribute, GradientAccessor
from pipegrad.model.wrappers import fsdp_modules

if TYPE_CHECKING:
    from pipegrad.gradients.sync import GradientSync


class LocalGradients:
    """The gradients of this rank that nobody reduces.

    Args:
        parameters: That are trained.
        accessor: Where their gradients live.
        divisors: Each gradient is divided by this, besides the divisor of each step.
    """

    def __init__(
        self,
        parameters: Sequence[LiveParameter],
        accessor: GradientAccessor,
        divisors: Sequence[float],
    ) -> None:
        self.parameters = parameters
        self._accessor = accessor
        self._fixed_divisors = divisors
        self._main_shards = [p.main_shard for p in parameters]
        self._is_attribute = isinstance(accessor, GradAttribute)
        self._is_open = False
        self._before: list[torch.Tensor | None] | None = None
        self._divisor = 1.0
        # References to the results of the last step, and their versions. Weak references: a
        # gradient that the user drops must be freed before the next step. Where a result and what
        # the user sets are treated alike, an id will do: it is cheaper, and used once more later.
        self._are_alike = not any(self._main_shards) and {*divisors} <= {1.0}
        self._results: list[TensorWeakRef | int | None] = []
        self._result_versions: list[int] = []
        # Gradients that were there when the step began: they are where the user wants them.
        self._present: set[int] = set()
        self._adds: set[int] = set()  # the last result was not zeroed, and this step adds to it
        self._shown = ShownResults(accessor)
        self.follow()

    def follow(self) -> None:
        """Takes the present tensors of the parameters. An accessor needs a hook on each."""
        self._live = [p.live for p in self.parameters]
        # Only DTensors, and gradients elsewhere, are read by the accessor.
        self._is_plain = self._is_attribute and not any(map(is_dtensor, self._live))
        self._hooks = [] if self._is_attribute else [Hook(tensor) for tensor in self._live]
        for number, hook in enumerate(self._hooks):
            hook.run(_accumulating(number, weakref.ref(self)))

    def unfollow(self) -> None:
        """Removes all hooks."""
        self._hooks = []

    def accumulated(self, number: int) -> None:
        """Called by a hook: the accessor moves a gradient."""
        if self._is_open:
            self._accessor.accumulated(self._live[number])

    def _read_all(self) -> list[torch.Tensor | None]:
        if self._is_plain:
            return [tensor.grad for tensor in self._live]
        return [
            tensor.grad if is_misplaced(tensor) else self._accessor.read(tensor)
            for tensor in self._live
        ]

    def check(self, *, continuing: bool) -> None:
        """Looks what is there of earlier steps; see `GradientBucket.check`."""
        present = self._read_all()
        self._before = present if set(map(type, present)) != NOTHING else None
        if continuing:
            return
        if not self._are_alike:
            self._adds = {
                number
                for number in range(len(self._results))
                if self._is_last(number, self._result(number, present))
            }
        self._shown.leave_out(present)

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
        if not continuing:
            self._shown.drop(self._live)
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

    def claim(self, number: int) -> torch.Tensor | None:
        """Returns new memory for a caller that writes a first gradient; None if it may not."""
        tensor = self._live[number]
        if not self._is_plain or not self._is_open or tensor.grad is not None:
            return None
        return torch.empty_like(tensor, dtype=self._accessor.dtype(tensor))

    def late(self) -> None:
        """Moves what was computed without hooks. Until the step ends, nothing here is too late."""
        for tensor in self._live if not self._is_plain else ():
            if tensor.grad is not None and not self._is_attribute:
                self._accessor.accumulated(tensor)
            if is_misplaced(tensor):
                redistribute_gradient(tensor)

    def finish(self, divisor: torch.Tensor | None) -> None:
        """Divides the gradients, and gives them to what the optimizer updates.

        Args:
            divisor: That of the whole step, if it is known only at its end.

        Sync: on the current stream.
        """
        self._is_open = False
        gradients = self._read_all()
        by = {fixed: self._divisor * fixed for fixed in {*self._fixed_divisors}}
        if divisor is not None or any(factor != 1 for factor in by.values()):
            self._part(gradients)
            if divisor is not None:
                divide_([g for g in gradients if g is not None], divisor)
            for fixed, factor in by.items():
                some = zip(gradients, self._fixed_divisors, strict=True)
                if factor != 1:
                    _divide([g for g, o in some if g is not None and o == fixed], factor)
        for number, main_shard in enumerate(self._main_shards):
            if main_shard is not None:
                adds = number in self._adds
                main_shard.take(gradients[number], adds=adds)
                if adds and main_shard.tensor.grad is not None and not self._is_attribute:
                    shown = main_shard.tensor.grad.detach()
                    tensor = self._live[number]
                    self._accessor.write(tensor, shown.to(self._accessor.dtype(tensor)))
                self._shown.show(number, self._live[number])
        self.note_results()

    def _part(self, gradients: list[torch.Tensor | None]) -> None:
        """Copies gradients that share memory, before each is divided."""
        # Autograd may give two parameters, such as the terms of a sum, views of one gradient.
        taken = set[int]()
        for number, gradient in enumerate(gradients):
            if gradient is None or gradient.layout != torch.strided:
                continue
            address = gradient.untyped_storage().data_ptr()
            if address in taken and number not in self._present:
                copied = gradients[number] = gradient.clone()
                self._accessor.write(self._live[number], copied)
            taken.add(address)

    def note_results(self) -> None:
        """Takes the gradients as they are now for those of the step."""
        present = self._read_all()
        gradients = present
        if any(self._main_shards):
            gradients = [self._result(number, present) for number in range(len(present))]
        make = id if self._are_alike else TensorWeakRef
        self._results = [None if g is None else make(g) for g in gradients]
        self._result_versions = [-1 if g is None else g._version for g in gradients]

    def result(self, number: int) -> torch.Tensor | None:
        """Returns what this rank's optimizer steps with."""
        return self.parameters[number].main_gradient

    def changed_result(self) -> list[str]:
        """Returns the parameter whose result somebody has written since, or replaced."""
        for number, last in enumerate(self._results):
            gradient = self.result(number)
            if gradient is None or last is None:
                continue
            is_same = gradient._version == self._result_versions[number]
            if not (is_same and self._is_last(number, gradient)):
                return [self.parameters[number].record.key]
        return []

    def drop(self) -> None:
        """Sets all gradients to None, after a failed step: they may not be complete."""
        self._is_open, self._results = False, []
        for number, tensor in enumerate(self._live):
            self._accessor.write(tensor, None)
            tensor.grad = None
            if (main_shard := self._main_shards[number]) is not None:
                main_shard.take(None)


def _divide(gradients: Sequence[torch.Tensor], by: float) -> None:
    dense = [gradient for gradient in gradients if gradient.layout == torch.strided]
    with torch.no_grad():
        if dense:
            torch._foreach_div_(dense, by)
        for gradient in gradients:
            if gradient.layout != torch.strided:
                gradient.div_(by)


def _accumulating(
    number: int, called: weakref.ref[LocalGradients]
) -> Callable[[nn.Parameter], None]:
    def accumulate(_: nn.Parameter) -> None:
        if (gradients := called()) is not None:
            gradients.accumulated(number)

    return accumulate


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
        roots: Sequence[Tensor],
        passed: Iterable[object],
    ) -> None:
        """Looks for loose leaves between the results of a stage, or its loss, and their arguments.

        Args:
            stage: The stage.
            microbatches: Those whose backward begins here.
            roots: The results.
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


def _leaves(roots: Sequence[Tensor], ends: Sequence[Tensor]) -> list[Tensor]:
    """Returns the leaves of a graph that get a gradient; does not look beyond some tensors."""
    seen: set[Any] = {get_gradient_edge(end).node for end in ends if end.requires_grad}
    nodes = [get_gradient_edge(root).node for root in roots if root.requires_grad]
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
