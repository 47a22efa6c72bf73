"""PluginContract: the common part of the contracts of handlers and of codecs."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from typing import Any

from pipegrad.errors import PluginOptionError
from pipegrad.plugins.registry import Registry


class PluginContract:
    """Checks how a plugin is found and constructed.

    A subclass names it in `_plugin`.
    """

    def test_it_is_found_and_says_where_it_comes_from(self) -> None:
        _, registry, spec = self._plugin()
        resolved = registry.resolve(spec)
        again = registry.resolve(pickle.loads(pickle.dumps(spec)))
        self._check(
            pickle.loads(pickle.dumps(resolved.identity)) == again.identity,
            f"its identity is {resolved.identity}, on another rank {again.identity}: use options "
            f"whose repr() tells their value",
        )

    def test_its_options_are_keywords(self) -> None:
        _, registry, spec = self._plugin()
        cls = type(registry.resolve(spec).plugin)
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL
        wrong = [p.name for p in inspect.signature(cls).parameters.values() if p.kind in kinds]
        self._check(
            not wrong,
            f"its constructor takes {wrong} by position, but configurations give options by name: "
            f"make them keywords, def __init__(self, *, ...)",
        )

    def test_an_unknown_option_is_refused_by_name(self) -> None:
        _, registry, spec = self._plugin()
        table = spec if isinstance(spec, Mapping) else {"name": spec}
        reply = "nothing, it was accepted"
        try:
            registry.resolve({**table, "no_such_option": 1})
        except PluginOptionError as error:
            reply = str(error)
        self._check(
            "has no option 'no_such_option'" in reply and "allowed" in reply,
            f"given an option 'no_such_option', it said: {reply}; expected a refusal that lists "
            f"what is allowed: name all options in __init__, without **",
        )

    def _plugin(self) -> tuple[str, Registry[Any], Any]:
        """Returns the kind, the registry of such plugins, and the plugin as in a configuration."""
        raise NotImplementedError

    def _check(self, good: bool, complaint: str) -> None:
        __tracebackhide__ = True  # of pytest
        if not good:
            kind, registry, spec = self._plugin()
            raise AssertionError(f"{kind} {registry.resolve(spec)}: {complaint}")
