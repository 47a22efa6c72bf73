"""Commands, as processes that the fork server starts: it has imported torch, so they need not."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipegrad.testing import ranks

SECONDS = 300.0  # for any of them, on a machine that does much else
_numbers = itertools.count()


class Launched:
    """A launcher that runs in a folder. What it and its ranks print goes into files there."""

    def __init__(self, folder: Path, launch: Callable[[list[str]], Any], *words: str) -> None:
        self._files = [folder / f"launcher-{next(_numbers)}.{end}" for end in ("out", "err")]
        for file in self._files:
            file.touch()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = ranks._fork_server().Process(
            target=_launch, args=(launch, words, folder, self._files, environment)
        )
        self._process.start()
        self.pid = self._process.pid or 0

    def wait(self) -> int:
        """Returns the exit code."""
        self._process.join(SECONDS)
        assert self._process.exitcode is not None, f"it goes on: {self}"
        return self._process.exitcode

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
        """Returns the processes of its ranks."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/children")
        found = []
        for child in (int(number) for task in tasks for number in task.read_text().split()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if b"train" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
        return found

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
        os.dup2(os.open(file, os.O_WRONLY), number)
    launch([*words])


def torchrun(words: list[str]) -> None:
    from torch.distributed.run import main

    main(words)


def pipegrad(words: list[str]) -> None:
    from pipegrad.cli import main

    main(words, prog_name="pipegrad")


def is_running(process: int) -> bool:
    """Returns whether a process computes; a zombie does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
