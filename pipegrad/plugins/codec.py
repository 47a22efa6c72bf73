"""The contract of edge codecs: how a value crosses a hop in fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch

from pipegrad.plugins.registry import CODECS, Registry
from pipegrad.plugins.written import Constructed

# What crosses a hop: what stages hand on, and the gradients that come back.
Carried = Literal["activations", "gradients"]
CARRIED: tuple[Carried, ...] = ("activations", "gradients")


class EdgeCodec(Constructed, ABC):
    """Makes a message of a floating-point tensor, and the tensor again of the message.

    pipegrad does everything else. It calls a codec for tensors of floats alone, and only if the
    message is shorter than the tensor; all others cross as they are. Both ranks of a hop know
    beforehand how long a message is, so receives are posted early.

    A codec has no state: one instance serves all hops. Options are keyword-only arguments of
    ``__init__``. Subclasses import only ``pipegrad``'s public names. Equal tensors must give equal
    messages, in every process.

    A codec must not hide nan or inf. If a tensor has such an element, the decoded tensor has one,
    too: loss scaling, and `GradientSync`, recognise an overflow by it.

    Attributes:
        carries: What it may carry: ``"activations"``, ``"gradients"`` or both.
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
            value: Of any floating-point dtype and any strides. It must not be changed.
            message: Bytes ``(nbytes,)``, not initialised; aligned for every dtype. All of them
                must be written.
            carried: What the tensor is.

        Sync: on the current stream.
        """

    @abstractmethod
    def decode(self, message: torch.Tensor, value: torch.Tensor, carried: Carried) -> None:
        """Writes the tensor of a message.

        Args:
            message: As `encode` has written it. It must not be changed, or held.
            value: Contiguous, with the shape and dtype of the tensor; not initialised.
            carried: What the tensor is.

        Sync: on the current stream.
        """


CodecSpec = EdgeCodec | type[EdgeCodec] | str | Mapping[str, object]
"""How a user selects a codec: an instance, a class, a name, or a table of name and options."""

# mypy assumes that a type[T] is called (python/mypy#4717). The registry only compares with it.
codecs = Registry(CODECS, EdgeCodec)  # type: ignore[type-abstract]
