"""fp8: floating-point numbers of eight bits, and a scale for each row."""

from __future__ import annotations

from typing import ClassVar

import torch

from pipegrad_codecs.rows import Dtypes, RowScaled


class Float8(RowScaled):
    """Sends a byte for each element and a scale for each row: e4m3 activations, e5m2 gradients."""

    # Gradients of one row differ more in size than activations do: they have more bits of exponent.
    dtypes: ClassVar[Dtypes] = {"activations": torch.float8_e4m3fn, "gradients": torch.float8_e5m2}
