"""Tests that run inside of ranks: ``@pytest.mark.ranks(2)``.

Such a test is a function at the top of its file. Every rank calls it, and it asserts there. Tests
of one file and number of ranks share the processes, one after the other, each within seconds of its
own; after a failure the next test has new ones, and behind one that leaves ranks of no use
(``ends_world=True``). A test takes its parameters, `tmp_path` (one folder
for all ranks), `monkeypatch` (one a rank), and fixtures whose values can be pickled.

    @pytest.mark.ranks(2)
    def test_a_sum_is_the_same_everywhere() -> None:
        total = torch.tensor(rank() + 1.0)
        dist.all_reduce(total)
        assert total == 3.0
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion.rewrite import rewrite_asserts

from pipegrad.testing import Ranks

SECONDS = 120.0  # of a test, on a machine that does much else; it takes far less

T = TypeVar("T")
_worlds: dict[int, Ranks] = {}  # of the current file, by number of ranks


def run(item: pytest.Function) -> bool:
    """Runs a test on ranks, if it has the mark; returns whether it did."""
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return False
    (num_ranks,), seconds = mark.args, mark.kwargs.get("seconds", SECONDS)
    params = item.callspec.params if hasattr(item, "callspec") else {}
    rows = [
        next(i for i, row in enumerate(rows) if all(params[name] is row[name] for name in row))
        for rows in _tables(item.function)
    ]
    names = [
        name for name in item.fixturenames if name in inspect.signature(item.function).parameters
    ]
    given = {n: item.funcargs[n] for n in names if n not in params and n != "monkeypatch"}
    if num_ranks not in _worlds or not _worlds[num_ranks].is_open:
        _worlds[num_ranks] = Ranks(num_ranks)
    where = item.module.__name__, str(item.path), item.function.__name__
    try:
        _worlds[num_ranks].run(
            run_test, where, rows, given, "monkeypatch" in names, timeout_seconds=seconds
        )
        if mark.kwargs.get("ends_world"):
            _worlds.pop(num_ranks).close()
    except Exception as error:  # noqa: BLE001 - whatever a rank raised
        failure = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    else:
        return True
    pytest.fail(failure, pytrace=False)


def gathered(value: T) -> list[T]:
    """Returns the values of all ranks, by rank; called on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def end() -> None:
    """Ends the ranks of a file."""
    for world in _worlds.values():
        world.close()
    _worlds.clear()


def run_test(
    where: tuple[str, str, str], rows: Sequence[int], given: dict[str, Any], patches: bool
) -> None:
    """Runs a test on this rank: its module, file and name, and a row of each of its tables."""
    torch.manual_seed(0)
    random.seed(0)
    module, path, name = where
    function = getattr(_rewritten(module, path), name)
    # A rank looks its parameters up: a lambda among them could not be sent.
    for table, row in zip(_tables(function), rows, strict=True):
        given |= table[row]
    with pytest.MonkeyPatch.context() as monkeypatch:
        try:
            function(**given, **({"monkeypatch": monkeypatch} if patches else {}))
        except pytest.fail.Exception as failure:  # it cannot be pickled
            raise AssertionError(str(failure)) from None


def _rewritten(name: str, path: str) -> ModuleType:
    """Imports a test file as pytest does: a failed assert says its values."""
    if name not in sys.modules:
        source = Path(path).read_bytes()
        tree = ast.parse(source)
        rewrite_asserts(tree, source, path)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        exec(compile(tree, path, "exec", dont_inherit=True), vars(module))
    return sys.modules[name]


def _tables(function: Callable[..., Any]) -> list[list[dict[str, Any]]]:
    """Returns the parameters of a test, by name: a table a mark, a row a set."""
    tables = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names, rows = mark.args[:2]
            names = [n.strip() for n in names.split(",")] if isinstance(names, str) else names
            sets = [
                row
                if isinstance(row, pytest.ParameterSet)
                else pytest.param(*(row if len(names) > 1 else [row]))
                for row in rows
            ]
            tables.append([dict(zip(names, row.values, strict=True)) for row in sets])
    return tables
