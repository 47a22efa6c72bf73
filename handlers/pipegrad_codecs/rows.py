"""Rows: numbers of few bits, and a scale for each row along the last dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from pipegrad import EdgeCodec
from pipegrad.plugins.codec import Carried

_SCALE_BYTES = 4  # float32
_FLOAT32 = torch.finfo(torch.float32)

Dtypes = Mapping[Carried, torch.dtype]


class RowScaled(EdgeCodec):
    """Divides each row by a scale that makes its largest element the largest number.

    A message is the scales of all rows, and then one byte for each element. The scale of a row with
    nan or inf is nan or inf, and so are all its decoded elements. A finite row stays finite:
    elements that float32 cannot hold become its largest number.

    Attributes:
        dtypes: The dtype of an element in a message, for activations and for gradients.
    """

    dtypes: ClassVar[Dtypes]

    def __init__(self, *, feedback: bool = True) -> None:
        self.feedback = feedback

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Returns a byte for each element, and four for each row."""
        numel = torch.Size(shape).numel()
        return numel + _SCALE_BYTES * _num_rows(numel, shape)

    def encode(self, value: Tensor, message: Tensor, carried: Carried) -> None:
        """Writes scales, then elements."""
        dtype = self.dtypes[carried]
        largest = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
        rows = value.reshape(_num_rows(value.numel(), value.shape), -1)
        scales, elements = _parts(message, len(rows), dtype)
        peak = rows.abs().amax(dim=1, keepdim=True)
        scale = peak.to(torch.float32).div_(largest)
        # The scale of a row of zeros, or of numbers too small for float32, is not zero: the row is
        # divided by it. And the scale times the largest number is no inf, if the row has none: an
        # additive mask has the smallest number of its dtype. The limit is rounded down for that.
        limit = _FLOAT32.max / largest * (1 - _FLOAT32.eps)
        scales.copy_(torch.where(peak.isfinite(), scale.clamp(_FLOAT32.tiny, limit), scale))
        if rows.dtype == torch.float64:
            rows = rows.clamp(-_FLOAT32.max, _FLOAT32.max)
        # One product and no division for each element.
        scaled = rows.to(torch.float32) * scales.reciprocal()
        # A copy to integers would cut off; a copy to floats rounds.
        elements.copy_(scaled if dtype.is_floating_point else scaled.round_())

    def decode(self, message: Tensor, value: Tensor, carried: Carried) -> None:
        """Multiplies elements by their scales."""
        rows = value.view(_num_rows(value.numel(), value.shape), -1)
        scales, elements = _parts(message, len(rows), self.dtypes[carried])
        rows.copy_(elements.to(torch.float32).mul_(scales))


def _num_rows(numel: int, shape: tuple[int, ...]) -> int:
    return numel // shape[-1] if shape and shape[-1] else 1


def _parts(message: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the scales and the elements of a message, as views."""
    begin = _SCALE_BYTES * num_rows
    scales = message[:begin].view(torch.float32).view(num_rows, 1)
    return scales, message[begin:].view(dtype).view(num_rows, -1)
