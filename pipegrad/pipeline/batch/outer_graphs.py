"""Outer graphs: inputs and targets that come from a graph of the caller's.

[Note: outer graphs] An input may have a graph of the caller's, such as an encoder's output. The
pipeline runs a backward for each microbatch, and the caller's graph can be run only once. So such a
value is cut off its graph. The gradients of all microbatches go into the graph together, when the
step ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def has_graph(leaf: object) -> bool:
    """Returns whether a leaf is a tensor that is to get a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()


class OuterGraphs:
    """The values of a step that were cut off their graphs; see [Note: outer graphs].

    Attributes:
        leaves: What stages read instead, by name and microbatch; the same table in all steps.
    """

    def __init__(self) -> None:
        self.leaves: dict[str, dict[int, list[Tensor]]] = {}
        self._cut_off: list[tuple[Tensor, Sequence[Tensor]]] = []

    def microbatches(
        self, name: str, value: Tensor, microbatches: Sequence[int], *, whole: bool
    ) -> Sequence[Tensor]:
        """Returns a tensor for each microbatch; they are leaves if `value` requires a gradient.

        Args:
            name: The input whose tensor it is, or "target".
            value: What the step is given.
            microbatches: Their numbers.
            whole: Whether each of them gets all of the value.
        """
        number = len(microbatches)
        if not has_graph(value):
            return [value] * number if whole else value.tensor_split(number)
        detached = value.detach()
        leaves = [detached] if whole else list(detached.tensor_split(number))
        for leaf in leaves:
            leaf.requires_grad_()
        self._cut_off.append((value, leaves))
        parts = leaves * number if whole else leaves
        by_microbatch = self.leaves.setdefault(name, {})
        for microbatch, part in zip(microbatches, parts, strict=True):
            by_microbatch.setdefault(microbatch, []).append(part)
        return parts

    @property
    def is_empty(self) -> bool:
        """Whether no value of the step came from a graph."""
        return not self._cut_off

    def backward(self, divisor: Tensor | float) -> None:
        """Runs one backward through the graphs that the values came from.

        Args:
            divisor: What the gradients of all microbatches are still to be divided by.

        Sync: on the current stream.
        """
        values, gradients = list[Tensor](), list[Tensor]()
        for value, leaves in self._cut_off:
            leaf_gradients = [leaf.grad for leaf in leaves]
            if any(gradient is not None for gradient in leaf_gradients):
                # No microbatch may be missing: `value` has one gradient, of its own shape.
                parts = [
                    torch.zeros_like(leaf) if gradient is None else gradient
                    for leaf, gradient in zip(leaves, leaf_gradients, strict=True)
                ]
                values.append(value)
                gradient = parts[0] if parts[0].shape == value.shape else torch.cat(parts)
                gradients.append(gradient / divisor)
        self.forget()
        if values:
            torch.autograd.backward(values, gradients)

    def forget(self) -> None:
        """Lets go of everything of a step."""
        self.leaves.clear()
        self._cut_off = []
