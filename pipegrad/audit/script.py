"""Script: runs an audit that a function of the user's file creates, in new processes."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from pipegrad.audit.audit import Audit
from pipegrad.audit.report import Report
from pipegrad.errors import ConfigError, in_words
from pipegrad.testing.ranks import run_ranks

TIMEOUT_SECONDS = 600.0

Target = str | Callable[[], Audit]


@dataclass(frozen=True)
class Run:
    """The options of one run of an audit.

    Attributes:
        target: ``FILE.py:function`` or ``module:function``; or a function at the top level of a
            module. It returns this rank's `Audit`.
        steps: Number of steps; None for one for each batch.
        tolerance: Largest error of a gradient; None to derive it.
        variants: Names of the variants that are compared; all by default.
    """

    target: Target
    steps: int | None = None
    tolerance: float | None = None
    variants: tuple[str, ...] = ()

    def here(self) -> Report:
        """Runs the audit on this rank; all ranks call it."""
        audit = audit_of(self.target)
        if unknown := set(self.variants) - set(audit.variants):
            raise ConfigError(
                f"{_name(self.target)} has no variant {min(unknown)!r}; it has "
                f"{list(audit.variants)}"
            )
        if self.variants:
            audit = replace(audit, variants={name: audit.variants[name] for name in self.variants})
        return audit.run(steps=self.steps, tolerance=self.tolerance)

    def in_ranks(self, num_ranks: int, timeout_seconds: float = TIMEOUT_SECONDS) -> Report:
        """Runs the audit in new gloo ranks, on CPU."""
        function(self.target)  # a typo need not start processes
        run = replace(self, target=_written(self.target))
        return run_ranks(run.here, num_ranks, timeout_seconds=timeout_seconds)[0]


def audit_of(target: Target) -> Audit:
    """Returns the audit that a function creates on this rank.

    Raises:
        ConfigError: If there is no such function, or it returns no `Audit`.
    """
    audit = function(target)()
    if not isinstance(audit, Audit):
        raise ConfigError(
            f"{_name(target)} returned {type(audit).__name__}, expected a pipegrad.Audit"
        )
    return audit


def _written(target: Target) -> str:
    """Returns a target as text, because other processes import it."""
    if isinstance(target, str):
        home, _, name = target.rpartition(":")
        return f"{Path(home).resolve()}:{name}" if home.endswith(".py") else target
    name, code = getattr(target, "__qualname__", ""), getattr(target, "__code__", None)
    if code is None or not name.isidentifier():
        raise ConfigError(
            f"{_name(target)} is no function at the top level of a file: ranks are other "
            f"processes, and import it from there"
        )
    return f"{inspect.getfile(target)}:{name}"


def function(target: Target) -> Callable[[], object]:
    """Returns the function of a target.

    Raises:
        ConfigError: If there is none. If the file raises an error, it is the cause.
    """
    if callable(target):
        return target
    home, colon, name = target.rpartition(":")
    if not (home and colon and name):
        raise ConfigError(f"{target!r}: expected FILE.py:function, or module:function")
    try:
        module = _file(Path(home)) if home.endswith(".py") else importlib.import_module(home)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{home} cannot be imported: {in_words(error)}") from error
    result: object = getattr(module, name, None)
    if not callable(result):
        near = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        raise ConfigError(f"{home} has no function {name!r}; it has {near}")
    return result


def _file(path: Path) -> ModuleType:
    """Imports a file as Python runs it: its folder comes first on the path."""
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    importlib.invalidate_caches()  # the file may be new
    module = importlib.import_module(path.stem)
    found = getattr(module, "__file__", None) or "a part of Python"
    if Path(found).resolve() != path:
        raise ImportError(f"{path.stem} is another module here, {found}: rename the file")
    return module


def _name(target: Target) -> str:
    return target if isinstance(target, str) else getattr(target, "__qualname__", repr(target))
