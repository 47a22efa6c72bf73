"""Gradients in ``parameter.main_grad``, instead of ``parameter.grad``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version


class MainGrad:
    """Gradients in ``parameter.main_grad``, in fp32 by default, as in Megatron.

    Each gradient that autograd adds to ``parameter.grad`` is added to ``main_grad`` and dropped. A
    kernel may add to ``main_grad`` itself and set ``parameter.grad_added_to_main_grad = True``.
    Then the gradient from autograd is a placeholder, and is ignored. In a step, ``main_grad`` is
    zeros before the first gradient.

    From `finish` to the next `prepare`, ``main_grad`` is the result: with REPLICATE on all ranks,
    with OWNER on the owner. It shares memory with the ``.grad`` of the main parameter, unless the
    master dtype is another dtype. In that case clipping does not change ``main_grad``. With SHARD,
    a rank has only a shard of the result, in that ``.grad``, and ``main_grad`` is None.

    Args:
        dtype: dtype in which gradients accumulate.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype


def gradient_dtype(parameter: nn.Parameter, main_grad: MainGrad | None) -> torch.dtype:
    """Returns the dtype in which gradients of a parameter accumulate."""
    if main_grad is not None:
        return main_grad.dtype
    return parameter.grad_dtype or parameter.dtype


def take_gradient(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Adds ``parameter.grad`` to ``main_grad``, unless a kernel has done so."""
    named: Any = parameter
    gradient, parameter.grad = parameter.grad, None
    was_added, named.grad_added_to_main_grad = (
        getattr(named, "grad_added_to_main_grad", False),
        False,
    )
    main = getattr(named, "main_grad", None)
    if main is None:
        if gradient is not None and not was_added:  # copy, because autograd may share it
            named.main_grad = gradient.detach().to(dtype, copy=True)
    elif was_added:
        increment_version(main)  # a kernel writes to an address, which no counter shows
    elif gradient is not None:
        main.add_(gradient.detach())
