"""The hook on a parameter that autograd runs whenever it has added to the gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef


class AccumulationHook:
    """Calls a method after each accumulation into one parameter.

    It holds neither the method's object nor the parameter. The garbage collector does not see that
    a parameter holds its hooks, so a strong reference would keep both for ever.

    Args:
        on_accumulated: A bound method; called with the parameter, possibly in autograd's threads.
    """

    def __init__(self, on_accumulated: Callable[[nn.Parameter], object]) -> None:
        self._called = weakref.WeakMethod(on_accumulated)
        self._handle: RemovableHandle | None = None
        self._hooks: dict[int, Any] = {}  # all hooks of the parameter, ours and the user's
        self._hooked: TensorWeakRef | None = None

    @property
    def runs_last(self) -> bool:
        """Whether all hooks of users run before this one. They may change the gradient."""
        return self._handle is not None and next(reversed(self._hooks), None) == self._handle.id

    def follow(self, parameter: nn.Parameter) -> None:
        """Watches `parameter` from now on; registers again where a user's hook came behind."""
        if self._hooked is not None and parameter is self._hooked() and self.runs_last:
            return
        self.remove()
        called = self._called

        def accumulated(parameter: nn.Parameter) -> None:
            if (method := called()) is not None:
                method(parameter)

        self._handle = parameter.register_post_accumulate_grad_hook(accumulated)
        # The handle has it weakly, and when garbage is collected such references go first.
        self._hooks = self._handle.hooks_dict_ref() or {}
        self._hooked = TensorWeakRef(parameter)

    def remove(self) -> None:
        """Leaves the parameter as it was before `follow`."""
        if self._handle is not None:
            self._hooks.pop(self._handle.id, None)
        self._handle = self._hooked = None

    def __del__(self) -> None:
        if hasattr(self, "_handle"):  # else an error came before it was complete
            self.remove()
