"""Chooses and orders tests, has fixtures of the registry's, and prints what took longest.

Every test but a mutation, and those of the built site, is `full`. Unit tests that are not `slow`,
and all `smoke` tests, are `quick`. ``pytest`` alone runs what is quick; with a path or ``-k`` it
runs all that they name.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipegrad.plugins.handler import GradientHandler
from pipegrad.plugins.registry import Registry
from pipegrad.testing import ranks
from tests.support import ranked
from tests.support.distributions import write_distribution
from tests.support.plugins import GROUP, Handlers, Install

NUM_LONGEST = int(os.environ.get("PIPEGRAD_LONGEST", "3"))
TESTS = Path(__file__).parent
LONG = (
    "parity/test_families",
    "ranks/docs",
    "ranks/train",
    "ranks/examples",
    "faults",
    "parity",
    "ranks",
)  # what the names of files begin with; the others follow


def is_named(config: pytest.Config) -> bool:
    """Returns whether the command line has a path or -k."""
    return config.args_source is config.ArgsSource.ARGS or bool(config.option.keyword)


def pytest_configure(config: pytest.Config) -> None:
    """Keeps files of tokens out of the home folder; ranks and other processes inherit it."""
    cache = tempfile.TemporaryDirectory()
    config.add_cleanup(cache.cleanup)
    os.environ["XDG_CACHE_HOME"] = cache.name


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Saves the quick run the imports of files that have no quick test."""
    if config.option.markexpr or is_named(config) or collection_path.suffix != ".py":
        return None
    is_unit = TESTS / "unit" in collection_path.parents
    return None if is_unit or "smoke" in collection_path.read_text() else True


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if not marks & {"mutation", "site"}:
            item.add_marker("full")
        if "smoke" in marks or (TESTS / "unit" in item.path.parents and "slow" not in marks):
            item.add_marker("quick")
    config.option.markexpr = config.option.markexpr or (
        "full or site" if is_named(config) else "quick"
    )
    addresses = [item.nodeid for item in items if " at 0x" in item.nodeid]
    assert not addresses, f"names that differ from process to process: {addresses}"
    # Long files first, so that no process is left with one while the others have nothing to do.
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Returns when the file of a test comes; by chance, if PIPEGRAD_SHUFFLE has a seed."""
    name = item.path.relative_to(TESTS).as_posix()
    if seed := os.environ.get("PIPEGRAD_SHUFFLE"):
        return zlib.crc32(f"{seed} {name}".encode())
    return next((turn for turn, begin in enumerate(LONG) if name.startswith(begin)), len(LONG))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    __tracebackhide__ = True
    return ranked.run(pyfuncitem) or None


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        ranked.end()


def pytest_sessionfinish() -> None:
    ranked.end()  # after an interrupt; ranks that stay would keep Python from ending


def pytest_collection_finish() -> None:
    preload()


def preload() -> None:
    """Lets the fork server import what the tests share; else every rank of every spawn does it."""
    ours = ("pipegrad.", "pipegrad_handlers.", "tests.support.")
    shared = [name for name in sys.modules if name.startswith(ours)]
    # Optimizers of torch import its compiler when they are used first: 1.2 s on each rank.
    modules = [*ranks._PRELOADED, "torch._dynamo", "pytest", *shared]
    ranks._fork_server().set_forkserver_preload(modules)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restores the environment: the command line sets it, and later tests start processes in it."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - {"PYTEST_CURRENT_TEST"}:  # pytest's own
        if name not in before:
            del os.environ[name]
    os.environ.update({k: v for k, v in before.items() if k != "PYTEST_CURRENT_TEST"})


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution in a directory of its own at the front of sys.path."""

    def install(name: str, **contents: Any) -> Path:
        site = tmp_path / f"site{len(list(tmp_path.iterdir()))}"
        write_distribution(site, name, group=GROUP, **contents)
        monkeypatch.syspath_prepend(site)
        return site

    yield install
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def registry() -> Handlers:
    return Registry(GROUP, GradientHandler)  # type: ignore[type-abstract]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    seconds = defaultdict[str, float](float)
    for report in (r for reports in terminalreporter.stats.values() for r in reports):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    if sum(seconds.values()) > 60:
        longest = sorted(seconds, key=lambda file: -seconds[file])[:NUM_LONGEST]
        files = ", ".join(f"{file} {seconds[file]:.0f} s" for file in longest)
        terminalreporter.write_line(f"longest: {files}")
    reports = [
        (report, dict(report.user_properties)["killed by"])
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if isinstance(report, pytest.TestReport) and "killed by" in dict(report.user_properties)
    ]
    if reports:
        for report, killer in reports:
            mutant = report.nodeid.partition("[")[2].removesuffix("]")
            terminalreporter.write_line(f"{mutant:40}{killer or 'SURVIVED'}")
        killed = sum(killer is not None for _, killer in reports)
        terminalreporter.write_line(f"mutation score: {killed} of {len(reports)} killed")
