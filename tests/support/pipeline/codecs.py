"""Codecs of tests: one that rounds to float32, and one that fails when it is told to."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from pipegrad import EdgeCodec
from pipegrad.plugins.codec import Carried


class Single(EdgeCodec):
    """Rounds float64 to float32."""

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return 4 * torch.Size(shape).numel()

    def encode(self, value: Tensor, message: Tensor, carried: Carried) -> None:
        message.view(torch.float32).view(value.shape).copy_(value)

    def decode(self, message: Tensor, value: Tensor, carried: Carried) -> None:
        value.copy_(message.view(torch.float32).view(value.shape))


class Fails(Single):
    """Raises in one of its calls, or returns what it should not.

    Attributes:
        told: Which call of which method raises, counted down; of the process.
        size: What `nbytes` returns, if it is not None.
    """

    told: ClassVar[dict[str, int]] = {}
    size: ClassVar[object] = None

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        self._count("nbytes")
        size: Any = self.size
        return super().nbytes(shape, dtype) if size is None else size

    def encode(self, value: Tensor, message: Tensor, carried: Carried) -> None:
        self._count(f"encode {carried}")
        super().encode(value, message, carried)

    def decode(self, message: Tensor, value: Tensor, carried: Carried) -> None:
        self._count(f"decode {carried}")
        super().decode(message, value, carried)

    def _count(self, method: str) -> None:
        self.told[method] = self.told.get(method, 0) - 1
        if self.told[method] == 0:
            raise ValueError(f"no {method}")


class RefusesOdd(Single):
    """Raises for values of an odd number of rows."""

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        if shape[0] % 2:
            raise ValueError("no odd rows")
        return super().nbytes(shape, dtype)


class Holds(Single):
    """Keeps views of messages, which it must not, and a copy of each.

    Attributes:
        held: The views with their copies; of the process.
    """

    held: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def decode(self, message: Tensor, value: Tensor, carried: Carried) -> None:
        self.held.append((message[:8], message[:8].clone()))
        super().decode(message, value, carried)
