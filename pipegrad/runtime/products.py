"""Products of a weight and something else, whose gradients of the weight wait."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from pipegrad.errors import StepError

LEAF = "AccumulateGrad"


@dataclass(slots=True)
class WeightProduct:
    """A use of a weight, whose gradient waits.

    Attributes:
        parameter: Whose gradient this is a part of.
        edge: Where the gradient of the weight goes, on its way to the parameter.
        operand: What the weight was multiplied with.
        multiply: Returns the gradient of the weight, given operand and gradient.
        gradient: Of what was made with the weight; None until autograd has come there.
    """

    parameter: nn.Parameter
    edge: GradientEdge
    operand: Tensor
    multiply: Callable[[Tensor, Tensor], Tensor]
    gradient: Tensor | None = None
    _versions: tuple[int, int] = field(default=(0, 0), init=False)

    def keep(self, gradient: Tensor) -> None:
        """Takes the gradient, to multiply it later."""
        self.gradient = gradient
        self._versions = self.operand._version, gradient._version

    def keep_apart(self, taken: Collection[int]) -> None:
        """Copies the gradient, if it lies at one of these addresses, where others will write."""
        if self.gradient is not None and self.gradient.untyped_storage().data_ptr() in taken:
            self.keep(self.gradient.clone())

    def weight_gradient(self) -> Tensor:
        """Returns the gradient of the weight.

        Raises:
            StepError: If what it is computed from has been changed meanwhile.
        """
        assert self.gradient is not None
        if (self.operand._version, self.gradient._version) != self._versions:
            raise StepError(
                f"what a weight of shape {tuple(self.parameter.shape)} was multiplied with, of "
                f"shape {tuple(self.operand.shape)}, or the gradient of what that made, was "
                f"changed in place before the weight's gradient was computed"
            )
        return self.multiply(self.operand, self.gradient)


def accumulate(products: Sequence[WeightProduct]) -> None:
    """Adds all that waits of some parameters in a microbatch to their gradients.

    Autograd brings it there, in one pass: so hooks of a parameter, and whatever else lies between
    a weight and its parameter, see the sum of all uses, as in a whole backward.

    Sync: all on the current stream.
    """
    found: dict[GradientEdge, Tensor] = {}
    with torch.no_grad():
        for product in products:
            gradient = product.weight_gradient()
            edge = product.edge
            found[edge] = found[edge] + gradient if edge in found else gradient
        # Other microbatches may come by the same nodes: casts that autocast keeps.
        torch.autograd.backward(list(found), list(found.values()), retain_graph=True)


# Kinds of products.


class Known(NamedTuple):
    """A kind of product.

    Attributes:
        operand: The name under which its node saved what the weight was multiplied with.
        multiplier: Given the node, and the nodes from the weight to its parameter, returns what
            computes the gradient of the weight; None if this product is not known after all.
    """

    operand: str
    multiplier: Callable[[Any, Sequence[Node]], Callable[[Tensor, Tensor], Tensor] | None]


def _on_the_right(node: Any, chain: Sequence[Node]) -> Callable[[Tensor, Tensor], Tensor] | None:  # noqa: ANN401
    if getattr(node, "_saved_alpha", 1) != 1:
        return None
    if kind_of(chain[0]) == "TBackward0":  # a linear layer's: laid out like the parameter
        return lambda operand, gradient: (gradient.mT @ operand.conj()).mT
    return lambda operand, gradient: operand.mH @ gradient


def _on_the_left(node: Any, _: Sequence[Node]) -> Callable[[Tensor, Tensor], Tensor] | None:  # noqa: ANN401
    if getattr(node, "_saved_alpha", 1) != 1:
        return None
    return lambda operand, gradient: gradient @ operand.mH


def _kernel(node: Any, chain: Sequence[Node]) -> Callable[[Tensor, Tensor], Tensor] | None:  # noqa: ANN401
    if any(kind_of(step) not in ("ToCopyBackward0", LEAF) for step in chain):
        return None  # the kernel may have another shape than the parameter
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    options = [getattr(node, f"_saved_{name}") for name in names]
    leaf: Any = chain[-1]
    shape = leaf.variable.shape

    def multiply(image: Tensor, gradient: Tensor) -> Tensor:
        kernel = gradient.new_empty(1).expand(shape)  # nobody reads it
        asked = [False, True, False]
        _, found, _ = torch.ops.aten.convolution_backward(
            gradient, image, kernel, None, *options, asked
        )
        return found  # type: ignore[no-any-return]

    return multiply


# Kind of node -> which of its arguments may be a weight that waits.
PRODUCTS: dict[str, dict[int, Known]] = {
    "MmBackward0": {0: Known("mat2", _on_the_left), 1: Known("self", _on_the_right)},
    "BmmBackward0": {0: Known("mat2", _on_the_left), 1: Known("self", _on_the_right)},
    "AddmmBackward0": {1: Known("mat2", _on_the_left), 2: Known("mat1", _on_the_right)},
    "ConvolutionBackward0": {1: Known("input", _kernel)},
}


def kind_of(node: Node) -> str:
    """Returns what kind of node autograd says it is."""
    return type(node).__name__
