"""How long a process waits for threads when it ends."""

from __future__ import annotations

import pytest

from pipegrad.comm.ending import Ending, set_all_in_vain


class Stuck:
    """A thread in a collective that never ends."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def stop(self) -> None: ...

    def join(self, timeout_seconds: float) -> bool:
        self.waits.append(timeout_seconds)
        return False


@pytest.mark.parametrize(("has_failed", "waits"), [(False, [10.0, 5.0]), (True, [0.0, 5.0])])
def test_after_a_failure_no_thread_has_time_for_its_collective(
    has_failed: bool, waits: list[float]
) -> None:
    """A stopped rank held others for 15 s more, in the thread that writes checkpoints."""
    thread = Stuck()
    ending = Ending(thread, threads=[thread], is_idle=lambda: True)
    if has_failed:
        set_all_in_vain()
    ending.end()
    assert thread.waits == pytest.approx(waits, abs=0.1)
