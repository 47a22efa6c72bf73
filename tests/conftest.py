"""Chooses tests by their tier, orders them, adds up their CPU seconds, and has common fixtures.

``pytest`` alone runs the first tier in two processes. With a path or ``-k`` it runs all tests that
they name. `tests.support.tiers` says what the tiers are.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

from pipegrad.plugins.handler import GradientHandler
from pipegrad.plugins.registry import Registry
from pipegrad.testing import ranks
from tests.support import cpu_seconds, ranked, tiers
from tests.support.distributions import write_distribution
from tests.support.plugins import GROUP, Handlers, Install

BEGAN = pytest.StashKey[float]()


def is_named(config: pytest.Config) -> bool:
    """Returns whether the command line has a path or -k."""
    if worker := getattr(config, "workerinput", None):
        return bool(worker["is_named"])
    return config.args_source is config.ArgsSource.ARGS or bool(config.option.keyword)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    """Tells a worker what its command line does not: it has the paths of all tests."""
    node.workerinput["is_named"] = is_named(node.config)
    node.workerinput["tier"] = node.config.option.markexpr


def tier_of(config: pytest.Config) -> str:
    """Returns the tier that runs whole; nothing for a part of the tests."""
    tier = str(config.option.markexpr)
    return tier if tier in tiers.TIERS and not is_named(config) else ""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Lets pytest alone run the first tier, in two processes."""
    if worker := getattr(config, "workerinput", None):
        config.option.markexpr = worker["tier"]
    elif not is_named(config):
        config.option.markexpr = config.option.markexpr or "first"
        if config.option.numprocesses is None and not config.option.usepdb:
            config.option.numprocesses, config.option.dist = 2, "loadfile"
            config.option.loadscopereorder = False


def pytest_configure(config: pytest.Config) -> None:
    """Keeps files of tokens and of hypothesis out of the home folder and the tree; ranks, too."""
    os.environ["XDG_CACHE_HOME"] = cache = empty_folder(config)
    set_hypothesis_home_dir(cache)
    settings.register_profile("any machine", deadline=None)  # a busy one is slow for a moment
    settings.load_profile("any machine")
    os.environ["OMP_NUM_THREADS"] = "1"  # each rank is a process; more threads fight for the cores


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Says what runs."""
    lines = {
        "first": "first tier: one case of everything, with ranks on gloo; 3 minutes on two cores",
        "landing": "landing tier: what a change must pass, with all of the first tier",
        "night": "night tier: every case of every test",
    }
    return [lines[tier]] if (tier := tier_of(config)) else []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Saves the first tier the imports of files that have none of its tests."""
    is_file = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.option.markexpr != "first" or is_named(config) or not is_file:
        return None
    file = collection_path.relative_to(tiers.TESTS.parent).as_posix()
    return None if tiers.has_first(file, tiers.table()) else True


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.mark(items)
    addresses = [item.nodeid for item in items if " at 0x" in item.nodeid]
    assert not addresses, f"names that differ from process to process: {addresses}"
    is_choosing = "PIPEGRAD_TIERS" in os.environ  # scripts/tiers
    if not is_named(config) and not is_choosing and (gone := tiers.gone(items)):
        raise pytest.UsageError(f"tests/tiers.json has tests that are gone: {gone}: scripts/tiers")
    # Long files first, so that no process is left with one while the others have nothing to do.
    rows, seed = tiers.table(), os.environ.get("PIPEGRAD_SHUFFLE")
    files = {item.path: tiers.split(item.nodeid)[0] for item in items}
    turns = {path: -tiers.seconds_of_file(file, rows) for path, file in files.items()}
    if seed:
        turns = {path: zlib.crc32(f"{seed} {file}".encode()) for path, file in files.items()}
    items.sort(key=lambda item: turns[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    __tracebackhide__ = True
    return ranked.run(pyfuncitem) or None


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        ranked.end()


def pytest_sessionfinish() -> None:
    ranked.end()  # after an interrupt; ranks that stay would keep Python from ending


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets tests run in an empty folder: a file of a relative path never lands in the tree."""
    os.chdir(empty_folder(session.config))
    preload()


def empty_folder(config: pytest.Config) -> str:
    """Makes a folder that this process removes in the end, and no fork of it."""
    folder = tempfile.mkdtemp(prefix="pipegrad-tests-")
    config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[BEGAN] = cpu_seconds.spent()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    if call.when == "teardown" and BEGAN in item.stash:
        item.user_properties.append(("cpu seconds", cpu_seconds.spent() - item.stash[BEGAN]))
    yield


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


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the CPU seconds of a tier; a folder that is over its budget makes the run fail."""
    reports = [
        report
        for outcome in ("passed", "failed", "skipped", "")
        for report in terminalreporter.stats.get(outcome, [])
        if isinstance(report, pytest.TestReport)
    ]
    found: dict[str, dict[str, Any]] = {r.nodeid: dict(r.user_properties) for r in reports}
    seconds = {name: own["cpu seconds"] for name, own in found.items() if "cpu seconds" in own}
    if path := os.environ.get("PIPEGRAD_SECONDS"):
        Path(path).write_text(json.dumps({k: round(v, 3) for k, v in seconds.items()}))
    if (tier := tier_of(config)) in {"first", "landing"}:
        lines, over = tiers.report(tier, seconds)
        for line in lines:
            terminalreporter.write_line(line)
        if over:
            terminalreporter.write_line(f"OVER BUDGET: {', '.join(over)}; tests/budget.toml")
            terminalreporter._session.exitstatus = pytest.ExitCode.TESTS_FAILED
