"""A hook of ours on a parameter that rests until it is needed."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from pipegrad.interop.private import accumulate_hooks


class Hook:
    """A hook of ours on one parameter. It rests until `run`, without any cost.

    torch has the hooks of a parameter in a dictionary, and calls its values, in its order.
    """

    # A function that is called may hold neither the parameter nor its bucket, because the garbage
    # collector does not see that a parameter holds its hooks.

    def __init__(self, parameter: nn.Parameter) -> None:
        handle = parameter.register_post_accumulate_grad_hook(_nothing)
        self.hooks = accumulate_hooks(parameter)  # the handle refers to them weakly
        self.number: int = handle.id
        self.rest()

    def run(self, call: Callable[[nn.Parameter], None]) -> None:
        """Makes autograd call this after all hooks that the parameter has now."""
        self.hooks.pop(self.number, None)
        self.hooks[self.number] = call

    def rest(self) -> None:
        """Calls nothing until `run`."""
        self.hooks.pop(self.number, None)

    def __del__(self) -> None:
        if hasattr(self, "number"):  # it is missing if torch has refused the hook
            self.rest()


def _nothing(_: nn.Parameter) -> None:
    """Is never called."""
