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

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
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
        return Waiting([], graph.early)
    arrived = list[WeightProduct]()
    bare = [leaf for node in graph.leaves if (leaf := node.variable).grad is None]
    # A node computes the gradient of an argument only if that leads to a needed node. The leaves of
    # waiting weights are not needed, so their products are not computed. The nodes of products are
    # needed themselves: some of them may lead to nothing else.
    needed = [*graph.leaves, *graph.nodes]
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
    # A new gradient may lie in the memory of what waits, and will be added to in place.
    taken = {
        leaf.grad.untyped_storage().data_ptr()
        for leaf in bare
        if leaf.grad is not None and leaf.grad.layout == torch.strided
    }
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

    leaves: tuple[Any, ...] = ()
    nodes: tuple[Any, ...] = ()
    products: tuple[WeightProduct, ...] = ()
    early: tuple[str, ...] = ()


def _explore(
    roots: Sequence[Tensor], parameters: Collection[int], marked: Collection[int]
) -> _Graph:
    """Returns what must run now, and what can wait."""
    stack = list(dict.fromkeys(get_gradient_edge(root).node for root in roots))
    seen, leaves = set(stack), dict[Node, None]()
    candidates, early = list[tuple[Node, Node, WeightProduct]](), dict[str, None]()
    while stack:
        node = stack.pop()
        name = type(node).__name__
        if name == LEAF:
            leaves[node] = None
            continue
        waits = set[int]()
        if name in PRODUCTS:
            for index, leaf, product in _products(node, parameters, marked):
                if isinstance(product, str):
                    early[product] = None
                else:
                    waits.add(index)
                    candidates.append((node, leaf, product))
        elif _takes_parameters(node, parameters):
            early[name] = None
        for index, (successor, _) in enumerate(node.next_functions):
            if successor is not None and successor not in seen and index not in waits:
                seen.add(successor)
                stack.append(successor)
    if any(_is_reentrant(name) for name in early):
        return _Graph(early=tuple(early))
    # A leaf that autograd reaches by another way gets a gradient now. Then none of its uses waits,
    # since its hooks must see one sum.
    waiting = [(node, product) for node, leaf, product in candidates if leaf not in leaves]
    return _Graph(
        leaves=tuple(leaves),
        nodes=tuple(node for node, _ in waiting),
        products=tuple(product for _, product in waiting),
        early=tuple(early),
    )


def _products(
    node: Any,  # noqa: ANN401 - its attributes are made in C++
    parameters: Collection[int],
    marked: Collection[int],
) -> Iterator[tuple[int, Node, WeightProduct | str]]:
    """Yields the arguments of a node that may wait, with their leaves.

    Behind them comes the product that waits, or a string that says why it cannot.
    """
    for index, known in PRODUCTS[type(node).__name__].items():
        successor, number = node.next_functions[index]
        chain = _chain(successor, parameters)
        rule = known.rule(node, chain) if chain else None
        if rule is None:
            continue
        leaf: Any = chain[-1]
        saved = getattr(node, f"_raw_saved_{known.operand}")
        if saved.unpack_hook is not None:
            yield index, leaf, PACKED
        elif issubclass(type(successor), BackwardCFunction) and not _BEGINS_AT_FUNCTIONS:
            yield index, leaf, "an autograd function of a weight, before torch 2.13"
        else:
            edge = GradientEdge(successor, number)
            operand: Tensor = getattr(node, f"_saved_{known.operand}")
            direct = id(leaf.variable) in marked and is_direct(chain)
            yield index, leaf, WeightProduct(leaf.variable, edge, operand.detach(), rule, direct)


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
    chain = list[Any]()
    while node is not None:
        chain.append(node)
        name = type(node).__name__
        if name == LEAF:
            return tuple(chain) if id(chain[-1].variable) in parameters else ()
        successors = [successor for successor, _ in node.next_functions if successor is not None]
        if len(successors) != 1 or name in PRODUCTS or name.startswith(_NOT_IN_CHAINS):
            return ()
        (node,) = successors
    return ()
