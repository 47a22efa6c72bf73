"""Products of a weight and an operand. The gradient of the weight is a product too, and waits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipegrad.errors import StepError

LEAF = "AccumulateGrad"
Factors = tuple[Tensor, ...]  # one, or two to be multiplied


@dataclass(slots=True)
class WeightProduct:
    """A use of a weight, whose gradient waits.

    Attributes:
        parameter: The parameter that the weight is made of.
        edge: The edge of autograd's graph by which the weight's gradient goes to the parameter.
        operand: The factor that the weight was multiplied with.
        rule: How to compute the gradient of the weight.
        is_direct: Whether that way has at most a transposition: see [Note: direct].
        gradient: The gradient of the forward's product; None until autograd has computed it.
    """

    parameter: nn.Parameter
    edge: GradientEdge
    operand: Tensor
    rule: Rule
    is_direct: bool
    gradient: Tensor | None = None
    _operand_version: int = field(init=False)
    _gradient_version: int = field(init=False)

    def __post_init__(self) -> None:
        self._operand_version = self.operand._version

    def keep(self, gradient: Tensor) -> None:
        """Takes the gradient, to multiply it later."""
        self.gradient = gradient
        self._gradient_version = gradient._version

    def keep_apart(self, taken: Collection[int]) -> None:
        """Copies the gradient if it lies at one of these addresses, which will be overwritten."""
        if self.gradient is not None and self.gradient.untyped_storage().data_ptr() in taken:
            self.keep(self.gradient.clone())

    def factors(self) -> Factors:
        """Returns the factors of the weight's gradient.

        Raises:
            StepError: If one of them has been changed in place meanwhile.
        """
        assert self.gradient is not None
        versions = self.operand._version, self.gradient._version
        if versions != (self._operand_version, self._gradient_version):
            raise StepError(
                f"what a weight of shape {tuple(self.parameter.shape)} was multiplied with, of "
                f"shape {tuple(self.operand.shape)}, or the gradient of what that made, was "
                f"changed in place before the weight's gradient was computed"
            )
        return self.rule.factors(self.operand, self.gradient)

    @property
    def adds_directly(self) -> bool:
        """Whether the product may be added to the parameter's gradient without autograd."""
        grad = self.parameter.grad
        return (
            self.is_direct
            and grad is not None
            and grad.dim() == self.operand.dim() == 2
            and grad.dtype == self.operand.dtype
            and grad.layout == torch.strided
            and not self.parameter._backward_hooks
        )


def accumulate(products: Sequence[WeightProduct]) -> None:
    """Adds the waiting products of some parameters in a microbatch to their gradients.

    One pass of autograd adds them. So hooks of a parameter, and all nodes between a weight and its
    parameter, see the sum of all uses, as in a whole backward. If nothing is between the two, a
    product is added while it is computed, without memory of its own.

    Sync: all on the current stream.
    """
    by_edge, added = dict[GradientEdge, Tensor](), dict[int, Any]()
    indirect = {id(product.parameter) for product in products if not product.adds_directly}
    with torch.no_grad():
        for product in products:
            parameter, edge, factors = product.parameter, product.edge, product.factors()
            if id(parameter) not in indirect:
                assert parameter.grad is not None
                parameter.grad.addmm_(*factors)
                added[id(parameter)] = parameter
                continue
            gradient = factors[0] if len(factors) == 1 else factors[0] @ factors[1]
            if product.rule.is_transposed:
                gradient = gradient.mT
            by_edge[edge] = by_edge[edge] + gradient if edge in by_edge else gradient
        for parameter in added.values():
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                hook(parameter)
        if by_edge:
            # Microbatches may share nodes, such as casts that autocast keeps. So the graph stays.
            torch.autograd.backward(list(by_edge), list(by_edge.values()), retain_graph=True)


# [Note: direct] Autograd adds to a parameter's gradient in a node. The node may have hooks of its
# own, and torch has no way to list them. Whoever wants hooks there must hold the node, or it dies
# with the last graph that ends in it. So nodes are marked between steps, when there are no graphs,
# and not held. If the mark is still there in the next step, then somebody holds the node, and its
# gradients go through it. If the mark is gone, the node is new and has no hooks.
_MARK = "pipegrad"


def mark(parameters: Iterable[Tensor]) -> None:
    """Marks the nodes that add to parameters' gradients; call it when there are no graphs."""
    for parameter in parameters:
        node: Any = get_gradient_edge(parameter).node
        node.metadata[_MARK] = True


def is_direct(chain: Sequence[Node]) -> bool:
    """Whether there is at most a transposition between a weight and its parameter, and no mark."""
    kinds, leaf = [kind_of(step) for step in chain], chain[-1]  # type: tuple[list[str], Any]
    return kinds in ([LEAF], ["TBackward0", LEAF]) and _MARK not in leaf.metadata


# Kinds of products.


class Rule(NamedTuple):
    """How to compute the gradient of a weight.

    Attributes:
        factors: Takes operand and gradient, returns the factors of the weight's gradient.
        is_transposed: Whether their product is its transpose, as linear layers hold their weights.
    """

    factors: Callable[[Tensor, Tensor], Factors]
    is_transposed: bool = False


class Known(NamedTuple):
    """A kind of product.

    Attributes:
        operand: The name under which its node saved the factor that is no weight.
        rule: Takes the node, and the nodes from the weight to its parameter. Returns how to compute
            the gradient of the weight; None if this product cannot wait.
    """

    operand: str
    rule: Callable[[Any, Sequence[Node]], Rule | None]


def _on_the_right(node: Any, chain: Sequence[Node]) -> Rule | None:  # noqa: ANN401
    if getattr(node, "_saved_alpha", 1) != 1:
        return None
    if kind_of(chain[0]) == "TBackward0":
        return Rule(lambda operand, gradient: (gradient.mT, operand.conj()), is_transposed=True)
    return Rule(lambda operand, gradient: (operand.mH, gradient))


def _on_the_left(node: Any, chain: Sequence[Node]) -> Rule | None:  # noqa: ANN401
    if getattr(node, "_saved_alpha", 1) != 1:
        return None
    if kind_of(chain[0]) == "TBackward0":
        return Rule(lambda operand, gradient: (operand.conj(), gradient.mT), is_transposed=True)
    return Rule(lambda operand, gradient: (gradient, operand.mH))


def _kernel(node: Any, chain: Sequence[Node]) -> Rule | None:  # noqa: ANN401
    if any(kind_of(step) not in ("ToCopyBackward0", LEAF) for step in chain):
        return None  # the kernel may have another shape than the parameter
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    options = [getattr(node, f"_saved_{name}") for name in names]
    leaf: Any = chain[-1]
    shape = leaf.variable.shape

    def factors(image: Tensor, gradient: Tensor) -> Factors:
        kernel = gradient.new_empty(1).expand(shape)  # only its shape is read
        output_mask = [False, True, False]  # the gradient of the kernel alone
        _, gradient_of_kernel, _ = torch.ops.aten.convolution_backward(
            gradient, image, kernel, None, *options, output_mask
        )
        return (gradient_of_kernel,)

    return Rule(factors)


# Kind of node -> which of its arguments may be a weight that waits.
PRODUCTS: dict[str, dict[int, Known]] = {
    "MmBackward0": {0: Known("mat2", _on_the_left), 1: Known("self", _on_the_right)},
    "BmmBackward0": {0: Known("mat2", _on_the_left), 1: Known("self", _on_the_right)},
    "AddmmBackward0": {1: Known("mat2", _on_the_left), 2: Known("mat1", _on_the_right)},
    "ConvolutionBackward0": {1: Known("input", _kernel)},
}


def kind_of(node: Node) -> str:
    """Returns the kind of a node, which is the name of its class."""
    return type(node).__name__
