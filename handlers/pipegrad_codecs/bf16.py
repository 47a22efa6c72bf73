"""bf16: wider numbers are rounded to bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from pipegrad import EdgeCodec
from pipegrad.plugins.codec import Carried


class BFloat16(EdgeCodec):
    """Rounds each number to bfloat16: half the bytes of float32, 8 bits of precision.

    Finite numbers stay finite: those that bfloat16 cannot hold become its largest number.
    """

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Returns two bytes for each element."""
        return 2 * torch.Size(shape).numel()

    def encode(self, value: Tensor, message: Tensor, carried: Carried) -> None:
        """Rounds."""
        # The smallest number of float32, which is in additive masks, would be rounded to -inf.
        largest = torch.finfo(torch.bfloat16).max
        bounded = torch.where(value.isinf(), value, value.clamp(-largest, largest))
        message.view(torch.bfloat16).view(value.shape).copy_(bounded)

    def decode(self, message: Tensor, value: Tensor, carried: Carried) -> None:
        """Widens."""
        value.copy_(message.view(torch.bfloat16).view(value.shape))
