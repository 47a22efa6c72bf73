"""Specs: what values look like."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from pipegrad.schedules.program.program import Channel


class Spec(NamedTuple):
    """What a value looks like in one microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        """Returns the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """How many bytes the value has."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        gradient = "with" if self.differentiable else "without"
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)} {gradient} gradient"


class Specs:
    """What the values of a kind of step look like in its first microbatch, known before the step.

    Args:
        by_link: A spec for each link; None if its producer failed before it made the value.

    Attributes:
        by_link: The same.
    """

    def __init__(self, by_link: Mapping[int, Spec | None]) -> None:
        self.by_link = by_link

    def first(self, link: int, spec: Spec) -> Spec | None:
        """Returns what a value that this rank makes looked like in the first microbatch.

        Args:
            link: The value.
            spec: What it looks like now.
        """
        return self.by_link[link]

    def of_send(self, channel: Channel) -> Spec | None:
        """Returns what crosses a channel that begins here; called before its first send."""
        return self.by_link[channel.link]

    def of_receive(self, channel: Channel) -> Spec | None:
        """Returns what crosses a channel that ends here; called before its first receive."""
        return self.by_link[channel.link]
