"""Split backward: the gradients of a stage's inputs now, those of its weights later.

[Note: what waits] Of a backward nobody else waits for the products that are the gradients of weight
matrices, a third of a step's compute. `backward_inputs` runs everything but them, in one pass of
autograd that frees its graph, and keeps their two factors; `accumulate` multiplies them. Nothing is
computed twice, and each use of a weight is a product of its own, so uses may be many, nested, or
shared by stages. All else, such as biases, norms and embeddings, costs little and does not wait. So
what is not known here is right as well: weights that an autograd function, or a compiled module,
takes have their gradients early. So have those in a checkpoint, which would have to run forward
once more for them: a stage that is to be recomputed and split says `Stage(recompute=True)`.

A product waits if its weight comes from a parameter by nodes of one successor each, such as views
and casts, and if everything that uses the parameter waits. It is autograd's graph that tells, so
modules may do with their weights what they like.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipegrad.runtime.products import LEAF, PRODUCTS, Known, WeightProduct, kind_of

PACKED = "saved-tensor hooks (checkpointing, offloading)"
# A lookup makes a value, not a weight; the others are not to be run but as part of everything.
_NOT_IN_CHAINS = ("Embedding", "Index", "Gather", "CompiledFunction", "CheckpointFunction")


@dataclass(frozen=True)
class Waiting:
    """What waits of the backward of a microbatch.

    Attributes:
        products: In the order in which autograd came by.
        early: What kept weights' gradients from waiting.
    """

    products: list[WeightProduct]
    early: tuple[str, ...] = ()


def backward_inputs(
    roots: Sequence[Tensor], gradients: Sequence[Tensor | None], parameters: Collection[int]
) -> Waiting:
    """Runs a backward, all but the products that can wait: see [Note: what waits].

    Args:
        roots: What the forward made.
        gradients: Of the roots.
        parameters: The ids of those whose gradients may wait.

    Sync: as `torch.autograd.backward`.
    """
    graph = _explore(roots, parameters)
    if not graph.products:
        torch.autograd.backward(roots, gradients)
        return Waiting([], graph.early)
    arrived = list[WeightProduct]()
    bare = [leaf for node in graph.leaves if (leaf := node.variable).grad is None]
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
    """What autograd's graph says of a backward.

    Attributes:
        leaves: That have their gradients at once.
        nodes: That multiplied, of the products that wait.
        products: What waits.
        early: As in `Waiting`.
    """

    leaves: tuple[Any, ...] = ()
    nodes: tuple[Any, ...] = ()
    products: tuple[WeightProduct, ...] = ()
    early: tuple[str, ...] = ()


def _explore(roots: Sequence[Tensor], parameters: Collection[int]) -> _Graph:
    """Finds out what must run now, and what can wait."""
    seen = dict.fromkeys(get_gradient_edge(root).node for root in roots)
    stack, found, early = list(seen), list[tuple[Any, Node, WeightProduct]](), dict[str, None]()
    while stack:
        node = stack.pop()
        name = kind_of(node)
        if "CheckpointFunction" in name:  # reentrant: part of whole backwards alone
            return _Graph(early=(name,))
        known = PRODUCTS.get(name, {})
        for index, (successor, number) in enumerate(node.next_functions):
            if successor is None:
                continue
            if index in known and (chain := _chain(successor, parameters)):
                edge = GradientEdge(successor, number)
                product = _product(node, known[index], edge, chain, early)
                if product is not None:
                    found.append((node, chain[-1], product))
                    continue
            if issubclass(type(node), BackwardCFunction) and _chain(successor, parameters):
                early[name] = None
            if successor not in seen:
                seen[successor] = None
                stack.append(successor)
    waiting = [(node, product) for node, leaf, product in found if leaf not in seen]
    return _Graph(
        leaves=tuple(node for node in seen if kind_of(node) == LEAF),
        nodes=tuple(node for node, _ in waiting),
        products=tuple(product for _, product in waiting),
        early=tuple(early),
    )


def _product(
    node: Any,  # noqa: ANN401 - its attributes are made in C++
    known: Known,
    edge: GradientEdge,
    chain: Sequence[Node],
    early: dict[str, None],
) -> WeightProduct | None:
    """Returns what waits of a node; None if it cannot."""
    multiply = known.multiplier(node, chain)
    if multiply is None:
        return None
    saved = getattr(node, f"_raw_saved_{known.operand}")
    if not hasattr(saved, "unpack_hook"):
        early["torch before 2.13"] = None  # nobody can tell whether it is packed
        return None
    if saved.unpack_hook is not None:
        early[PACKED] = None
        return None
    leaf: Any = chain[-1]
    operand: Tensor = getattr(node, f"_saved_{known.operand}")
    return WeightProduct(leaf.variable, edge, operand.detach(), multiply)


def _chain(node: Node, parameters: Collection[int]) -> tuple[Node, ...]:
    """Returns the nodes from a weight to its parameter; none if it is not simply made of one."""
    chain = [node]
    while (name := kind_of(chain[-1])) != LEAF:
        successors = [found for found, _ in chain[-1].next_functions if found is not None]
        if len(successors) != 1 or name in PRODUCTS or name.startswith(_NOT_IN_CHAINS):
            return ()
        chain += successors
    return tuple(chain) if _is_parameter(chain[-1], parameters) else ()


def _is_parameter(node: Node, parameters: Collection[int]) -> bool:
    leaf: Any = node
    return kind_of(node) == LEAF and id(leaf.variable) in parameters
