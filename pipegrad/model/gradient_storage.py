"""Where a gradient lives: read and written through here, so that nothing else assumes ``.grad``."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from pipegrad.errors import StepError
from pipegrad.model.dtensor import is_dtensor, local


class GradientAccessor(Protocol):
    """Finds a parameter's gradient, which is what `write` put there, until another one comes.

    Of a DTensor it is this rank's part. One of your own that is no `GradAttribute` keeps gradients
    where no optimizer looks: then the optimizer is made of ``sync.optimizer_parameters()``, which
    have them in ``.grad``. From `finish` to the next `prepare` a whole result is in both places.
    For example, all gradients in one place::

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
                there = self.read(parameter)
                if there is None:
                    self.write(parameter, gradient.clone())
                else:
                    there.add_(gradient)

        sync = pipegrad.GradientSync(modules, topology, accessor=Ledger(), ...)
    """

    def dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns the dtype in which gradients of `parameter` accumulate."""

    def read(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns the gradient, or None if there is none yet."""

    def write(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Puts a gradient in place; it may be a view of a bucket."""

    def accumulated(self, parameter: nn.Parameter) -> None:
        """Called right after autograd has added to ``parameter.grad``; may take it from there.

        Sync: on the stream that wrote ``parameter.grad``, possibly in a thread of autograd.
        """


class GradAttribute:
    """Gradients in ``parameter.grad``, in ``parameter.grad_dtype`` where the user set it."""

    def __init__(self) -> None:
        # A DTensor makes an alias of the part it is made of: this is who was meant.
        self._written = WeakTensorKeyDictionary()

    def dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns ``parameter.grad_dtype``, which is the parameter's own dtype unless set."""
        return parameter.grad_dtype or parameter.dtype

    def read(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns ``parameter.grad``, of a DTensor its local part.

        Raises:
            StepError: If it is not laid out as its parameter is.
        """
        gradient = parameter.grad
        if not is_dtensor(gradient) or not is_dtensor(parameter):
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
            from torch.distributed.tensor import DTensor  # it is one, so that is imported

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
        """Does nothing: it is where it belongs."""


class MainGrad:
    """Gradients in ``parameter.main_grad``, in fp32 by default, as Megatron has them.

    What autograd adds to ``parameter.grad`` is added to it, and dropped. A kernel that adds to
    ``main_grad`` itself, and says so by ``parameter.grad_added_to_main_grad = True``, is believed:
    what autograd has from it then is a placeholder. Where nobody reduces a parameter, there is no
    ``main_grad`` before its first gradient of a step.

    From `finish` to the next `prepare` ``main_grad`` is the result: with REPLICATE on all ranks,
    with OWNER on the owner. It is the memory of ``.grad`` of what the optimizer steps, unless the
    stored dtype is another one: then clipping does not reach it. With SHARD a rank has only a shard
    of the result, in that ``.grad``, and ``main_grad`` is None.

    Args:
        dtype: In which gradients accumulate.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns the dtype that was asked for."""
        return self._dtype

    def read(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns ``parameter.main_grad``."""
        return getattr(parameter, "main_grad", None)

    def write(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Sets ``parameter.main_grad``."""
        named: Any = parameter
        named.main_grad = gradient
        named.grad_added_to_main_grad = False  # kernels ask whether there is one

    def accumulated(self, parameter: nn.Parameter) -> None:
        """Adds ``parameter.grad`` to ``main_grad``, unless a kernel has."""
        named: Any = parameter
        gradient, parameter.grad = parameter.grad, None
        was_added = getattr(named, "grad_added_to_main_grad", False)
        if gradient is None or was_added:
            named.grad_added_to_main_grad = False
            return
        main = self.read(parameter)
        if main is None:  # not the gradient itself, which others may share
            self.write(parameter, gradient.detach().to(self._dtype, copy=True))
        else:
            main.add_(gradient.detach())
