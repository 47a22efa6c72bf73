"""Where a gradient lives: an accessor reads and writes it.

Where the accessor is `GradAttribute`, gradients/bucket.py reads ``.grad`` itself. Others are for
steps 1 to 4 and 7 of the journey of a gradient in docs/internals.md: see gradients/careful.py.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from pipegrad.errors import StepError
from pipegrad.model.dtensor import PLAIN, is_dtensor, local


class GradientAccessor(Protocol):
    """Reads and writes a parameter's gradient. `read` returns the tensor of the last `write`.

    For a DTensor, the gradient is this rank's part. If your accessor keeps gradients elsewhere than
    `GradAttribute`, no optimizer finds them. Then make the optimizer from
    ``sync.optimizer_parameters()``, which have the gradients in ``.grad``. From `finish` to the
    next `prepare`, a whole result is in both. For example, all gradients in one dictionary::

        class Ledger:
            def __init__(self):
                self.entries = torch.utils.weak.WeakTensorKeyDictionary()

            def dtype(self, parameter):
                return parameter.dtype

            def read(self, parameter):
                return self.entries.get(parameter)

            def write(self, parameter, gradient):
                self.entries[parameter] = gradient

            def accumulated(self, parameter):
                gradient, parameter.grad = parameter.grad.detach(), None
                total = self.read(parameter)
                if total is None:
                    self.write(parameter, gradient.clone())
                else:
                    total.add_(gradient)

        sync = pipegrad.GradientSync(modules, topology, accessor=Ledger(), ...)
    """

    def dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns the dtype in which gradients of `parameter` accumulate."""

    def read(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns the gradient, or None if there is none yet."""

    def write(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Sets the gradient, which may be a view of a bucket."""

    def accumulated(self, parameter: nn.Parameter) -> None:
        """Called right after autograd has added to ``parameter.grad``; may move the gradient.

        Sync: on the stream that wrote ``parameter.grad``, perhaps in a thread of autograd.
        """


class GradAttribute:
    """Gradients in ``parameter.grad``, in ``parameter.grad_dtype`` if the user has set it."""

    def __init__(self) -> None:
        # A DTensor that is made from a part holds a new alias of the part. `read` must return the
        # same object that `write` was given: it is compared with the slot of a bucket.
        self._written = WeakTensorKeyDictionary()

    def dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns ``parameter.grad_dtype``, or the dtype of the parameter."""
        return parameter.grad_dtype or parameter.dtype

    def read(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns ``parameter.grad``; for a DTensor, its local part.

        Raises:
            StepError: If its placements are not those of its parameter.
        """
        gradient = parameter.grad
        # Most gradients are plain, and this runs several times for each parameter and step.
        if type(gradient) in PLAIN or not is_dtensor(gradient) or not is_dtensor(parameter):
            return gradient
        if gradient.placements != parameter.placements:
            raise StepError(
                f"a parameter of shape {tuple(parameter.shape)} lies over ranks by "
                f"{list(parameter.placements)}, its gradient by {list(gradient.placements)}: "
                f"redistribute what is computed from it, so that its gradient lies as it does"
            )
        written: torch.Tensor | None = self._written.get(gradient)
        return local(gradient) if written is None else written

    def write(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Sets ``parameter.grad``."""
        if gradient is None or not is_dtensor(parameter):
            parameter.grad = gradient
            return
        with torch.no_grad():
            # An optimizer steps a DTensor only with a DTensor as its gradient. The new one holds
            # the part itself, so the gradient still lies in its bucket.
            from torch.distributed.tensor import DTensor  # the parameter is one: no slow import

            whole = DTensor.from_local(
                gradient,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        self._written[whole] = gradient
        parameter.grad = whole

    def accumulated(self, parameter: nn.Parameter) -> None:
        """Does nothing: the gradient is already in ``parameter.grad``."""


class MainGrad:
    """Gradients in ``parameter.main_grad``, in fp32 by default, as in Megatron.

    Each gradient that autograd adds to ``parameter.grad`` is added to ``main_grad`` and dropped. A
    kernel may add to ``main_grad`` itself and set ``parameter.grad_added_to_main_grad = True``.
    Then the gradient from autograd is a placeholder, and is ignored. If no rank reduces a
    parameter, it has no ``main_grad`` before its first gradient of a step.

    From `finish` to the next `prepare`, ``main_grad`` is the result: with REPLICATE on all ranks,
    with OWNER on the owner. It shares memory with the ``.grad`` of the main parameter, unless the
    master dtype is another dtype. In that case clipping does not change ``main_grad``. With SHARD,
    a rank has only a shard of the result, in that ``.grad``, and ``main_grad`` is None.

    Args:
        dtype: In which gradients accumulate.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns the dtype of the constructor."""
        return self._dtype

    def read(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns ``parameter.main_grad``."""
        return getattr(parameter, "main_grad", None)

    def write(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Sets ``parameter.main_grad``."""
        named: Any = parameter
        named.main_grad = gradient
        named.grad_added_to_main_grad = False  # fused kernels need the attribute to exist

    def accumulated(self, parameter: nn.Parameter) -> None:
        """Adds ``parameter.grad`` to ``main_grad``, unless a kernel has done so."""
        named: Any = parameter
        gradient, parameter.grad = parameter.grad, None
        was_added = getattr(named, "grad_added_to_main_grad", False)
        if gradient is None or was_added:
            named.grad_added_to_main_grad = False
            return
        main = self.read(parameter)
        if main is None:  # a copy: autograd may share the gradient with others
            self.write(parameter, gradient.detach().to(self._dtype, copy=True))
        else:
            main.add_(gradient.detach())
