"""Messages: what crosses an edge, and how a receiver knows what it looks like.

A message is the bytes of a value, or a header and the bytes of a value. A header is 16 numbers of 8
bytes: a mark, the kind of value, how many dimensions it has, and its shape.
"""

from __future__ import annotations

from ctypes import c_int64

import torch

from pipegrad.errors import StepError
from pipegrad.pipeline.transfers.specs import Spec

_WORDS = 16
_MOST_DIMENSIONS = _WORDS - 3
HEADER = 8 * _WORDS  # bytes; all dtypes are aligned behind it
MARK = 0x7069706567726164
_FAILED = -1
_MOST_NUMEL = 2**40  # no device has more memory
# The number of a dtype in a header is its place here.
_DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "bool"),
        *("int64", "int32", "int16", "int8", "uint8", "uint64", "uint32", "uint16"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
)


def header(spec: Spec | None) -> torch.Tensor:
    """Returns the header of a value, on the host, as bytes; None for a value that never comes.

    Raises:
        StepError: If it has too many dimensions, or a dtype that no message has.
    """
    if spec is None:
        words = [MARK, _FAILED]
    elif len(spec.shape) > _MOST_DIMENSIONS or spec.dtype not in _DTYPES:
        raise StepError(
            f"a value is {spec}, expected at most {_MOST_DIMENSIONS} dimensions and a dtype of "
            f"{[str(dtype).removeprefix('torch.') for dtype in _DTYPES]}, which can be sent"
        )
    else:
        words = [MARK, _DTYPES.index(spec.dtype), len(spec.shape), *spec.shape]
    return torch.tensor(words + [0] * (_WORDS - len(words))).view(torch.uint8)


def spec_in(head: torch.Tensor, differentiable: bool) -> Spec | None:
    """Returns what a header says; None if the value never comes.

    Args:
        head: A message that begins with a header, on the host.
        differentiable: Whether the value has a gradient, which no header says.

    Raises:
        StepError: If it is no header that `header` makes.
    """
    mark, kind, dimensions, *shape = words = head[:HEADER].view(torch.int64).tolist()
    if words[:2] == [MARK, _FAILED]:
        return None
    # Another rank has sent it, so it may say anything.
    if not (
        mark == MARK
        and 0 <= kind < len(_DTYPES)
        and 0 <= dimensions <= _MOST_DIMENSIONS
        and min(shape) >= 0
        and not any(shape[dimensions:])
    ):
        raise StepError(f"another rank has sent a header that no value has: {words}")
    return Spec(tuple(shape[:dimensions]), _DTYPES[kind], differentiable)


def begins_with_mark(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a contiguous tensor on the host look like a header."""
    return tensor.nbytes >= 8 and c_int64.from_address(tensor.data_ptr()).value == MARK


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor as a row of bytes, in the same memory if it has no flag."""
    # Torch conjugates and negates by a flag. Its sends resolve it, a view of bytes does not.
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
