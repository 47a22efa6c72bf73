"""topk: the largest elements of a gradient, and where they are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipegrad import EdgeCodec
from pipegrad.plugins.codec import Carried

_INDEX_BYTES = 4  # int32
_MOST_ELEMENTS = 2**31
_ALIGNED = 8  # the elements after the indices begin at a multiple of so many bytes


class TopK(EdgeCodec):
    """Sends the largest elements of a gradient with their indices; the others count as zeros.

    With `feedback` the other elements are added to the next gradient, because they would be lost
    otherwise. nan and inf are sent, because they count as larger than all numbers.
    """

    carries: tuple[Carried, ...] = ("gradients",)

    def __init__(self, *, fraction: float = 0.1, feedback: bool = True) -> None:
        if not 0 < fraction <= 1:  # a TypeError, if it is no number
            raise ValueError(f"fraction is {fraction!r}, expected a number above 0, at most 1")
        self._fraction = fraction
        self.feedback = feedback

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Returns the bytes of the elements that are sent, and four for each index."""
        numel = torch.Size(shape).numel()
        if numel >= _MOST_ELEMENTS:  # indices would not fit
            return numel * dtype.itemsize
        num_sent = self._num_sent(numel)
        return _begin(num_sent) + num_sent * dtype.itemsize

    def encode(self, value: Tensor, message: Tensor, carried: Carried) -> None:
        """Writes indices, then elements."""
        flat, num_sent = value.reshape(-1), self._num_sent(value.numel())
        # Sort the indices, because neighbouring reads and writes are then near in memory.
        indices = torch.topk(flat.abs(), num_sent, sorted=False).indices.sort().values
        sent, elements = _parts(message, num_sent, value.dtype)
        message[_INDEX_BYTES * num_sent : _begin(num_sent)].zero_()
        sent.copy_(indices)
        elements.copy_(flat[indices])

    def decode(self, message: Tensor, value: Tensor, carried: Carried) -> None:
        """Writes the elements into zeros."""
        indices, elements = _parts(message, self._num_sent(value.numel()), value.dtype)
        value.zero_().view(-1).scatter_(0, indices.long(), elements)

    def _num_sent(self, numel: int) -> int:
        return min(numel, math.ceil(self._fraction * numel))


def _begin(num_sent: int) -> int:
    """Returns the first byte of the elements."""
    return -(-_INDEX_BYTES * num_sent // _ALIGNED) * _ALIGNED


def _parts(message: Tensor, num_sent: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the indices and the elements of a message, as views."""
    indices = message[: _INDEX_BYTES * num_sent].view(torch.int32)
    return indices, message[_begin(num_sent) :].view(dtype)
