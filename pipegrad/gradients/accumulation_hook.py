"""The hook on a parameter that autograd runs after each addition to its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef


class AccumulationHook:
    """Calls a method after each accumulation into one parameter.

    It has only weak references to the method's object and to the parameter. The garbage collector
    does not see that a parameter holds its hooks. So with strong references neither would be freed.

    While it is paused, a function that does nothing has its place among the hooks. The place stays,
    because torch may be going through the hooks of the parameter.

    Args:
        on_accumulated: A bound method. It is called with the parameter, perhaps in a thread of
            autograd.
    """

    def __init__(self, on_accumulated: Callable[[nn.Parameter], object]) -> None:
        called = weakref.WeakMethod(on_accumulated)

        def accumulated(parameter: nn.Parameter) -> None:
            if (method := called()) is not None:
                method(parameter)

        self._accumulated = accumulated
        self._handle: RemovableHandle | None = None
        self._hooks: dict[int, Any] = {}  # all hooks of the parameter, also those of users
        self._hooked: TensorWeakRef | None = None

    @property
    def runs_last(self) -> bool:
        """Whether all hooks of users run before this one. They may change the gradient."""
        return self._handle is not None and next(reversed(self._hooks), None) == self._handle.id

    def follow(self, parameter: nn.Parameter) -> None:
        """Watches `parameter` from now on, with a hook that runs after all hooks of users."""
        if self._hooked is not None and parameter is self._hooked():
            self.resume()
            return
        self.remove()
        self._handle = parameter.register_post_accumulate_grad_hook(self._accumulated)
        # The handle has only a weak reference to this table. A garbage collection clears weak
        # references first, and then `remove` would not find it.
        self._hooks = self._handle.hooks_dict_ref() or {}
        self._hooked = TensorWeakRef(parameter)

    def pause(self) -> None:
        """Calls nothing until `resume`."""
        if self._handle is not None:
            self._hooks[self._handle.id] = _do_nothing

    def resume(self) -> None:
        """Calls the method again, after all hooks of users; does nothing before `follow`."""
        if self._handle is None:
            return
        # A user's hook that was added later would run after this hook, and could change a gradient
        # that was already sent. So the hook goes behind it.
        if not self.runs_last:
            self._hooks.pop(self._handle.id, None)
        self._hooks[self._handle.id] = self._accumulated

    def remove(self) -> None:
        """Leaves the parameter as it was before `follow`."""
        if self._handle is not None:
            self._hooks.pop(self._handle.id, None)
        self._handle = self._hooked = None

    def __del__(self) -> None:
        if hasattr(self, "_handle"):  # it is missing if `__init__` has raised an error
            self.remove()


def _do_nothing(_: nn.Parameter) -> None:
    """Has the place of a hook that is paused."""
