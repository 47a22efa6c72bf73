"""Plans of processes with other hash seeds: handlers must not depend on the order of a set.

Starting Python and importing torch takes seconds, and every handler needs such plans. So one
process is started for each hash seed. It answers each question in a new fork, which ends with the
answer. So a question cannot see the state of an earlier question.
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
_processes: dict[tuple[str, str], _Process] = {}


def plans_under_seeds(specs: Specs, *seeds: str) -> list[subprocess.CompletedProcess[str]]:
    """Returns the plans of these handlers from other processes, one for each PYTHONHASHSEED."""
    # A process finds modules by its path, so another `sys.path` needs another process.
    path = os.pathsep.join(sys.path)
    for seed in seeds:
        if (seed, path) not in _processes:
            _processes[seed, path] = _Process(seed, path)
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda seed: _processes[seed, path].ask(specs), seeds))


class _Process:
    """A Python process with its own hash seed. It starts again if it has died."""

    def __init__(self, seed: str, path: str) -> None:
        self._environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        self._process = self._start()
        atexit.register(self._end)

    def ask(self, specs: Specs) -> subprocess.CompletedProcess[str]:
        """Returns the plans of some handlers."""
        # A handler may have ended the process, for example by a signal. The next question must not
        # fail because of it.
        if self._process.poll() is not None:
            self._end()
            self._process = self._start()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            question = specs, Path.cwd(), dict(os.environ)
            stdin.write(f"{pickle.dumps(question).hex()}\n")
            stdin.flush()
            answer = stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            exit_code = self._process.wait() or 1
            return subprocess.CompletedProcess([], exit_code, "", "it ended before it made a plan")
        exit_code, plans, complaint = json.loads(answer)
        return subprocess.CompletedProcess([], exit_code, plans, complaint)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _ANSWER],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _end(self) -> None:
        """Closes the standard input of the process, which ends it."""
        self._process.communicate()


def answer() -> None:
    """Answers each line of standard input with a line: exit code, plans, and what went wrong."""
    for question in sys.stdin:
        # Only the fork imports a handler. So its modules and its changes of global state disappear
        # with the fork.
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            signal.alarm(_TIMEOUT_SECONDS)  # ends the fork after the timeout
            os.dup2(2, 1)  # output of a handler must not mix with the answer
            with os.fdopen(writing, "w") as out:
                out.write(json.dumps(_plans(question)))
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as file:
            reply = file.read()
        # The pipe is read to its end before the wait. A fork that writes much would block else.
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not reply:
            timeout = f" within {_TIMEOUT_SECONDS} s" if code == -signal.SIGALRM else ""
            reply = json.dumps((code or 1, "", f"it ended with {code}, and made no plan{timeout}"))
        print(reply, flush=True)  # noqa: T201 - the answer to the parent process


def _plans(question: str) -> tuple[int, str, str]:
    try:
        specs, folder, environment = pickle.loads(bytes.fromhex(question))
        os.chdir(folder)
        os.environ.update(environment)
        return 0, scenario.plans_as_text(specs), ""
    except BaseException:  # noqa: BLE001 - the parent process reports it
        return 1, "", traceback.format_exc()
