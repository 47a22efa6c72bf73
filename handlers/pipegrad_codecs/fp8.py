"""fp8: floating-point numbers of eight bits, and a scale for each row."""

from __future__ import annotations

import torch

from pipegrad.plugins.codec import Carried
from pipegrad_codecs.rows import RowScaled

# Gradients of one row differ more in size than activations do: they have more bits of exponent.
_DTYPES: dict[Carried, torch.dtype] = {
    "activations": torch.float8_e4m3fn,
    "gradients": torch.float8_e5m2,
}


class Float8(RowScaled):
    """Sends a byte for each element and a scale for each row: e4m3 activations, e5m2 gradients.

    Args:
        feedback: Whether the rounding error of a gradient is added to the next one.
    """

    def __init__(self, *, feedback: bool = True) -> None:
        self.feedback = feedback

    def number(self, carried: Carried) -> tuple[torch.dtype, float]:
        """Returns the dtype of an element in a message, and its largest number."""
        dtype = _DTYPES[carried]
        return dtype, torch.finfo(dtype).max
