"""int8: whole numbers from -127 to 127, and a scale for each row."""

from __future__ import annotations

from typing import ClassVar

import torch

from pipegrad_codecs.rows import Dtypes, RowScaled


class Int8(RowScaled):
    """Sends a byte for each element and a scale for each row: about a quarter of float32."""

    dtypes: ClassVar[Dtypes] = {"activations": torch.int8, "gradients": torch.int8}
