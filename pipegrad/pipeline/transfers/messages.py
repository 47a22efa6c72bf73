"""Messages: headers, which say what a value looks like; see [Note: shapes] in `transfers`.

A header is 18 numbers of 8 bytes: a mark, the channel and the microbatch of its transfer, the kind
of value, how many dimensions it has, and its shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipegrad.errors import StepError
from pipegrad.pipeline.transfers.specs import Spec

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
