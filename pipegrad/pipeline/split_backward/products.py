"""Products of a weight and something else, whose gradients of the weight wait."""

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
        parameter: Whose gradient this is a part of.
        edge: Where the gradient of the weight goes, on its way to the parameter.
        operand: What the weight was multiplied with.
        rule: How to compute the gradient of the weight.
        is_direct: Whether nothing but a transposition is on that way: see [Note: direct].
        gradient: Of what was made with the weight; None until autograd has come there.
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
        """Copies the gradient, if it lies at one of these addresses, where others will write."""
        if self.gradient is not None and self.gradient.untyped_storage().data_ptr() in taken:
            self.keep(self.gradient.clone())

    def factors(self) -> Factors:
        """Returns what the gradient is the product of.

        Raises:
            StepError: If what it is computed from has been changed meanwhile.
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
        """Whether it may be added to the parameter's gradient as it is."""
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
    """Adds all that waits of some parameters in a microbatch to their gradients.

    Autograd brings it there, in one pass: so hooks of a parameter, and whatever else lies between
    a weight and its parameter, see the sum of all uses, as in a whole backward. Where nothing lies
    between, products are added as they are computed, without memory of their own.

    Sync: all on the current stream.
    """
    found, added = dict[GradientEdge, Tensor](), dict[int, Any]()
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
            found[edge] = found[edge] + gradient if edge in found else gradient
        for parameter in added.values():
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                hook(parameter)
        if found:  # other microbatches may come by the same nodes: casts that autocast keeps
            torch.autograd.backward(list(found), list(found.values()), retain_graph=True)


# [Note: direct] Autograd adds to a parameter's gradient in a node, which may have hooks of its own
# that nobody can ask for. It lives as long as a graph that ends in it, or whoever holds it for its
# hooks. So nodes are marked when there are no graphs, between steps, and let go of: a mark that is
# seen again in the next step tells that somebody holds the node, and all goes through it.
_MARK = "pipegrad"


def mark(parameters: Iterable[Tensor]) -> None:
    """Marks the nodes that add to parameters' gradients; to be called when there are no graphs."""
    for parameter in parameters:
        node: Any = get_gradient_edge(parameter).node
        node.metadata[_MARK] = True


def is_direct(chain: Sequence[Node]) -> bool:
    """Whether nothing but a transposition is between a weight and its parameter."""
    kinds, leaf = [kind_of(step) for step in chain], chain[-1]  # type: tuple[list[str], Any]
    return kinds in ([LEAF], ["TBackward0", LEAF]) and _MARK not in leaf.metadata


# Kinds of products.


class Rule(NamedTuple):
    """How to compute the gradient of a weight.

    Attributes:
        factors: Given operand and gradient, returns what it is the product of.
        is_transposed: Whether that is its transpose: laid out as linear layers hold their weights.
    """

    factors: Callable[[Tensor, Tensor], Factors]
    is_transposed: bool = False


class Known(NamedTuple):
    """A kind of product.

    Attributes:
        operand: The name under which its node saved what the weight was multiplied with.
        rule: Given the node, and the nodes from the weight to its parameter, returns how to compute
            the gradient of the weight; None if this product is not known after all.
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
        kernel = gradient.new_empty(1).expand(shape)  # nobody reads it
        asked = [False, True, False]
        _, found, _ = torch.ops.aten.convolution_backward(
            gradient, image, kernel, None, *options, asked
        )
        return (found,)

    return Rule(factors)


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
