"""Split backward: the gradients of a stage's inputs now, the gradients of its weights later.

[Note: what waits] The gradients of weight matrices are products. They are a third of a step's
compute, and no other stage needs them. `backward_inputs` runs everything except these products, in
one pass of autograd that frees its graph, and keeps their two factors. `accumulate` multiplies
them. Nothing is computed twice. Uses of a weight may be many, nested, or shared by stages, because
each use is a product of its own.

Everything else, such as biases, norms and embeddings, costs little and does not wait. If a weight
goes into an autograd function or a compiled module, its gradient is computed at once, and is right
too. The head of `chunked_cross_entropy`, which is such a function, waits all the same. Weights in a
checkpoint do not wait: it would have to run its forward once more. For such a stage,
`Stage(recompute=True)` does both.

A product waits if two things hold. From its weight to a parameter there are only nodes with one
successor, such as views and casts. And everything that uses the parameter waits. Modules may use
their weights in any way, because both are read from autograd's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.torch_version import TorchVersion

from pipegrad.errors import StepError
from pipegrad.interop.private import accumulate_hooks, has_gradient_hooks
from pipegrad.losses import HeadLoss, by_head

PACKED = "saved-tensor hooks (checkpointing, offloading)"
# Whether a backward can begin at an autograd function.
_BEGINS_AT_FUNCTIONS = TorchVersion(torch.__version__) >= "2.13"
# A lookup makes a value, not a weight. The others can run only as part of a whole backward.
_REENTRANT = "CheckpointFunction"
_NOT_IN_CHAINS = ("Embedding", "Index", "Gather", "CompiledFunction", _REENTRANT)


@dataclass(frozen=True)
class Waiting:
    """The part of a microbatch's backward that waits.

    Attributes:
        products: Products, in the order in which autograd reached them.
        early: Names of nodes whose weights cannot wait.
    """

    products: list[WeightProduct]
    early: tuple[str, ...] = ()


def backward_inputs(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    parameters: Collection[int],
    marked: Collection[int] = (),
) -> Waiting:
    """Runs a backward, all but the products that can wait: see [Note: what waits].

    Args:
        roots: The outputs of the forward.
        gradients: The gradients of the roots.
        parameters: Ids of the parameters whose gradients may wait.
        marked: Ids of those that were marked when there were no graphs: see [Note: direct].

    Sync: as `torch.autograd.backward`.
    """
    leaves, waiting, early = _explore(roots, parameters, marked)
    now = [node.variable for node in leaves]
    # A leaf that autograd reaches by another way gets a gradient now. Then none of its uses waits,
    # because its hooks must see one sum.
    ids = set(map(id, now))
    waiting = [each for each in waiting if id(each[1].parameter) not in ids]
    if not waiting:
        torch.autograd.backward(roots, gradients)
        return Waiting([], early)
    arrived = list[WeightProduct]()
    # A node computes the gradient of an argument only if that leads to a needed node. The leaves of
    # waiting weights are not needed, and their products are not computed. The nodes of products are
    # needed themselves, because some of them may lead to nothing else.
    bare = [leaf for leaf in now if leaf.grad is None]
    for node, _ in waiting:
        if issubclass(type(node), BackwardCFunction):  # it cannot see which gradients are needed
            node.weight_waits = True
    hooks = [node.register_prehook(partial(_arrive, product, arrived)) for node, product in waiting]
    try:
        edges = [GradientEdge(node, 0) for node in (*leaves, *(node for node, _ in waiting))]
        torch.autograd.backward(roots, gradients, inputs=edges)
    finally:
        for hook in hooks:
            hook.remove()  # a node may outlive its graph
    # A new gradient may lie in the memory of a waiting factor, and will be added to in place.
    taken = {
        leaf.grad.untyped_storage().data_ptr()
        for leaf in bare
        if leaf.grad is not None and leaf.grad.layout == torch.strided
    }
    for product in arrived if taken else ():
        gradient = product.gradient
        if gradient is not None and gradient.untyped_storage().data_ptr() in taken:
            product.keep(gradient.clone())
    return Waiting(arrived, early)


def _arrive(
    product: WeightProduct, arrived: list[WeightProduct], gradients: tuple[Tensor | None, ...]
) -> None:
    """Keeps the gradient of a node's output; autograd calls it right before it runs the node."""
    if (gradient := gradients[0]) is not None:
        product.keep(gradient)
        arrived.append(product)


def _explore(
    roots: Sequence[Tensor], parameters: Collection[int], marked: Collection[int]
) -> tuple[list[Any], list[tuple[Any, WeightProduct]], tuple[str, ...]]:
    """Finds in autograd's graph the leaves of a backward, and the products that can wait.

    Returns:
        The nodes of leaves that get their gradients at once; each product that can wait, with the
        node of the forward's product; and `Waiting.early`.
    """
    # This loop sees every node of every microbatch, and Python's time there counts.
    leaves, waiting = list[Any](), list[tuple[Any, WeightProduct]]()
    early = dict[str, None]()
    stack = list(dict.fromkeys(get_gradient_edge(root).node for root in roots))
    seen = set(stack)
    while stack:
        node = stack.pop()
        name = type(node).__name__
        if name == LEAF:
            leaves.append(node)
            continue
        successors: Sequence[tuple[Any, int]] = node.next_functions
        if name in PRODUCTS:
            products, successors = _split(node, PRODUCTS[name], parameters, marked, early)
            waiting += products
        elif issubclass(type(node), BackwardCFunction):
            # A reentrant checkpoint is part of whole backwards alone. Others may take parameters.
            is_reentrant = _REENTRANT in name
            if is_reentrant or any(_chain(other, parameters) for other, _ in successors):
                early[name] = None
        for successor, _ in successors:
            if successor is not None and successor not in seen:
                seen.add(successor)
                stack.append(successor)
    if any(_REENTRANT in name for name in early):
        waiting.clear()
    return leaves, waiting, tuple(early)


def _split(
    node: Any,  # noqa: ANN401 - its attributes are made in C++
    rules: Sequence[Rule],
    parameters: Collection[int],
    marked: Collection[int],
    early: dict[str, None],
) -> tuple[list[tuple[Any, WeightProduct]], Sequence[tuple[Any, int]]]:
    """Returns the products of a node that may wait, and the edges of everything else."""
    edges: Sequence[tuple[Any, int]] = node.next_functions
    products, successors = list[tuple[Any, WeightProduct]](), edges
    for rule in rules:
        edge = edges[rule.argument]
        chain = _chain(edge[0], parameters)
        if not chain:
            continue
        if rule.raw_operand(node).unpack_hook is not None:
            early[PACKED] = None  # a rule may read saved tensors, and would unpack them
        elif (factors := rule.factors(node, chain)) is None:
            continue
        elif not _BEGINS_AT_FUNCTIONS and issubclass(type(edge[0]), BackwardCFunction):
            early["an autograd function of a weight, before torch 2.13"] = None
        else:
            parameter, operand = chain[-1].variable, rule.operand(node).detach()
            is_transposed = type(chain[0]).__name__ == TRANSPOSED
            is_direct = id(parameter) in marked and len(chain) == 1 + is_transposed
            is_direct = is_direct and _MARK not in chain[-1].metadata
            product = WeightProduct(
                parameter,
                None if is_direct else edge,
                operand,
                operand._version,
                factors,
                is_transposed,
            )
            products.append((node, product))
            successors = [other for other in successors if other is not edge]
    return products, successors


def _chain(node: Any, parameters: Collection[int]) -> tuple[Any, ...]:  # noqa: ANN401 - a node
    """Returns the nodes from a weight to its parameter; none if it is not made of one alone."""
    chain = list[Any]()
    while node is not None:
        chain.append(node)
        name = type(node).__name__
        if name == LEAF:
            return tuple(chain) if id(node.variable) in parameters else ()
        if name in PRODUCTS or name.startswith(_NOT_IN_CHAINS):
            return ()
        successors = node.next_functions
        if len(successors) != 1:
            successors = tuple(edge for edge in successors if edge[0] is not None)
            if len(successors) != 1:
                return ()
        node = successors[0][0]
    return ()


LEAF, TRANSPOSED = "AccumulateGrad", "TBackward0"
Factors = tuple[Tensor, ...]  # one, or two to be multiplied
# Returns the factors of a weight's gradient. Takes the factor that is no weight, the gradient of
# the product, and whether the result is transposed, as linear layers hold their weights.
FactorsOf = Callable[[Tensor, Tensor, bool], Factors]


@dataclass(slots=True, eq=False)
class WeightProduct:
    """A use of a weight, whose gradient waits.

    It refers to few other objects, because many products wait at once and Python's garbage
    collector looks at them all.

    Attributes:
        parameter: The parameter that the weight is made of.
        edge: The edge of autograd's graph by which the weight's gradient goes to the parameter.
            None if that way has at most a transposition, and no hooks: see [Note: direct].
        operand: The factor that the weight was multiplied with.
        factors_of: Returns the factors of the weight's gradient.
        is_transposed: Whether the way to the parameter begins with a transposition.
        gradient: The gradient of the forward's product; None until autograd has computed it.
    """

    parameter: nn.Parameter
    edge: tuple[Node, int] | None
    operand: Tensor
    operand_version: int
    factors_of: FactorsOf
    is_transposed: bool
    gradient: Tensor | None = None
    gradient_version: int = 0

    def keep(self, gradient: Tensor) -> None:
        """Keeps the gradient, to multiply it later."""
        self.gradient = gradient
        self.gradient_version = gradient._version

    def factors(self) -> Factors:
        """Returns the factors of the weight's gradient.

        Raises:
            StepError: If one of them has been changed in place meanwhile.
        """
        operand, gradient = self.operand, self.gradient
        assert gradient is not None
        if operand._version != self.operand_version or gradient._version != self.gradient_version:
            raise StepError(
                f"what a weight of shape {tuple(self.parameter.shape)} was multiplied with, of "
                f"shape {tuple(operand.shape)}, or the gradient of what that made, was "
                f"changed in place before the weight's gradient was computed"
            )
        return self.factors_of(operand, gradient, self.is_transposed)

    def gradient_at_edge(self) -> tuple[GradientEdge, Tensor]:
        """Returns the edge of autograd's graph that takes the product, and the product."""
        factors = self.factors()
        product = factors[0] if len(factors) == 1 else factors[0] @ factors[1]
        if self.edge is None:
            return get_gradient_edge(self.parameter), product
        return GradientEdge(*self.edge), product.mT if self.is_transposed else product


def by_parameter(products: Iterable[WeightProduct]) -> dict[int, list[WeightProduct]]:
    """Returns products by the id of their parameter, in the order of first uses."""
    by_id: dict[int, list[WeightProduct]] = {}
    for product in products:
        by_id.setdefault(id(product.parameter), []).append(product)
    return by_id


def accumulate(groups: Iterable[Sequence[WeightProduct]]) -> None:
    """Adds the waiting products of some parameters in a microbatch to their gradients.

    One pass of autograd adds them, because hooks of a parameter, and all nodes between a weight and
    its parameter, must see the sum of all uses, as in a whole backward. If nothing is between the
    two, a product is added while it is computed, without memory of its own, where there is a
    gradient to add to.

    Args:
        groups: For each parameter, all its products that wait in the microbatch.

    Sync: all on the current stream.
    """
    by_edge, written = dict[GradientEdge, Tensor](), list[Any]()
    with torch.no_grad():
        for uses in groups:  # Python's time for each counts
            parameter = uses[0].parameter
            total = parameter.grad
            is_free = total is None and parameter.grad_dtype == parameter.dtype
            if not may_write(uses, parameter if is_free else total):
                for product in uses:
                    edge, gradient = product.gradient_at_edge()
                    by_edge[edge] = by_edge[edge] + gradient if edge in by_edge else gradient
                continue
            for product in uses:
                left, right = product.factors()
                if total is None:
                    parameter.grad = total = left @ right
                else:
                    total.addmm_(left, right)
            written.append(parameter)
        for parameter in written:
            for hook in list(accumulate_hooks(parameter).values()):  # one may remove itself
                hook(parameter)
        if by_edge:
            # Keep the graph, because microbatches may share nodes, such as casts that autocast
            # keeps.
            torch.autograd.backward(list(by_edge), list(by_edge.values()), retain_graph=True)


def may_write(products: Sequence[WeightProduct], into: Tensor | None) -> bool:
    """True if products of a parameter may go into its gradient, or one like it, by us."""
    if into is None or into.dim() != 2 or into.layout is not torch.strided:
        return False
    if has_gradient_hooks(products[0].parameter):
        return False
    for product in products:
        operand = product.operand
        if product.edge is not None or operand.dim() != 2 or operand.dtype != into.dtype:
            return False
    return True


# [Note: direct] Autograd adds to a parameter's gradient in a node. The node may have hooks of its
# own, and torch has no way to list them. A node lives only while an object holds it: code that
# wants hooks there must hold it, or it dies with the last graph that ends in it. Nodes are marked
# right before a step, when there are no graphs, and not held. If the mark is there in the step,
# then other code holds the node, and its gradients go through it. If it is not, the node is new and
# has no hooks.
_MARK = "pipegrad"


class _Ends(torch.autograd.Function):
    """A function of all parameters: its node leads to the nodes that add to their gradients."""

    @staticmethod
    def forward(_ctx: object, *_parameters: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(_ctx: object, *_gradients: Tensor) -> None:
        raise AssertionError


def mark(parameters: Iterable[Tensor]) -> None:
    """Marks the nodes that add to matrices' gradients; call it when there are no graphs."""
    parameters = [parameter for parameter in parameters if parameter.dim() == 2]
    with torch.enable_grad():
        ends: Any = _Ends.apply(*parameters)  # type: ignore[no-untyped-call] # one call for all: torch has no cheap one for each
    if ends.grad_fn is not None:
        for node, _ in ends.grad_fn.next_functions:
            node.metadata[_MARK] = True


# Kinds of products.


class Rule(NamedTuple):
    """An argument of a kind of product that may be a weight that waits.

    Attributes:
        argument: The index of the argument.
        operand: Returns the factor that is no weight, from the product's node.
        raw_operand: Returns how that was saved.
        factors: Returns how to compute the gradient of the weight, from the node and the nodes
            between the weight and its parameter; None if this product cannot wait.
    """

    argument: int
    operand: Callable[[Any], Tensor]
    raw_operand: Callable[[Any], Any]
    factors: Callable[[Any, Sequence[Node]], FactorsOf | None]


def _left(operand: Tensor, gradient: Tensor, is_transposed: bool) -> Factors:
    """Returns the factors of the gradient of a weight on the left."""
    return (operand.conj(), gradient.mT) if is_transposed else (gradient, operand.mH)


def _right(operand: Tensor, gradient: Tensor, is_transposed: bool) -> Factors:
    """Returns the factors of the gradient of a weight on the right."""
    return (gradient.mT, operand.conj()) if is_transposed else (operand.mH, gradient)


def _kernel(node: Any, chain: Sequence[Node]) -> FactorsOf | None:  # noqa: ANN401
    if any(type(step).__name__ not in ("ToCopyBackward0", LEAF) for step in chain):
        return None  # the kernel may have another shape than the parameter
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    options = [getattr(node, f"_saved_{name}") for name in names]
    leaf: Any = chain[-1]
    shape = leaf.variable.shape

    def factors(image: Tensor, gradient: Tensor, _is_transposed: bool) -> Factors:
        kernel = gradient.new_empty(1).expand(shape)  # only its shape is read
        output_mask = [False, True, False]  # the gradient of the kernel alone
        _, gradient_of_kernel, _ = torch.ops.aten.convolution_backward(
            gradient, image, kernel, None, *options, output_mask
        )
        return (gradient_of_kernel,)

    return factors


def _head(node: Any, _: Sequence[Node]) -> FactorsOf | None:  # noqa: ANN401
    if node.needs_input_grad[2]:
        return None  # the bias needs the same logits, and would make them again
    _, weight, _, sums, _ = node.saved_tensors
    options = node.options

    def factors(hidden: Tensor, by_losses: Tensor, _is_transposed: bool) -> Factors:
        factor, _ = by_head(hidden[0], weight, by_losses, bias=None, sums=sums, options=options)
        return (factor,)

    return factors


def _rule(
    argument: int, saved: str, factors: Callable[[Any, Sequence[Node]], FactorsOf | None]
) -> Rule:
    operand, raw_operand = attrgetter(f"_saved_{saved}"), attrgetter(f"_raw_saved_{saved}")
    return Rule(argument, operand, raw_operand, factors)


_MM = _rule(0, "mat2", lambda *_: _left), _rule(1, "self", lambda *_: _right)
# Kind of node -> which of its arguments may be a weight that waits.
PRODUCTS: dict[str, tuple[Rule, ...]] = {
    "MmBackward0": _MM,
    "BmmBackward0": _MM,
    # A product that is multiplied by a number does not wait.
    "AddmmBackward0": (
        _rule(1, "mat2", lambda node, _: _left if node._saved_alpha == 1 else None),
        _rule(2, "mat1", lambda node, _: _right if node._saved_alpha == 1 else None),
    ),
    "ConvolutionBackward0": (_rule(1, "input", _kernel),),
    # With a dimension more, because no product of two factors makes its weight's gradient.
    f"{HeadLoss.__name__}Backward": (
        Rule(1, lambda n: n.saved_tensors[0][None], lambda n: n._raw_saved_tensors[0], _head),
    ),
}
