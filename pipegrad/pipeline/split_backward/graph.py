"""Split backward: the gradients of a stage's inputs now, those of its weights later.

[Note: what waits] The gradients of weight matrices are products. They are a third of a step's
compute, and no other stage needs them. `backward_inputs` runs everything except these products, in
one pass of autograd that frees its graph, and keeps their two factors. `accumulate` multiplies
them. Nothing is computed twice. Each use of a weight is a product of its own, so uses may be many,
nested, or shared by stages.

Everything else, such as biases, norms and embeddings, costs little and does not wait. If a weight
goes into an autograd function or a compiled module, its gradient is computed at once, and is right
too. The same holds for weights in a checkpoint, which would have to run its forward once more. For
such a stage, `Stage(recompute=True)` does both.

A product waits if two things hold. From its weight to a parameter there are only nodes with one
successor, such as views and casts. And everything that uses the parameter waits. Both are read from
autograd's graph, so modules may do with their weights what they like.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.torch_version import TorchVersion

from pipegrad.pipeline.split_backward.products import (
    LEAF,
    PRODUCTS,
    WeightProduct,
    is_direct,
)

PACKED = "saved-tensor hooks (checkpointing, offloading)"
# Whether a backward can begin at an autograd function.
_BEGINS_AT_FUNCTIONS = TorchVersion(torch.__version__) >= "2.13"
# A lookup makes a value, not a weight. The others can run only as part of a whole backward.
_NOT_IN_CHAINS = ("Embedding", "Index", "Gather", "CompiledFunction", "CheckpointFunction")


@dataclass(frozen=True)
class Waiting:
    """The part of a microbatch's backward that waits.

    Attributes:
        products: In the order in which autograd reached them.
        early: Names of nodes whose weights cannot wait.
    """

    products: list[WeightProduct]
    early: tuple[str, ...] = ()


def backward_inputs(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    parameters: Collection[int],
    marked: Collection[int] = (),
    lent: Collection[int] = (),
) -> Waiting:
    """Runs a backward, all but the products that can wait: see [Note: what waits].

    Args:
        roots: The outputs of the forward.
        gradients: The gradients of the roots.
        parameters: Ids of the parameters whose gradients may wait.
        marked: Ids of those that were marked when there were no graphs: see [Note: direct].
        lent: Addresses of receive buffers, which the next receives will write into.

    Sync: as `torch.autograd.backward`.
    """
    graph = _explore(roots, parameters, marked)
    if not graph.products:
        torch.autograd.backward(roots, gradients)
        return Waiting([], graph.early)
    arrived = list[WeightProduct]()
    bare = [leaf for node in graph.leaves if (leaf := node.variable).grad is None]
    # A node computes the gradient of an argument only if that leads to a needed node. The leaves of
    # waiting weights are not needed, so their products are not computed. The nodes of products are
    # needed themselves: some of them may lead to nothing else. Autograd finds out by itself that
    # those next to a leaf are needed, and fewer names cost less.
    needed = [*graph.leaves, *(node for node in graph.nodes if not graph.leads_to_leaf(node))]
    hooks = [
        node.register_prehook(partial(_arrive, product, arrived))
        for node, product in zip(graph.nodes, graph.products, strict=True)
    ]
    try:
        edges = [GradientEdge(node, 0) for node in needed]
        torch.autograd.backward(roots, gradients, inputs=edges)
    finally:
        for hook in hooks:
            hook.remove()  # a node may outlive its graph
    # The gradient of an output may lie in a receive buffer that is free after I, before W reads it.
    # A new gradient may lie in the memory of what waits, and will be added to in place.
    taken = {
        *lent,
        *(
            leaf.grad.untyped_storage().data_ptr()
            for leaf in bare
            if leaf.grad is not None and leaf.grad.layout == torch.strided
        ),
    }
    if taken:
        for product in arrived:
            product.keep_apart(taken)
    return Waiting(arrived, graph.early)


def _arrive(
    product: WeightProduct, arrived: list[WeightProduct], gradients: tuple[Tensor | None, ...]
) -> None:
    """Keeps the gradient of what a node made; autograd calls it right before it runs the node."""
    (gradient,) = gradients
    if gradient is not None:
        product.keep(gradient)
        arrived.append(product)


@dataclass(frozen=True)
class _Graph:
    """What a backward runs at once, and what waits, read from autograd's graph.

    Attributes:
        leaves: Leaves that get their gradients at once.
        nodes: The nodes of the forward's products, one for each product that waits.
        products: The products that wait.
        early: As in `Waiting`.
    """

    leaves: Mapping[Any, None] = field(default_factory=dict)
    nodes: tuple[Any, ...] = ()
    products: tuple[WeightProduct, ...] = ()
    early: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        candidates: Sequence[tuple[Node, Node, WeightProduct]],
        leaves: Mapping[Node, None],
        early: tuple[str, ...],
    ) -> _Graph:
        """Returns what waits of the candidates: nodes, leaves of their weights, and products."""
        if any(_is_reentrant(name) for name in early):
            return cls(early=early)
        # A leaf that autograd reaches by another way gets a gradient now. Then none of its uses
        # waits, since its hooks must see one sum.
        waiting = [(node, product) for node, leaf, product in candidates if leaf not in leaves]
        nodes, products = (node for node, _ in waiting), (product for _, product in waiting)
        return cls(leaves, tuple(nodes), tuple(products), early)

    def leads_to_leaf(self, node: Node) -> bool:
        """Whether a leaf that gets its gradient at once, such as a bias, is next to a node."""
        return any(successor in self.leaves for successor, _ in node.next_functions)


def _explore(
    roots: Sequence[Tensor], parameters: Collection[int], marked: Collection[int]
) -> _Graph:
    """Returns what must run now, and what can wait."""
    # This loop sees every node of every microbatch, and Python's time there counts.
    stack = list(dict.fromkeys(get_gradient_edge(root).node for root in roots))
    seen, leaves, early = set(stack), dict[Node, None](), dict[str, None]()
    candidates = list[tuple[Node, Node, WeightProduct]]()
    while stack:
        node = stack.pop()
        name, successors = type(node).__name__, node.next_functions
        if name in PRODUCTS:
            waits = set[int]()
            for index, leaf, product in _products(node, name, parameters, marked):
                if isinstance(product, str):
                    early[product] = None
                else:
                    waits.add(index)
                    candidates.append((node, leaf, product))
            if waits:
                successors = tuple(e for i, e in enumerate(successors) if i not in waits)
        elif name == LEAF:
            leaves[node] = None
        elif _takes_parameters(node, parameters):
            early[name] = None
        for successor, _ in successors:
            if successor is not None and successor not in seen:
                seen.add(successor)
                stack.append(successor)
    return _Graph.of(candidates, leaves, tuple(early))


def _products(
    node: Any,  # noqa: ANN401 - its attributes are made in C++
    name: str,
    parameters: Collection[int],
    marked: Collection[int],
) -> Iterator[tuple[int, Node, WeightProduct | str]]:
    """Yields the arguments of a node that may wait, with their leaves.

    Behind them comes the product that waits, or a string that says why it cannot.
    """
    successors = node.next_functions
    for known in PRODUCTS[name]:
        edge = successors[known.argument]
        chain = _chain(edge[0], parameters)
        rule = known.rule(node, chain) if chain else None
        if rule is None:
            continue
        leaf: Any = chain[-1]
        if getattr(node, known.raw_operand).unpack_hook is not None:
            yield known.argument, leaf, PACKED
        elif issubclass(type(edge[0]), BackwardCFunction) and not _BEGINS_AT_FUNCTIONS:
            yield known.argument, leaf, "an autograd function of a weight, before torch 2.13"
        else:
            parameter, operand = leaf.variable, getattr(node, known.operand).detach()
            direct = id(parameter) in marked and is_direct(chain)
            product = WeightProduct(parameter, None if direct else edge, operand, rule)
            yield known.argument, leaf, product


def _takes_parameters(node: Node, parameters: Collection[int]) -> bool:
    """Whether a node is of an autograd function that takes parameters, or may."""
    return issubclass(type(node), BackwardCFunction) and (
        _is_reentrant(type(node).__name__)
        or any(_chain(successor, parameters) for successor, _ in node.next_functions)
    )


def _is_reentrant(name: str) -> bool:
    """Whether a node is of a reentrant checkpoint, which is part of whole backwards alone."""
    return "CheckpointFunction" in name


def _chain(node: Node | None, parameters: Collection[int]) -> tuple[Node, ...]:
    """Returns the nodes from a weight to its parameter; none if it is not made of one alone."""
    chain: tuple[Any, ...] = ()
    while node is not None:
        chain += (node,)
        name = type(node).__name__
        if name == LEAF:
            return chain if id(chain[-1].variable) in parameters else ()
        if name in PRODUCTS or name.startswith(_NOT_IN_CHAINS):
            return ()
        successors = node.next_functions
        if len(successors) != 1:
            successors = tuple(edge for edge in successors if edge[0] is not None)
            if len(successors) != 1:
                return ()
        node = successors[0][0]
    return ()
