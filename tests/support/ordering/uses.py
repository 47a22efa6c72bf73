"""Where pipegrad uses its sync points: found in the code of all its modules, imported or not."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache
from types import CodeType

import pipegrad
from pipegrad.comm.sync_points import Site, sites


@cache
def uses() -> dict[str, list[str]]:
    """Returns for each site the qualified names of the functions that name it."""
    found: dict[str, set[str]] = {}
    for name in [info.name for info in pkgutil.walk_packages(pipegrad.__path__, "pipegrad.")]:
        if name.endswith("__main__"):
            continue
        module = importlib.import_module(name)
        named = {key: value.name for key, value in vars(module).items() if isinstance(value, Site)}
        code = compile(inspect.getsource(module), name, "exec") if named else None
        for function in functions(code):
            for key in named.keys() & function.co_names:
                found.setdefault(named[key], set()).add(function.co_qualname)
    return {name: sorted(found.get(name, ())) for name in sorted(sites)}


def functions(code: object) -> Iterator[CodeType]:
    """Yields the code of all functions in a code, also of those inside of functions."""
    for inner in code.co_consts if isinstance(code, CodeType) else ():
        if isinstance(inner, CodeType):
            yield inner
            yield from functions(inner)
