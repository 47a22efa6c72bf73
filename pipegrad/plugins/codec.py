"""The contract of edge codecs: a codec sends a value over a hop in fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch

from pipegrad.plugins.registry import CODECS, Registry
from pipegrad.plugins.written import Constructed

# Values that cross a hop: outputs of stages, and the gradients that come back.
Carried = Literal["activations", "gradients"]
CARRIED: tuple[Carried, ...] = ("activations", "gradients")


class EdgeCodec(Constructed, ABC):
    """Encodes a floating-point tensor as a message, and decodes the message.

    pipegrad does everything else. It calls a codec for tensors of floats alone, and only if the
    message is shorter than the tensor; it sends all others unchanged. Receives are posted early,
    because both ranks of a hop compute the length of a message in advance.

    A codec has no state: one instance serves all hops. Options are keyword-only arguments of
    ``__init__``. Subclasses import only ``pipegrad``'s public names. Equal tensors must give equal
    messages, in every process.

    A codec must not hide nan or inf. If a tensor has such an element, the decoded tensor must have
    one too, because loss scaling, and `GradientSync`, recognise an overflow by it.

    Attributes:
        carries: Kinds of values that it may encode: ``"activations"``, ``"gradients"`` or both.
        feedback: Whether the error of a gradient is added to the next gradient of the same hop and
            microbatch, before that is encoded. pipegrad keeps the errors.
    """

    carries: tuple[Carried, ...] = CARRIED
    feedback: bool = False

    @abstractmethod
    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Returns the bytes of the message of a tensor. It is pure: both ranks call it."""

    @abstractmethod
    def encode(self, value: torch.Tensor, message: torch.Tensor, carried: Carried) -> None:
        """Writes the message of a tensor.

        Args:
            value: A tensor of any floating-point dtype and any strides. It must not be changed.
            message: Bytes ``(nbytes,)``, not initialised; aligned for every dtype. All of them
                must be written.
            carried: Kind of the tensor.

        Sync: on the current stream.
        """

    @abstractmethod
    def decode(self, message: torch.Tensor, value: torch.Tensor, carried: Carried) -> None:
        """Writes the tensor of a message.

        Args:
            message: The message of `encode`. It must not be changed, or held.
            value: Contiguous, with the shape and dtype of the tensor; not initialised.
            carried: Kind of the tensor.

        Sync: on the current stream.
        """


CodecSpec = EdgeCodec | type[EdgeCodec] | str | Mapping[str, object]
"""How a user selects a codec: an instance, a class, a name, or a table of name and options."""

# mypy assumes that a type[T] is called (python/mypy#4717). The registry only compares with it.
codecs = Registry(CODECS, EdgeCodec)  # type: ignore[type-abstract]
