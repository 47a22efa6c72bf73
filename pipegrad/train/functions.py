"""Functions that a configuration names as ``module:function``, with their keyword arguments."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from pipegrad.errors import in_words
from pipegrad.plugins.registry import complaints_of
from pipegrad.train.config import Config
from pipegrad.train.schema import Named


def imported(config: Config, key: str, name: str) -> Callable[..., Any]:
    """Returns the function of a name.

    Raises:
        ConfigError: If it cannot be imported, or is no function.
    """
    try:
        function: object = pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user
        config.refuse(key, f"cannot be imported: {in_words(error)}", cause=error)
    if not callable(function):
        config.refuse(key, f"is {type(function).__name__}, expected a function")
    return function


def with_options(
    config: Config, key: str, choice: Named, given: Callable[[list[str]], Collection[str]]
) -> Callable[..., Any]:
    """Returns the function of a choice, its keyword arguments bound.

    Args:
        config: The configuration.
        key: Where the choice stands, for messages.
        choice: Name and keyword arguments.
        given: Takes the names of the function's parameters; returns those that the caller passes.

    Raises:
        ConfigError: As `imported` does; or if the function does not take these arguments.
    """
    function = imported(config, key, choice.name)
    passed = given(parameters_of(function))
    if complaint := complaints_of(function, choice.options, given=passed):
        config.refuse(key, f"the function {complaint}")
    return partial(function, **choice.options)


def parameters_of(function: Callable[..., object]) -> list[str]:
    """Returns the names of a function's parameters; none if it has no signature."""
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:  # some functions written in C
        return []
