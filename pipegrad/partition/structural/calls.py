"""Calls: what a model does with its layers, as data; see [Note: flow] in `flow`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from pipegrad.interop.private import (
    TreeSpec,
)
from pipegrad.partition.structural.changes import Change


class Source(NamedTuple):
    """An output of a layer's call: its leaf of this number."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Like:
    """The shape of an output, told by an input of the same call.

    Attributes:
        leaf: Number of the input among the call's tensors.
        kept: How many dimensions of the input the output has; the first ones.
        more: Dimensions behind these.
    """

    leaf: int
    kept: int
    more: tuple[int, ...]


@dataclass(frozen=True)
class Output:
    """A leaf of what a call returns or changes.

    Attributes:
        value: What it is in the sample, if it is no tensor.
        shape: Of a tensor, in the sample.
        dtype: Of a tensor, in the sample.
        like: How to tell its shape in another batch; None if no input tells it.
        same: Number of the first leaf of the call that is the same tensor; None if there is none.
    """

    value: object = None
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    like: Like | None = None
    same: int | None = None


@dataclass(frozen=True)
class Call:
    """A call of a layer.

    Attributes:
        name: Of the layer, with the number of the call behind it if it is called more than once.
        layer: The layer.
        needs: Outputs of earlier calls that its inputs were computed from.
        parameters: Names of parameters that its inputs were computed from outside of layers.
        draws: Numbers of random operators outside of layers that its inputs were computed from.
        outputs: The leaves of what it returns, and behind them those of what it changes.
        structure: How those that it returns hang together.
        changes: What it changes; see [Note: changes] in `changes`.
        structures: Of each change, how the leaves of its values hang together.
        cleared: Numbers of changes of containers that code behind the layer takes back.
        lost: Names of modules inside and their attributes that it changes, but not to tensors.
        flops: Floating-point operations of its forward on the sample.
        saved_bytes: What its forward keeps for its backward, on the sample.
        seconds: How long its forward and backward took on the sample; 0 if that was not measured.
    """

    name: str
    layer: str
    needs: frozenset[Source]
    parameters: frozenset[str]  # and buffers
    draws: frozenset[int]
    outputs: tuple[Output, ...]
    structure: TreeSpec
    changes: tuple[Change, ...]
    structures: tuple[TreeSpec, ...]
    cleared: frozenset[int]
    lost: frozenset[tuple[str, str]]
    flops: int
    saved_bytes: int
    seconds: float

    @cached_property
    def is_like_first(self) -> bool:
        """Whether the first tensor that it is given tells the shapes of all outputs."""
        return all(
            output.shape is None or (output.like is not None and output.like.leaf == 0)
            for output in self.outputs
        )

    def name_of(self, leaf: int) -> str:
        """Returns the name of an output."""
        returned = self.outputs[: self.structure.num_leaves]
        tensors = [i for i, output in enumerate(returned) if output.shape is not None]
        return self.name if tensors == [leaf] else f"{self.name}:{leaf}"


@dataclass(frozen=True)
class Flow:
    """What a model does.

    Attributes:
        calls: The calls of its layers, in order.
        returned: What it returns, with `Returned` in the place of tensors.
        written: Outputs of layers into which code outside of layers writes, in place.
        writes_inputs: Whether it writes into what it is given, in place.
        is_heard: Whether hooks hand on what a layer computes.
        sample: Name -> shape of the tensors of the sample.
    """

    calls: tuple[Call, ...]
    returned: object
    written: frozenset[Source]
    writes_inputs: bool
    is_heard: bool
    sample: dict[str, tuple[int, ...]]


class Returned(NamedTuple):
    """A tensor that the model returns, and what it was computed from outside of layers."""

    needs: frozenset[Source]
    parameters: frozenset[str]
    draws: frozenset[int]
