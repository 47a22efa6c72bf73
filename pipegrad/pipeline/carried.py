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

import copy
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from pipegrad.comm.agreement import warn_once
from pipegrad.errors import StepError
from pipegrad.model.wrappers import fsdp_modules
from pipegrad.pipeline.stage import Stage
from pipegrad.pipeline.trees import flattened

_FEW = 32  # tokens that tell whether chunks see each other
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
            for leaves, _ in trees:
                _refuse_hidden(stage, leaves)
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


def _refuse_hidden(stage: int, leaves: Sequence[tuple[str, object]]) -> None:
    """Refuses an object that holds tensors with a gradient: they would keep the graph."""
    for _, leaf in leaves:
        if isinstance(leaf, Tensor | Number | str | None):
            continue
        if _hides(leaf):
            raise StepError(
                f"stage {stage} carries a {type(leaf).__name__}, which holds tensors with a "
                f"gradient: carry these in dicts, lists or tuples, or make its class known by "
                f"torch.utils._pytree.register_pytree_node"
            )


def _hides(value: object, depth: int = 4) -> bool:
    """Returns whether an object holds a tensor with a gradient, in itself or in its parts."""
    if _has_gradient(value):
        return True
    parts = getattr(value, "__dict__", {}).values() if depth else ()
    return any(_hides(x, depth - 1) for part in parts for _, x in flattened(part)[0])


def warn_of_blind(stage: Stage, values: Sequence[object], key: str) -> None:
    """Warns once of a stage whose chunks do not see each other, as a whole sequence does.

    A few tokens run in evaluation mode, at once and in two chunks, and outputs are compared. So a
    layer is found that looks at other positions and carries too little of them.

    Args:
        stage: Whose module takes inputs of one chunk, and carries something or nothing.
        values: The inputs of the first chunk of a sequence, time along dimension 1, and what it
            carries: None.
        key: As of `warn_once`.
    """
    lengths = {x.shape[1] for x in values if _has_time(x)}
    is_plain = all(isinstance(x, Tensor | Number | str | None) for x in values)
    few = min([_FEW, *lengths])
    # Another mode may be more than a flag: some adapters write into their weights.
    is_plain &= all(type(part).train is nn.Module.train for part in stage.module.modules())
    if len(lengths) != 1 or few < 2 or not is_plain or fsdp_modules({0: stage.module})[0]:
        return
    parameters = {id(p): p for p in stage.module.parameters()}
    devices = {p.device for p in parameters.values() if p.device.type != "cpu"}
    try:
        with torch.no_grad(), torch.random.fork_rng([*devices]):
            # A copy with the same parameters: a forward may write buffers, and keep what it likes.
            alike = copy.copy(stage)
            alike.__dict__.pop("binding", None)
            alike.module = copy.deepcopy(stage.module, parameters)
            for part in alike.module.modules():
                part.training = False
            whole, again = (_few(alike, values, [(0, few)]) for _ in range(2))
            cut = _few(alike, values, [(0, few // 2), (few // 2, few)])
    except Exception:  # noqa: BLE001 - the step itself says what is wrong
        return
    if cut.shape != whole.shape or not whole.is_floating_point() or not torch.equal(whole, again):
        return
    finfo = torch.finfo(whole.dtype)
    off = float((cut - whole).abs().max()) / max(float(whole.abs().max()), finfo.tiny)
    if off > finfo.eps**0.5:
        warn_once(
            f"stage {stage.index}: a sequence in two chunks of time gives other outputs than at "
            f"once, by {off:.1g} of the largest. What looks at other positions, or counts them, "
            f"must carry what it needs: Stage(carry=...)",
            key,
        )


def _few(stage: Stage, values: Sequence[object], spans: Sequence[tuple[int, int]]) -> Tensor:
    """Returns the outputs of a few tokens that go through a stage in parts."""
    number = len(values) - len(stage.carry)
    state, outputs = list(values[number:]), list[Tensor]()
    for begin, end in spans:
        part = [x[:, begin:end] if _has_time(x) else x for x in values[:number]]
        returned = stage.forward([*part, *state])
        state = list(returned[len(returned) - len(stage.carry) :]) if stage.carry else []
        outputs.append(returned[0])
    return torch.cat(outputs, 1)


def _has_time(value: object) -> TypeGuard[Tensor]:
    # Tokens, or a vector for each position: of two dimensions the second may be anything.
    return isinstance(value, Tensor) and value.dim() > 1 + value.is_floating_point()


def _has_gradient(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.requires_grad
