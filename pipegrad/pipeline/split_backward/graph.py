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

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
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
) -> Waiting:
    """Runs a backward, all but the products that can wait: see [Note: what waits].

    Args:
        roots: The outputs of the forward.
        gradients: The gradients of the roots.
        parameters: Ids of the parameters whose gradients may wait.
        marked: Ids of those that were marked when there were no graphs: see [Note: direct].

    Sync: as `torch.autograd.backward`.
    """
    graph = _explore(roots, parameters, marked)
    if not graph.products:
        torch.autograd.backward(roots, gradients)
        return Waiting([], tuple(graph.early))
    arrived = list[WeightProduct]()
    # A node computes the gradient of an argument only if that leads to a needed node. The leaves of
    # waiting weights are not needed, so their products are not computed. The nodes of products are
    # needed themselves: some of them may lead to nothing else.
    bare = [leaf for node in graph.leaves if (leaf := node.variable).grad is None]
    hooks = [
        node.register_prehook(partial(_arrive, product, arrived))
        for node, product in zip(graph.nodes, graph.products, strict=True)
    ]
    try:
        edges = [GradientEdge(node, 0) for node in (*graph.leaves, *graph.nodes)]
        torch.autograd.backward(roots, gradients, inputs=edges)
    finally:
        for hook in hooks:
            hook.remove()  # a node may outlive its graph
    # A new gradient may lie in the memory of what waits, and will be added to in place.
    taken = {
        leaf.grad.untyped_storage().data_ptr()
        for leaf in bare
        if leaf.grad is not None and leaf.grad.layout == torch.strided
    }
    if taken:
        for product in arrived:
            product.keep_apart(taken)
    return Waiting(arrived, tuple(graph.early))


def _arrive(
    product: WeightProduct, arrived: list[WeightProduct], gradients: tuple[Tensor | None, ...]
) -> None:
    """Keeps the gradient of what a node made; autograd calls it right before it runs the node."""
    if (gradient := gradients[0]) is not None:
        product.keep(gradient)
        arrived.append(product)


@dataclass
class _Graph:
    """What a backward runs at once, and what waits, read from autograd's graph.

    Attributes:
        leaves: Leaves that get their gradients at once.
        nodes: The nodes of the forward's products, one for each product that waits.
        ends: The leaf of the weight of each.
        products: The products that wait.
        early: As in `Waiting`.
    """

    leaves: dict[Any, None] = field(default_factory=dict)
    nodes: list[Any] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)
    products: list[WeightProduct] = field(default_factory=list)
    early: dict[str, None] = field(default_factory=dict)

    def split(
        self,
        node: Any,  # noqa: ANN401 - its attributes are made in C++
        name: str,
        parameters: Collection[int],
        marked: Collection[int],
    ) -> Sequence[tuple[Node | None, int]]:
        """Takes the products of a node that may wait; returns the edges of everything else."""
        edges: Sequence[tuple[Any, int]] = node.next_functions
        successors = edges
        for known in PRODUCTS[name]:
            edge = edges[known.argument]
            chain = _chain(edge[0], parameters)
            if not chain or (rule := known.rule(node, chain)) is None:
                continue
            if getattr(node, known.raw_operand).unpack_hook is not None:
                self.early[PACKED] = None
            elif not _BEGINS_AT_FUNCTIONS and issubclass(type(edge[0]), BackwardCFunction):
                self.early["an autograd function of a weight, before torch 2.13"] = None
            else:
                leaf, operand = chain[-1], getattr(node, known.operand).detach()
                parameter = leaf.variable
                direct = id(parameter) in marked and is_direct(chain)
                self.nodes.append(node)
                self.ends.append(leaf)
                self.products.append(
                    WeightProduct(parameter, None if direct else edge, operand, rule)
                )
                successors = [other for other in successors if other is not edge]
        return successors

    def settled(self) -> _Graph:
        """Returns this graph without products that must not wait."""
        if any(map(_is_reentrant, self.early)):
            return _Graph(early=self.early)
        # A leaf that autograd reaches by another way gets a gradient now. Then none of its uses
        # waits, since its hooks must see one sum.
        if not self.leaves.keys().isdisjoint(self.ends):
            waits = [end not in self.leaves for end in self.ends]
            self.nodes = list(compress(self.nodes, waits))
            self.products = list(compress(self.products, waits))
        return self


def _explore(
    roots: Sequence[Tensor], parameters: Collection[int], marked: Collection[int]
) -> _Graph:
    """Returns what must run now, and what can wait."""
    # This loop sees every node of every microbatch, and Python's time there counts.
    graph = _Graph()
    stack = list(dict.fromkeys(get_gradient_edge(root).node for root in roots))
    seen = set(stack)
    while stack:
        node = stack.pop()
        name = type(node).__name__
        if name == LEAF:
            graph.leaves[node] = None
            continue
        if name in PRODUCTS:
            successors = graph.split(node, name, parameters, marked)
        else:
            successors = node.next_functions
            if issubclass(type(node), BackwardCFunction) and _takes_parameters(node, parameters):
                graph.early[name] = None
        for successor, _ in successors:
            if successor is not None and successor not in seen:
                seen.add(successor)
                stack.append(successor)
    return graph.settled()


def _takes_parameters(node: Node, parameters: Collection[int]) -> bool:
    """Whether the node of an autograd function takes parameters, or may."""
    return _is_reentrant(type(node).__name__) or any(
        _chain(successor, parameters) for successor, _ in node.next_functions
    )


def _is_reentrant(name: str) -> bool:
    """Whether a node is of a reentrant checkpoint, which is part of whole backwards alone."""
    return "CheckpointFunction" in name


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
