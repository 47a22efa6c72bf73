"""Messages: what values look like, and the headers that say it; see [Note: shapes] in `transfers`.

A header is 18 numbers of 8 bytes: a mark, the channel and the microbatch of its transfer, the kind
of value, how many dimensions it has, and its shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from pipegrad.errors import StepError
from pipegrad.schedules.program.program import Channel

Key = tuple[int, int]  # channel and microbatch

WORDS = 18
_MOST_DIMENSIONS = WORDS - 5
MARK = 0x7069706567726164
_FAILED = -1
# The number of a dtype in a header is its place here.
_DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "bool"),
        *("int64", "int32", "int16", "int8", "uint8", "uint64", "uint32", "uint16"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
)


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


def header(key: Key, spec: Spec | None) -> torch.Tensor:
    """Returns the header of a value, ``(18,)`` int64 on the host; None: it will never come.

    Raises:
        StepError: If it has too many dimensions, or a dtype that no message has.
    """
    if spec is None:
        words = [MARK, *key, _FAILED]
    elif len(spec.shape) > _MOST_DIMENSIONS or spec.dtype not in _DTYPES:
        raise StepError(
            f"a value is {spec}, expected at most {_MOST_DIMENSIONS} dimensions and a dtype of "
            f"{[str(dtype).removeprefix('torch.') for dtype in _DTYPES]}, which can be sent"
        )
    else:
        words = [MARK, *key, _DTYPES.index(spec.dtype), len(spec.shape), *spec.shape]
    return torch.tensor(words + [0] * (WORDS - len(words)))


def read_header(words: Sequence[int]) -> tuple[Key, Spec | None]:
    """Returns which transfer a header is of, and what it says; None if the value never comes.

    Whether the value has a gradient is in no header.

    Args:
        words: Of the header.

    Raises:
        StepError: If it is no header that `header` makes.
    """
    mark, channel, microbatch, kind, dimensions, *shape = words
    if mark == MARK and kind == _FAILED:
        return (channel, microbatch), None
    # Another rank has sent it, so it may say anything.
    if not (
        mark == MARK
        and 0 <= kind < len(_DTYPES)
        and 0 <= dimensions <= _MOST_DIMENSIONS
        and min(shape) >= 0
        and not any(shape[dimensions:])
    ):
        raise StepError(f"another rank has sent a header that no value has: {list(words)}")
    return (channel, microbatch), Spec(tuple(shape[:dimensions]), _DTYPES[kind], False)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor as a row of bytes, in the same memory if it has no flag."""
    # Torch conjugates and negates by a flag. Its sends resolve it, a view of bytes does not.
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
