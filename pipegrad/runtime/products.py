"""Products of a weight and something else, whose gradients of the weight wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from pipegrad.errors import StepError

LEAF = "AccumulateGrad"


class Use(NamedTuple):
    """A use of a weight, in autograd's graph.

    Attributes:
        kind: What knows it.
        node: The backward of what used it.
        edge: Where the weight's gradient goes.
        chain: The nodes that it passes on its way to the parameter.
        operand: The node's name of what the weight was multiplied with.
    """

    kind: type[WeightProduct]
    node: Node | None
    edge: GradientEdge
    chain: tuple[Node, ...]
    operand: str

    @property
    def is_packed(self) -> bool:
        """Whether saved-tensor hooks keep the operand."""
        return getattr(self.node, f"_raw_saved_{self.operand}").unpack_hook is not None


class WeightProduct(ABC):
    """A use of a weight, whose gradient waits.

    Args:
        use: What autograd knows of it.

    Attributes:
        parameter: Whose gradient this is a part of.
        gradient: Of what was made with the weight; None until autograd has come there.
        is_packed: Whether saved-tensor hooks still keep what the weight was multiplied with.
    """

    def __init__(self, use: Use) -> None:
        leaf: Any = use.chain[-1]
        self.parameter: nn.Parameter = leaf.variable
        self.gradient: Tensor | None = None
        self._use = use
        self._operand: Tensor | None = None
        self.is_packed = use.is_packed
        if not self.is_packed:
            self.unpack()

    @staticmethod
    @abstractmethod
    def waits(node: Any, chain: Sequence[Node]) -> bool:  # noqa: ANN401 - nodes are made in C++
        """Whether a use of a weight is one that is known here."""

    @abstractmethod
    def accumulate(self) -> None:
        """Multiplies, and adds to the parameter's gradient.

        Raises:
            StepError: If what the weight was multiplied with has been changed meanwhile.
        """

    def unpack(self) -> None:
        """Takes what the weight was multiplied with from its node, and lets go of the node."""
        operand: Tensor = getattr(self._use.node, f"_saved_{self._use.operand}").detach()
        self._operand, self._version = operand, operand._version
        self.is_packed = False
        self._use = self._use._replace(node=None)

    def _factors(self) -> tuple[Tensor, Tensor]:
        operand, gradient = self._operand, self.gradient
        assert operand is not None
        assert gradient is not None
        if operand._version != self._version:
            raise StepError(
                f"what a weight of shape {tuple(self.parameter.shape)} was multiplied with, of "
                f"shape {tuple(operand.shape)}, was changed in place before the weight's gradient "
                f"was computed"
            )
        return operand, gradient

    def _add(self, found: Tensor) -> None:
        """Adds what is the gradient of the weight, by the nodes between it and the parameter."""
        # Other uses may come by the same nodes.
        torch.autograd.backward(self._use.edge, found, retain_graph=True)


class _Matrices(WeightProduct):
    """Of two matrices, or batches of them."""

    weight_is_left = False

    @staticmethod
    def waits(node: Any, chain: Sequence[Node]) -> bool:  # noqa: ANN401
        del chain
        return bool(getattr(node, "_saved_alpha", 1) == 1)

    def accumulate(self) -> None:
        operand, gradient = self._factors()
        left, right = (gradient, operand.mH) if self.weight_is_left else (operand.mH, gradient)
        kinds = [kind_of(step) for step in self._use.chain]
        transposed = kinds == ["TBackward0", LEAF]  # as linear layers do
        if transposed:
            left, right = right.mT, left.mT
        if (transposed or kinds == [LEAF]) and self._adds_at_once(left, right):
            return
        self._add((left @ right).mT if transposed else left @ right)

    def _adds_at_once(self, left: Tensor, right: Tensor) -> bool:
        """Adds a product to the gradient as it is computed, without memory of its own."""
        parameter: Any = self.parameter
        grad: Tensor | None = parameter.grad
        if (
            grad is None
            or not grad.dtype == left.dtype == right.dtype
            or not grad.dim() == left.dim() == right.dim() == 2
            or grad.layout != torch.strided
            or parameter._backward_hooks
        ):
            return False
        grad.addmm_(left, right)
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            hook(parameter)
        return True


class _MatricesOnTheLeft(_Matrices):
    """Of two matrices, of which the left one is the weight."""

    weight_is_left = True


class _Convolution(WeightProduct):
    """Of an image and a kernel; grouped, dilated and transposed ones too."""

    def __init__(self, use: Use) -> None:
        names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
        self._options = [getattr(use.node, f"_saved_{name}") for name in names]
        super().__init__(use)

    @staticmethod
    def waits(node: Any, chain: Sequence[Node]) -> bool:  # noqa: ANN401
        del node
        return all(kind_of(step) in ("ToCopyBackward0", LEAF) for step in chain)  # one shape

    def accumulate(self) -> None:
        image, gradient = self._factors()
        kernel = gradient.new_empty(1).expand(self.parameter.shape)  # nobody reads it
        asked = [False, True, False]
        _, found, _ = torch.ops.aten.convolution_backward(
            gradient, image, kernel, None, *self._options, asked
        )
        self._add(found)


# Kind of node -> which of its arguments may be a weight that waits -> by what, and under what name
# the node saved the other one.
PRODUCTS: dict[str, dict[int, tuple[type[WeightProduct], str]]] = {
    "MmBackward0": {0: (_MatricesOnTheLeft, "mat2"), 1: (_Matrices, "self")},
    "BmmBackward0": {0: (_MatricesOnTheLeft, "mat2"), 1: (_Matrices, "self")},
    "AddmmBackward0": {1: (_MatricesOnTheLeft, "mat2"), 2: (_Matrices, "mat1")},
    "ConvolutionBackward0": {1: (_Convolution, "input")},
}


def kind_of(node: Node) -> str:
    """Returns what kind of node autograd says it is."""
    return type(node).__name__
