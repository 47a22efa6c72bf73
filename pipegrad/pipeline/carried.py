"""Carried: what stages of one rank hand from one chunk of time to the next, and its gradient.

[Note: life of a carried tensor] A stage returns it for a chunk, and its forward of the next chunk
takes a leaf of the same memory. The backward of the next chunk runs first and leaves a gradient in
that leaf. The backward of the chunk itself begins with it, beside the gradients of its outputs. So
each chunk has a graph of its own, as each microbatch has. With ``recompute`` the leaf is made of
what the first forward returned, and its gradient goes into the graph of the second one.

A tensor that a stage hands on as it took it is a leaf itself: the gradient is added to it, and no
backward begins there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from torch import Tensor

from pipegrad.pipeline.stage import Stage
from pipegrad.pipeline.trees import flattened

_Key = tuple[int, int]  # a stage and a microbatch, which is a chunk


class Carried:
    """What the stages of this rank carry in a step; see [Note: life of a carried tensor].

    Args:
        stages: The stages of this rank.
        chunks: How many chunks a sequence has.

    Attributes:
        stages: Those that carry something: how many values.
    """

    def __init__(self, stages: Mapping[int, Stage], chunks: int) -> None:
        self.stages = {index: len(s.carry) for index, s in stages.items() if s.carry}
        self._chunks = chunks
        self.forget()

    def forget(self) -> None:
        """Lets go of everything of a step."""
        self._taken = dict[_Key, list[object]]()  # by the chunk that takes it
        self._leaves = dict[_Key, list[Tensor]]()  # those in it, the same chunk
        self._roots = dict[_Key, list[Tensor]]()  # what they were made of, by the chunk before

    def taken(self, stage: int, microbatch: int) -> Sequence[object]:
        """Returns what a chunk takes from the one before: None for each value if it is the first.

        It is needed until the chunk's last forward, the second one if the stage recomputes.
        """
        if microbatch % self._chunks == 0:
            return [None] * self.stages[stage]
        return self._taken[stage, microbatch]

    def take(
        self,
        stage: int,
        microbatch: int,
        returned: tuple[Any, ...],
        *,
        hands_over: bool = True,
        has_backward: bool = True,
    ) -> tuple[Any, ...]:
        """Takes what a forward returned for the next chunk; returns the rest of it.

        Args:
            stage: The stage.
            microbatch: The chunk.
            returned: What the forward returned.
            hands_over: Whether the next chunk takes it: not what a second forward returned.
            has_backward: Whether the chunk's backward goes through this graph.
        """
        number = len(returned) - self.stages[stage]
        if (microbatch + 1) % self._chunks:  # nobody takes what the last chunk returns
            trees = [flattened(value) for value in returned[number:]]
            if has_backward:
                every = [leaf for leaves, _ in trees for _, leaf in leaves]
                self._roots[stage, microbatch] = list(filter(_has_gradient, every))
            if hands_over:
                handed = [
                    [x.detach().requires_grad_() if _has_gradient(x) else x for _, x in leaves]
                    for leaves, _ in trees
                ]
                key = stage, microbatch + 1
                self._leaves[key] = [x for leaves in handed for x in leaves if _has_gradient(x)]
                self._taken[key] = [
                    rebuilt(leaves) for (_, rebuilt), leaves in zip(trees, handed, strict=True)
                ]
        return returned[:number]

    def begin_backward(
        self,
        stage: int,
        microbatch: int,
        roots: list[Tensor],
        gradients: list[Tensor | None],
    ) -> None:
        """Adds where the backward of a chunk begins besides its outputs, with the gradients."""
        handed_on = self._roots.pop((stage, microbatch), ())
        leaves = self._leaves.pop((stage, microbatch + 1), ())
        for root, leaf in zip(handed_on, leaves, strict=True):
            if leaf.grad is None:
                continue
            if root.is_leaf:
                root.grad = leaf.grad if root.grad is None else root.grad + leaf.grad
            else:
                roots += (root,)
                gradients += (leaf.grad,)

    def leaves(self, stage: int, microbatch: int) -> Sequence[Tensor]:
        """Returns the tensors with a gradient that a chunk takes from the one before."""
        return self._leaves.get((stage, microbatch), ())

    def release(self, stage: int, microbatch: int) -> None:
        """Lets go of what a chunk took; the gradients in it wait for the chunk before."""
        self._taken.pop((stage, microbatch), None)


def _has_gradient(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.requires_grad
