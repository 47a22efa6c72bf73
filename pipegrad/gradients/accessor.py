"""Where a gradient lives: read and written through here, so that nothing else assumes ``.grad``."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class GradientAccessor(Protocol):
    """Finds a parameter's gradient. Autograd accumulates into what `write` put there."""

    def dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns the dtype in which gradients of `parameter` accumulate."""

    def read(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns the gradient, or None if there is none yet."""

    def write(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Puts a gradient in place; it may be a view of a bucket."""


class GradAttribute:
    """Gradients in ``parameter.grad``, in ``parameter.grad_dtype`` where the user set it."""

    def dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns ``parameter.grad_dtype``, which is the parameter's own dtype unless set."""
        return parameter.grad_dtype or parameter.dtype

    def read(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns ``parameter.grad``."""
        return parameter.grad

    def write(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Sets ``parameter.grad``."""
        parameter.grad = gradient


class Float32Grad(GradAttribute):
    """Gradients in ``parameter.grad``, in fp32 for parameters of lower precision.

    Microbatches then accumulate in fp32, and the optimizer must take gradients of another dtype
    than the parameter's.
    """

    def dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns ``torch.float32`` for bf16 and fp16 parameters, and tells autograd so."""
        if parameter.dtype in (torch.bfloat16, torch.float16) and parameter.grad is None:
            parameter.grad_dtype = torch.float32
        return super().dtype(parameter)
