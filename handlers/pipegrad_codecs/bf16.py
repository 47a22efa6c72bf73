"""bf16: wider numbers are rounded to bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from pipegrad import EdgeCodec
from pipegrad.plugins.codec import Carried


class BFloat16(EdgeCodec):
    """Rounds each number to bfloat16: half the bytes of float32, 8 bits of precision."""

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Returns two bytes for each element."""
        return 2 * torch.Size(shape).numel()

    def encode(self, value: Tensor, message: Tensor, carried: Carried) -> None:
        """Rounds."""
        message.view(torch.bfloat16).view(value.shape).copy_(value)

    def decode(self, message: Tensor, value: Tensor, carried: Carried) -> None:
        """Widens."""
        value.copy_(message.view(torch.bfloat16).view(value.shape))
