"""Finds plug-ins by name: entry points, and ``module:attr``.

A broken plug-in does not disturb others, because a listing imports nothing, and only the selected
plug-in is loaded. Every rank has the same list, because the order of all results depends only on
names, never on ``sys.path``, sets or hash seeds. No other file reads entry points.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Generic, TypeVar

from pipegrad.errors import PluginError, PluginNotFoundError, PluginOptionError

# Entry-point groups. They are here, because listing plug-ins needs no torch.
HANDLERS = "pipegrad.handlers"
REPORTERS = "pipegrad.reporters"
CODECS = "pipegrad.codecs"

T = TypeVar("T")


@dataclass(frozen=True)
class Plugin:
    """The origin of a plug-in, known without an import.

    Attributes:
        name: The name that selects it; ``module:qualname`` for an object without a name.
        value: ``module:qualname`` of its class.
        distribution: Name of its distribution, "" if unknown.
        version: Version of that distribution, "" if unknown.
    """

    name: str
    value: str
    distribution: str = ""
    version: str = ""

    def __str__(self) -> str:
        return f"{self.name!r} ({self.value}, {self.source})"

    @property
    def source(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}".strip() or "of no distribution"


@dataclass(frozen=True, kw_only=True)
class ResolvedPlugin(Plugin, Generic[T]):
    """A plug-in ready for use, and its identity, which ranks compare and runs record.

    Attributes:
        plugin: The instance.
        options: Sorted pairs (option, its value as text) of its constructor.
    """

    plugin: T
    options: tuple[tuple[str, str], ...] = ()

    @property
    def identity(self) -> tuple[str, str, str, str, tuple[tuple[str, str], ...]]:
        """Everything except the instance: plain data that ranks compare."""
        return self.name, self.value, self.distribution, self.version, self.options


class Registry(Generic[T]):
    """The plug-ins of one entry-point group: subclasses of `base`, found by name.

    Iterating yields all plug-ins by (name, distribution, value), without importing any.
    """

    def __init__(self, group: str, base: type[T]) -> None:
        self.group = group
        self.base = base

    def __iter__(self) -> Iterator[Plugin]:
        # A distribution may be on `sys.path` twice, for example installed and as a source tree.
        installed: dict[tuple[str, str, str], Plugin] = {}
        for entry in metadata.entry_points(group=self.group):
            distribution = (entry.dist and entry.dist.name) or ""
            version = (entry.dist and entry.dist.version) or ""
            plugin = Plugin(entry.name, entry.value, distribution, version)
            installed.setdefault((entry.name, _normalized(distribution), entry.value), plugin)
        yield from sorted(installed.values(), key=lambda p: (p.name, p.distribution, p.value))

    def resolve(self, spec: T | type[T] | str | Mapping[str, object]) -> ResolvedPlugin[T]:
        """Returns the plug-in of `spec`, constructed.

        Args:
            spec: An instance, a class, a name, or a table of ``name`` and options. A name is looked
                up among entry points (``distribution::name`` selects one of several). Then it is
                imported if it has the form ``module:attr``.

        Raises:
            PluginNotFoundError: If no plug-in has this name.
            PluginOptionError: If the plug-in does not take these options.
            PluginError: If several distributions have the name, if the plug-in cannot be imported,
                or if it is not a concrete subclass of `base`.
        """
        from pipegrad.plugins.written import written  # needs torch, which a listing does not need

        if isinstance(spec, self.base):
            value = _value(type(spec))
            return ResolvedPlugin(value, value, plugin=spec, options=getattr(spec, "made_with", ()))
        # Store the options as text, because ranks compare it, and it is equal in all processes.
        options: dict[str, Any] = dict(spec) if isinstance(spec, Mapping) else {"name": spec}
        if "name" not in options:
            raise PluginOptionError(f"the table {options} lacks 'name': which plug-in it is for")
        plugin, loaded = self._find(options.pop("name"))
        cls = self._checked(plugin, loaded)
        if complaints := complaints_of(cls, options):
            raise PluginOptionError(f"plug-in {plugin} {complaints}")
        try:
            constructed = cls(**options)
        except (Exception, SystemExit) as error:
            raise PluginOptionError(
                f"plug-in {plugin} cannot be constructed with {redacted(options)}: {error!r}"
            ) from error
        return ResolvedPlugin(
            plugin.name,
            plugin.value,
            plugin.distribution,
            plugin.version,
            plugin=constructed,
            options=tuple((option, written(options[option])) for option in sorted(options)),
        )

    def resolve_all(
        self, specs: Sequence[T | type[T] | str | Mapping[str, object]]
    ) -> dict[str, ResolvedPlugin[T]]:
        """Returns the plug-ins of a list by name. A repeated name gets ``#index`` at its end.

        Raises:
            PluginError: As `resolve` does, or if `specs` is a string.
        """
        if isinstance(specs, str):
            raise PluginError(
                f"plug-ins of group {self.group!r} are {specs!r}, expected a list: [{specs!r}]"
            )
        by_name: dict[str, ResolvedPlugin[T]] = {}
        for index, resolved in enumerate(map(self.resolve, specs)):
            name = resolved.name
            by_name[f"{name}#{index}" if name in by_name else name] = resolved
        return by_name

    def _find(self, target: object) -> tuple[Plugin, object]:
        """Returns the plug-in of `target`, and the loaded object."""
        if not isinstance(target, str):
            return Plugin(_value(target), _value(target)), target
        distribution, _, name = target.rpartition("::")
        matches = [
            plugin
            for plugin in self
            if plugin.name == name
            if not distribution or _normalized(plugin.distribution) == _normalized(distribution)
        ]
        if not matches and ":" in target and "::" not in target:
            matches = [Plugin(target, target)]
        if not matches:
            raise PluginNotFoundError(self._missing(target))
        # Two plug-ins with the same name are an error, because a choice would depend on the order
        # of `sys.path`, which may differ between ranks.
        if len(matches) > 1:
            claims = "; ".join(
                f"{p.source} {p.value} ('{p.distribution}::{name}')" for p in matches
            )
            raise PluginError(
                f"{len(matches)} plug-ins of group {self.group!r} are called {target!r}: {claims}. "
                f"Pick one by its distribution::name or as 'module:attr', or uninstall the others."
            )
        # Do not cache the object, because a process can then try again after a repair.
        plugin = matches[0]
        try:
            return plugin, metadata.EntryPoint(plugin.name, plugin.value, self.group).load()
        except (Exception, SystemExit) as error:
            advice = (
                "repair or uninstall it, or select another"
                if plugin.distribution
                else "repair it, or add the folder of its module to PYTHONPATH"
            )
            raise PluginError(
                f"plug-in {plugin} of group {self.group!r} cannot be imported: {error!r}; {advice}"
            ) from error

    def _checked(self, plugin: Plugin, loaded: object) -> type[T]:
        """Returns `loaded` if it is a concrete subclass of `base`; otherwise raises."""
        expected = f"expected a concrete subclass of {_value(self.base)}"
        if not (isinstance(loaded, type) and issubclass(loaded, self.base)):
            # Remove addresses in memory, because the error would differ from rank to rank.
            words = re.sub(r" at 0x[0-9a-f]+", "", repr(loaded))
            raise PluginError(f"plug-in {plugin} is {words}: {expected}")
        if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
            raise PluginError(f"plug-in {plugin} lacks {', '.join(missing)}(): {expected}")
        return loaded

    def _missing(self, target: str) -> str:
        known = [f"{p.distribution}::{p.name}" if "::" in target else p.name for p in self]
        return (
            f"no plug-in of group {self.group!r} is called {target!r}; known, closest first: "
            f"{closest_first(target, known)}. Install the distribution that brings it, or give its "
            f"class as 'module:attr'."
        )


def _normalized(distribution: str) -> str:
    """Returns the name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _value(target: object) -> str:
    """Returns ``module:qualname`` of a class or function, and the `repr` of anything else."""
    qualname = getattr(target, "__qualname__", None)
    return f"{target.__module__}:{qualname}" if qualname else repr(target)


def complaints_of(
    function: Callable[..., object], options: Collection[str], *, given: Collection[str] = ()
) -> str:
    """Returns the mistakes in the names of `options` for `function`; "" if there are none.

    Args:
        function: A class or function. It is not called; its signature is read. If it has no
            signature, all options are allowed.
        options: Names that will be passed by keyword.
        given: Parameters that the caller passes itself. They are neither missing nor allowed.
    """
    try:
        every = inspect.signature(function).parameters.values()
    except ValueError:  # some functions written in C
        return ""
    by_name = [p for p in every if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    allowed = [p.name for p in by_name if p.name not in given]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in every)
    unknown = [o for o in sorted(options) if o not in allowed and (o in given or not takes_any)]
    needed = [p.name for p in by_name if p.default is p.empty and p.name in allowed]
    missing = [name for name in needed if name not in options]
    if not unknown and not missing:
        return ""
    complaints = (
        *(f"has no option {option!r}" for option in unknown),
        *(f"needs the option {option!r}" for option in missing),
    )
    # Only the first mistake orders the names, because one suggestion is enough for a message.
    closest = closest_first((unknown + missing)[0], allowed)
    return f"{', '.join(complaints)}; allowed, closest first: {closest}"


def closest_first(name: str, known: Iterable[str]) -> str:
    """Returns the known names as one line: first those close to `name`, then the others, sorted."""
    names = sorted(set(known))
    plain = {name.lower(): name for name in reversed(names)}
    close = [plain[match] for match in difflib.get_close_matches(name.lower(), plain)]
    return ", ".join(close + [name for name in names if name not in close]) or "none"


REDACTED = "(redacted)"
_SECRET = re.compile(
    r"apikey|auth|authorization|credentials?|key|passphrase|passw(or)?d|pwd|secrets?|token"
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s@]+(?=@)")


def redacted(value: Any, name: str = "") -> Any:  # noqa: ANN401 - what TOML and JSON have
    """Returns plain data without secrets."""
    words = [word.lower() for word in _WORD.findall(name)]
    if value is not None and any(map(_SECRET.fullmatch, words)):
        return REDACTED
    if isinstance(value, Mapping):
        return {key: redacted(inside, str(key)) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inside) for inside in value]
    return _CREDENTIALS.sub(REDACTED, value) if isinstance(value, str) else value
