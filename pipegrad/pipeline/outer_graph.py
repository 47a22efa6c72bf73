"""Outer graphs: what a step is given that has a graph of the caller's, such as an encoder's output.

The pipeline runs a backward for each microbatch, and the caller's graph can be run once. So values
are cut off their graphs, and the gradients of all microbatches go into them together, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class OuterGraphs:
    """The values of a step that were cut off their graphs."""

    def __init__(self) -> None:
        self._cut_off: list[tuple[Tensor, Sequence[Tensor]]] = []

    def microbatches(self, value: Tensor, number: int, *, whole: bool) -> Sequence[Tensor]:
        """Returns a value for each microbatch; leaves, where a gradient is to go into `value`.

        Args:
            value: What the step is given.
            number: Of microbatches.
            whole: Whether each of them gets all of it.
        """
        if not (value.requires_grad and torch.is_grad_enabled()):
            return [value] * number if whole else value.tensor_split(number)
        apart = value.detach()
        leaves = [apart] if whole else list(apart.tensor_split(number))
        for leaf in leaves:
            leaf.requires_grad_()
        self._cut_off.append((value, leaves))
        return leaves * number if whole else leaves

    def backward(self) -> None:
        """Runs one backward through what the values came from.

        Sync: on the current stream.
        """
        values, gradients = list[Tensor](), list[Tensor]()
        for value, leaves in self._cut_off:
            found = [leaf.grad for leaf in leaves]
            if any(gradient is not None for gradient in found):
                parts = [
                    torch.zeros_like(leaf) if gradient is None else gradient
                    for leaf, gradient in zip(leaves, found, strict=True)
                ]
                values.append(value)
                gradients.append(parts[0] if parts[0].shape == value.shape else torch.cat(parts))
        self.forget()
        if values:
            torch.autograd.backward(values, gradients)

    def forget(self) -> None:
        """Lets go of everything of a step."""
        self._cut_off = []
