"""What is known of a process on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pipegrad.comm.watch.processes import ProcessId


def test_a_process_runs_is_stopped_and_ends() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        process = ProcessId.own()._replace(pid=child.pid, began=stat[19])
        assert process.state() == "running"
        child.send_signal(signal.SIGSTOP)
        while process.state() == "running":
            time.sleep(0.01)
        assert process.state() == "stopped"
    finally:
        child.kill()
    # It runs for a moment between the two, and ends as a zombie: nobody has waited for it.
    while process.state() != "ended":
        time.sleep(0.01)
    child.wait()
    assert process.state() == "ended"


def test_a_number_that_is_used_again_is_another_process() -> None:
    own = ProcessId.own()
    assert own.pid == os.getpid()
    assert own.state() == "running"
    assert own._replace(began="1").state() == "ended"
    assert own._replace(machine="another").state() == ""
    assert ProcessId.loaded(own.dumped()) == own
