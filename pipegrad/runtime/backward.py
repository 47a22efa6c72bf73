"""Split backward: the gradients of a stage's inputs now, those of its weights later.

[Note: what waits] Of a backward nobody else waits for the products that are the gradients of weight
matrices, a third of a step's compute. `backward_inputs` runs everything but them, in one pass of
autograd that frees its graph; a `WeightProduct` keeps the two factors until `accumulate` multiplies
them. Nothing is computed twice, and each use of a weight is a product of its own, so uses may be
many, nested, or shared by stages. All else, such as biases, norms and embeddings, costs little and
does not wait. So what is not known here is right as well: weights that an autograd function, or a
compiled module, takes have their gradients early.

A product waits if its weight comes from a parameter by nodes of one successor each, such as views
and casts, and if everything that uses the parameter waits. It is autograd's graph that tells, so
modules may do with their weights what they like.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipegrad.runtime.products import LEAF, PRODUCTS, Use, WeightProduct, kind_of


@dataclass
class Waiting:
    """What waits of the backward of a microbatch.

    Attributes:
        products: In the order in which autograd came by.
        early: Names of functions whose parameters have their gradients already.
    """

    products: deque[WeightProduct] = field(default_factory=deque)
    early: tuple[str, ...] = ()

    def unpack(self) -> None:
        """Takes what saved-tensor hooks keep, in one pass: checkpointing computes anew once each.

        Sync: all on the current stream.
        """
        packed = [product for product in self.products if product.is_packed]
        if not packed:
            return

        def take(_: Tensor) -> None:
            for product in packed:
                product.unpack()

        with torch.enable_grad():
            anchor = torch.zeros((), requires_grad=True).clone()
        anchor.register_hook(take)
        torch.autograd.backward(anchor)


def backward_inputs(
    roots: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Iterable[Tensor]
) -> Waiting:
    """Runs a backward, all but the products that can wait: see [Note: what waits].

    Args:
        roots: What the forward made.
        gradients: Of the roots.
        inputs: Leaves whose gradients may not wait.

    Sync: as `torch.autograd.backward`.
    """
    graph = _explore(roots, {id(tensor) for tensor in inputs})
    waiting = Waiting(early=graph.early)
    if not graph.uses:
        torch.autograd.backward(roots, gradients)
        return waiting
    needed, is_packed = list(graph.leaves), False
    for use in graph.uses:
        product = use.kind(use)
        node: Any = use.node
        node.register_prehook(partial(_arrive, product, waiting.products))
        needed.append(node)
        is_packed |= product.is_packed
    torch.autograd.backward(
        roots, gradients, inputs=[GradientEdge(node, 0) for node in needed], retain_graph=is_packed
    )
    return waiting


def _arrive(
    product: WeightProduct, arrived: deque[WeightProduct], gradients: tuple[Tensor | None, ...]
) -> None:
    """Keeps the gradient of what a node made; autograd calls it right before it runs the node."""
    (product.gradient,) = gradients
    if product.gradient is not None:
        arrived.append(product)


@dataclass(frozen=True)
class _Graph:
    """What autograd's graph says of a backward: the leaves and uses that it ends in."""

    leaves: tuple[Node, ...] = ()
    uses: tuple[Use, ...] = ()
    early: tuple[str, ...] = ()


def _explore(roots: Sequence[Tensor], inputs: Collection[int]) -> _Graph:
    """Finds out what must run now, and which uses of weights can wait."""
    seen = dict.fromkeys(get_gradient_edge(root).node for root in roots)
    stack, uses, early, is_compiled = list(seen), list[Use](), dict[str, None](), False
    while stack:
        node = stack.pop()
        name = kind_of(node)
        if name.startswith("CheckpointFunction"):  # reentrant: not part of any but a whole backward
            return _Graph(early=(name,))
        is_compiled |= name.startswith("CompiledFunction")
        known = PRODUCTS.get(name, {})
        for index, (successor, number) in enumerate(node.next_functions):
            if successor is None:
                continue
            if index in known:
                kind, operand = known[index]
                chain = _chain(successor, inputs)
                if chain and kind.waits(node, chain):
                    uses.append(Use(kind, node, GradientEdge(successor, number), chain, operand))
                    continue
            if issubclass(type(node), BackwardCFunction) and _is_parameter(successor, inputs):
                early[name] = None
            if successor not in seen:
                seen[successor] = None
                stack.append(successor)
    if is_compiled:  # it has no second backward, which packed operands need
        seen |= dict.fromkeys(use.chain[-1] for use in uses if use.is_packed)
    leaves = tuple(node for node in seen if kind_of(node) == LEAF)
    return _Graph(leaves, tuple(use for use in uses if use.chain[-1] not in seen), tuple(early))


def _chain(node: Node, inputs: Collection[int]) -> tuple[Node, ...]:
    """Returns the nodes from a weight to its parameter; none if it is not simply made of one."""
    chain = [node]
    while kind_of(chain[-1]) != LEAF:
        successors = [found for found, _ in chain[-1].next_functions if found is not None]
        if len(successors) != 1 or kind_of(chain[-1]).startswith(_NOT_IN_CHAINS):
            return ()
        chain += successors
    return tuple(chain) if _is_parameter(chain[-1], inputs) else ()


_NOT_IN_CHAINS = ("Embedding", "CompiledFunction")  # what looks up a row is the value, no weight


def _is_parameter(node: Node, inputs: Collection[int]) -> bool:
    leaf: Any = node
    return kind_of(node) == LEAF and id(leaf.variable) not in inputs
