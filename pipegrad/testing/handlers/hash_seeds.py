"""Plans of other processes, which hash otherwise: handlers must not depend on the order of a set.

Starting Python and importing torch takes seconds, and every handler is asked about. So for each
hash seed one process is started, once. It answers each question in a fork of its own, which ends
with the answer: so no question finds anything that an earlier one left behind.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipegrad.testing.handlers import scenario
from pipegrad.testing.handlers.scenario import Specs

_TIMEOUT_SECONDS = 300
_ANSWER = "from pipegrad.testing.handlers import hash_seeds; hash_seeds.answer()"
_started: dict[tuple[str, str], _Other] = {}


def plans_under_seeds(specs: Specs, *seeds: str) -> list[subprocess.CompletedProcess[str]]:
    """Returns what new processes print as plans of these handlers, each under a PYTHONHASHSEED."""
    path = os.pathsep.join(sys.path)
    for seed in seeds:
        if (seed, path) not in _started:
            _started[seed, path] = _Other(seed, path)
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda seed: _started[seed, path].ask(specs), seeds))


class _Other:
    """A Python process with a hash seed of its own; it starts again if it has died."""

    def __init__(self, seed: str, path: str) -> None:
        self._environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        self._process = self._start()
        atexit.register(self._end)

    def ask(self, specs: Specs) -> subprocess.CompletedProcess[str]:
        """Returns the answer."""
        if self._process.poll() is not None:
            self._end()
            self._process = self._start()
        given, taken = self._process.stdin, self._process.stdout
        assert given is not None
        assert taken is not None
        try:
            question = specs, Path.cwd(), dict(os.environ)
            given.write(f"{pickle.dumps(question).hex()}\n")
            given.flush()
            answer = taken.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = self._process.wait() or 1
            return subprocess.CompletedProcess([], code, "", "it ended before it made a plan")
        code, plans, complaint = json.loads(answer)
        return subprocess.CompletedProcess([], code, plans, complaint)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _ANSWER],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _end(self) -> None:
        """Closes its standard input, at which it ends."""
        self._process.communicate()


def answer() -> None:
    """Answers each line of standard input with a line: exit code, plans, and what went wrong."""
    for question in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            signal.alarm(_TIMEOUT_SECONDS)  # which ends it
            os.dup2(2, 1)  # whatever a handler prints is no answer
            with os.fdopen(writing, "w") as out:
                out.write(json.dumps(_plans(question)))
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answered:
            found = answered.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not found:
            late = f" within {_TIMEOUT_SECONDS} s" if code == -signal.SIGALRM else ""
            found = json.dumps((code or 1, "", f"it ended with {code}, and made no plan{late}"))
        print(found, flush=True)  # noqa: T201 - to whoever asked


def _plans(question: str) -> tuple[int, str, str]:
    try:
        specs, folder, environment = pickle.loads(bytes.fromhex(question))
        os.chdir(folder)
        os.environ.update(environment)
        return 0, scenario.plans_as_text(specs), ""
    except BaseException:  # noqa: BLE001 - whoever asked tells of it
        return 1, "", traceback.format_exc()
