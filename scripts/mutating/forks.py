"""Starts pytest in forks of a process that has imported what is slow to import."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

import pytest

_FILTERS = warnings.filters[:]  # of warnings, as Python has them when it starts
HOOK = Path(__file__).parent / "hook"
_PRELOADED = (
    "torch", "torch.distributed", "torch.distributed.device_mesh", "torch.distributed.pipelining",
    "torch.export", "numpy", "pydantic", "click", "rich", "hypothesis", "transformers",
)  # fmt: skip


def preload() -> None:
    """Imports what the tests import, but not the product."""
    for name in _PRELOADED:
        importlib.import_module(name)


def import_product(root: Path) -> None:
    """Imports the product before tests are mapped: how it is imported is not their matter."""
    sys.path[:0] = [str(root), str(root / "handlers")]
    for package in ("pipegrad", "pipegrad_handlers", "pipegrad_codecs"):
        folder = Path(importlib.import_module(package).__file__ or "").parent
        for path in set(folder.rglob("*.py")) - set(folder.rglob("__main__.py")):
            name = ".".join([package, *path.relative_to(folder).with_suffix("").parts])
            with contextlib.suppress(ImportError):  # of an extra
                importlib.import_module(name.removesuffix(".__init__"))


class Recorder:
    """A plug-in of pytest that writes the seconds of each test, and the failures."""

    def __init__(self, tree: Path, reply: Path, tier: str) -> None:
        self._tree, self._reply, self._tier = tree, reply, tier
        self._found: dict[str, Any] = {"seconds": {}, "failed": {}}
        self._begin = 0.0

    @pytest.hookimpl(trylast=True)  # tests/conftest.py gives the marks
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leaves the cases of a tier."""
        if self._tier:
            items[:] = [item for item in items if item.get_closest_marker(self._tier)]

    @pytest.hookimpl(trylast=True)  # tests/conftest.py says what the fork server imports
    def pytest_collection_finish(self) -> None:
        product = Path(sys.modules["pipegrad"].__file__ or "")
        assert product.is_relative_to(self._tree), f"{product} is not in {self._tree}"
        _fork_the_fork_server()

    def pytest_runtest_logstart(self) -> None:
        if "mutants_hook" in sys.modules:
            sys.modules["mutants_hook"].reset()
        self._begin = time.process_time()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = str(report.longrepr).strip().splitlines() or [""]
            why = next((line[1:].strip() for line in lines if line.startswith("E ")), lines[0])
            self._found["failed"].setdefault(report.nodeid, why[:200])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and report.nodeid:
            self._found["failed"][report.nodeid] = "cannot be imported"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._found["seconds"][nodeid] = round(time.process_time() - self._begin, 4)

    @pytest.hookimpl(trylast=True)  # tests/conftest.py ends ranks that are left
    def pytest_sessionfinish(self) -> None:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # its time counts as ours
        self._reply.write_text(json.dumps(self._found))


def _fork_the_fork_server() -> None:
    """Starts the fork server of `pipegrad.testing` as a fork: it need not import torch again.

    No test has run yet, so the ranks see nothing of one.
    """

    def forked(
        spawn: Callable[..., int], path: str, args: Sequence[str], passed: Sequence[int]
    ) -> int:
        if "forkserver" not in args[-1]:
            return spawn(path, args, passed)
        pid = os.fork()
        if pid:
            return pid
        try:
            # The caller's end of a pipe: the fork server ends when all copies of it are closed.
            ends = {fd: path.readlink() for fd, path in _open_files() if fd in passed}
            for fd in [fd for fd, path in _open_files() if path.readlink() in ends.values()]:
                if fd not in passed:
                    os.close(fd)
            warnings.resetwarnings()  # pytest makes them errors, but not in ranks
            warnings.filters[:] = _FILTERS
            exec(args[-1], {})
        finally:
            os._exit(0)

    util.spawnv_passfds = functools.partial(forked, util.spawnv_passfds)
    forkserver.ensure_running()


def _open_files() -> Iterator[tuple[int, Path]]:
    for path in [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]:
        with contextlib.suppress(FileNotFoundError):  # of this list itself
            path.readlink()
            yield int(path.name), path


def run_pytest(
    tree: Path, tests: Sequence[str], *, tier: str, options: argparse.Namespace, trace: str = ""
) -> dict[str, Any]:
    """Runs tests of a tree in a process of its own; returns what `Recorder` wrote, and "cpu".

    Of the tests only those of a tier run, if one is named.

    Without `trace`, a folder for the hook, it stops at the first failure. A process that does not
    end is killed: the reply has "late".
    """
    reply, log = (options.work / f"{name}-{os.getpid()}" for name in ("reply", "log"))
    reply.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with log.open("wb") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
            _enter(tree, trace)
            own = ["-q", "-p", "no:cacheprovider", "--timeout", str(options.timeout), "--tb=short"]
            own += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is preloaded
            sys.argv = ["pytest", *tests, *own, *([] if trace else ["-x"])]
            code = int(pytest.main(sys.argv[1:], plugins=[Recorder(tree, reply, tier)]))
        except BaseException:  # noqa: BLE001 - this process must not go on as the caller
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + options.timeout * (30 if trace else 4)
    while not (ended := os.wait4(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # also ranks that are left
    used = (ended if ended[0] else os.wait4(pid, 0))[2]
    found: dict[str, Any] = {"seconds": {}, "failed": {}}
    if reply.exists():
        found = json.loads(reply.read_text())
    elif ended[0]:  # the plug-in of pytest imports the product
        lines = log.read_text(errors="replace").strip().splitlines() or [""]
        found["failed"]["import"] = lines[-1][:200]
    if not ended[0]:
        found["late"] = True
    return found | {"cpu": round(used.ru_utime + used.ru_stime, 2)}


def _enter(tree: Path, trace: str) -> None:
    """Makes this process, and those that it starts, use a tree; installs the hook."""
    os.setsid()
    os.chdir(tree)
    paths = [str(tree), str(tree / "handlers")]
    sys.path[:] = [*paths, *sys.path]
    if trace:
        os.environ |= {"PIPEGRAD_MUTANTS_TRACE": trace, "PIPEGRAD_MUTANTS_ROOT": str(tree)}
        paths.insert(0, str(HOOK))
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    # Caches of the product have hashes of their sources, see `copy_tree`: none is ever too old.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if trace:
        loader = importlib.machinery.SourceFileLoader("mutants_hook", f"{HOOK}/sitecustomize.py")
        spec = importlib.util.spec_from_loader("mutants_hook", loader)
        assert spec is not None
        sys.modules["mutants_hook"] = importlib.util.module_from_spec(spec)
        loader.exec_module(sys.modules["mutants_hook"])


def work(number: int, jobs: int, do: Callable[[int, int], None]) -> Iterator[None]:
    """Calls do(i, worker) for each i below number, in processes; yields now and then to the end."""
    numbers, feed = os.pipe()
    os.write(feed, b"".join(i.to_bytes(2, "big") for i in range(number)))
    os.close(feed)
    workers = set[int]()
    for worker in range(jobs):
        pid = os.fork()
        if pid == 0:
            while taken := os.read(numbers, 2):
                try:
                    do(int.from_bytes(taken, "big"), worker)
                except Exception:  # noqa: BLE001 - the next one may work
                    traceback.print_exc()
            os._exit(0)
        workers.add(pid)
    while workers:
        time.sleep(1.0)
        workers = {pid for pid in workers if not os.waitpid(pid, os.WNOHANG)[0]}
        yield
