"""Constructed: plug-ins that remember what they were made with, so that ranks can compare them."""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Self

from pipegrad.plugins.written import written


class Constructed:
    """Base of contracts whose instances may be given by a user.

    Attributes:
        made_with: The arguments of its constructor, as text.
    """

    made_with: tuple[tuple[str, str], ...]

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Stores the arguments of the plug-in, so that ranks can compare instances."""
        # Here and not in `__init__`: a subclass need not call the `__init__` of its base class.
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        plugin = super().__new__(cls)
        arguments = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
        plugin.made_with = tuple((name, written(arguments[name])) for name in sorted(arguments))
        return plugin


# `inspect.signature` takes the `__init__` of a subclass if it has one, otherwise this `__new__`. A
# plug-in without an `__init__` has no options, so this signature is empty.
Constructed.__new__.__signature__ = Signature(  # type: ignore[attr-defined]
    [Parameter("cls", Parameter.POSITIONAL_ONLY)]
)
