"""int8: whole numbers from -127 to 127, and a scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from pipegrad.plugins.codec import Carried
from pipegrad_codecs.rows import RowScaled


class Int8(RowScaled):
    """Sends a byte for each element and a scale for each row: about a quarter of float32.

    Args:
        feedback: Whether the rounding error of a gradient is added to the next one.
    """

    def __init__(self, *, feedback: bool = True) -> None:
        self.feedback = feedback

    def number(self, carried: Carried) -> tuple[torch.dtype, float]:
        """Returns the dtype of an element in a message, and its largest number."""
        return torch.int8, 127.0

    def round(self, scaled: Tensor) -> Tensor:
        """Rounds to the nearest whole number, in place."""
        return scaled.round_()
