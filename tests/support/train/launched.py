"""Commands, as processes that the fork server starts: it has imported torch, so they need not.

Python processes that torch's launcher starts are forks of it, and need not either. Where a test
wants the reader's own start, with new interpreters, it says so.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.run import main as torchrun_main

from pipegrad.cli import main as pipegrad_main
from pipegrad.testing import ranks

SECONDS = 300.0  # for any of them, on a machine that does much else
_numbers = itertools.count()
_gate: list[int] = []  # a pipe, in a launcher whose ranks are being forked


class Launched:
    """A launcher that runs in a folder. What it and its ranks print goes into files there.

    Args:
        folder: Where it runs.
        launch: `torchrun` or `pipegrad`.
        *words: Of its command line.
        anew: Whether its ranks are new interpreters, which import torch.
        variables: Further environment.
    """

    def __init__(
        self,
        folder: Path,
        launch: Callable[[list[str]], Any],
        *words: str,
        anew: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._files = [folder / f"launcher-{next(_numbers)}.{end}" for end in ("out", "err")]
        for file in self._files:
            file.touch()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
        launch = launch if anew else partial(_forking, launch)
        self._process = ranks._fork_server().Process(
            target=_launch, args=(launch, words, folder, self._files, environment)
        )
        self._process.start()
        self.pid = self._process.pid or 0

    def ended(self, seconds: float = SECONDS) -> int | None:
        """Waits for its end; returns the exit code, None if it goes on."""
        self._process.join(seconds)
        return self._process.exitcode

    def wait(self) -> int:
        """Returns the exit code."""
        code = self.ended()
        assert code is not None, f"it goes on: {self}"
        return code

    def until(
        self, is_so: Callable[[], object], *, has_ended: bool = False, poll_seconds: float = 0.05
    ) -> None:
        """Waits until something is so; fails if the launcher ends before, unless it has ended."""
        deadline = time.monotonic() + SECONDS
        while not is_so():
            assert has_ended or self._process.exitcode is None, f"it ended: {self}"
            assert time.monotonic() < deadline, f"it never was so: {self}"
            time.sleep(poll_seconds)

    def __str__(self) -> str:
        return f"{self.printed}{self.errors}"

    @property
    def printed(self) -> str:
        return self._files[0].read_text()

    @property
    def errors(self) -> str:
        return self._files[1].read_text()

    def ranks(self) -> list[int]:
        """Returns the processes of its ranks: torch's launcher gives each a session."""
        found = []
        for task in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += [int(number) for number in task.read_text().split()]
        return [child for child in found if _session(child) == child]

    def kill(self) -> None:
        """Ends it and its ranks."""
        for process in [*self.ranks(), self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.join()


def _launch(
    launch: Callable[[list[str]], Any],
    words: Sequence[str],
    folder: Path,
    files: Sequence[Path],
    environment: dict[str, str],
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # who runs the tests may ignore it, as nohup does
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    launch([*words])


def torchrun(words: list[str]) -> None:
    torchrun_main(words)


def pipegrad(words: list[str]) -> None:
    pipegrad_main(words, prog_name="pipegrad")


def _forking(launch: Callable[[list[str]], Any], words: list[str]) -> None:
    """Launches; Python programs are forks of this process."""
    SubprocessHandler._popen = _forked  # type: ignore[method-assign]
    launch(words)


def _forked(
    self: SubprocessHandler, args: tuple[Any, ...], env: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a Python program as torch's launcher does; but nothing is executed after the fork.

    A rank that connects to the launcher's store makes a thread of it look up an address. A fork at
    that time takes a lock of libc along, for which the new rank would wait for ever. So no rank
    begins before the last one is there.
    """
    if not _gate:
        _gate[:] = os.pipe()
    process = subprocess.Popen(
        args,
        env=env,
        stdout=self._stdout,
        stderr=self._stderr,
        start_new_session=True,
        preexec_fn=partial(_be_python, args, env, _gate),  # noqa: PLW1509 - it never returns
    )
    if int(env["LOCAL_RANK"]) == int(env["LOCAL_WORLD_SIZE"]) - 1:
        while _gate:
            os.close(_gate.pop())
    return process


def _be_python(command: Sequence[str], env: Mapping[str, str], gate: list[int]) -> NoReturn:
    """Is what a new interpreter with this command line would be, to its end."""
    opened = os.dup2(gate[0], 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))  # Popen goes on, as if a program had begun
    os.read(opened, 1)  # to its end: the launcher has closed the other
    os.close(opened)
    gc.enable()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # the launcher's
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(env)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    code: Any = None
    try:
        _run_python([word for word in command[1:] if word != "-u"])
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:  # noqa: BLE001 - as Python does at its top
        code, trace = 1, error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # a new interpreter has no frames of this file
        error.__traceback__ = trace
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as ended:
            code = ended.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run_python(words: list[str]) -> None:
    """Runs a module or a script with its words; with -P it sees no folder of its own."""
    is_safe = words[0] == "-P"
    words = words[is_safe:]
    if words[0] == "-m":
        sys.argv, sys.path[:0] = words[1:], [] if is_safe else [str(Path.cwd())]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = words, [str(Path(words[0]).resolve().parent)]
        runpy.run_path(words[0], run_name="__main__")


def _session(process: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(process)
    return None


def listening(process: int) -> set[str]:
    """Returns the addresses on which a process listens, as /proc/net has them."""
    own = {str(link.readlink()) for link in Path(f"/proc/{process}/fd").iterdir() if link.exists()}
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]
    ]
    listeners = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return {row[1].partition(":")[0] for row in listeners}


def is_running(process: int) -> bool:
    """Returns whether a process computes; a zombie does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
