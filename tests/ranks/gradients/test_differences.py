"""Ranks that differ, in any way: an error on all of them; and the next meeting succeeds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipegrad import GradientSync
from pipegrad.comm import agreement
from pipegrad.comm.agreement import agree
from pipegrad.comm.store import store as the_store
from pipegrad.errors import PipegradError
from tests.support.gradients.cases import rank, replicated, stage
from tests.support.ranked import gathered


def sync_of() -> GradientSync:
    return replicated(stage(w=(2,)))


class Deadlocks:
    """Stands in for the store: a wait ends when all ranks wait or are done, by no clock."""

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name = store, name
        self.say("")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self.say(" ".join(keys))
        while not self._store.check(list(keys)):
            # Twice: one that was read first may have got its key while the others were read.
            if all(self._is_stuck()) and all(self._is_stuck()):
                raise dist.DistStoreError("all ranks wait")
            time.sleep(0.001)
        self.say("")

    def be_late(self) -> None:
        """Waits until the other ranks have given up, if they wait for this one."""
        self.say("late")
        while not (all(self._is_stuck(late_waits=True)) and all(self._is_stuck(late_waits=True))):
            time.sleep(0.001)
        self.say("")

    def say(self, waits_for: str) -> None:
        """Posts the keys that this rank waits for, or "", "late" or "done"."""
        self._store.set(f"{self._name}/{rank()}", f" {waits_for}")

    def _is_stuck(self, *, late_waits: bool = False) -> Iterator[bool]:
        for other in range(dist.get_world_size()):
            waits_for = self._store.get(f"{self._name}/{other}").decode().strip()
            if waits_for in ("", "late", "done"):
                yield waits_for != ""
            else:
                yield not late_waits and not self._store.check(waits_for.split(" "))


Script = tuple[str, ...]
VERBS = ("one", "two", "sync", "optimizer", "raise", "late")


def scripts(draw: random.Random) -> list[Script]:
    """Returns what each of three ranks does: all but one the same, or each its own."""
    one, other, third = (tuple(draw.choices(VERBS, k=draw.randint(0, 4))) for _ in range(3))
    ranks = draw.choice([[one, one, one], [one, other, other], [one, other, third]])
    return draw.sample(ranks, k=3)


def play(script: Script, deadlocks: Deadlocks) -> str:
    """Calls one verb after the other, and last the one that is the same on all ranks."""
    sync = sync_of()
    verbs: dict[str, Callable[[], object]] = {
        "one": lambda: agree("one", int),
        "two": lambda: agree("two", int),
        "sync": lambda: sync_of().close(),
        "optimizer": lambda: sync.optimizer(torch.optim.SGD, lr=0.1),
        "raise": lambda: agree("one", lambda: 1 // 0),
        "late": deadlocks.be_late,
    }
    try:
        for verb in script:
            verbs[verb]()
        agree("the end", int)
    except (PipegradError, ZeroDivisionError) as error:  # all ranks raised the second
        return f"{type(error).__name__}: {error}"
    finally:
        deadlocks.say("done")
        sync.close()
    return ""


@pytest.mark.ranks(3)
def test_verbs_in_another_order_are_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, store, failed = random.Random(0), the_store(), 0
    for number in range(40):
        example = scripts(draw)
        deadlocks = Deadlocks(store, f"waits {number}")
        dist.barrier()
        with monkeypatch.context() as patch:
            patch.setattr(agreement, "store", lambda deadlocks=deadlocks: deadlocks)
            words = gathered(play(example[rank()], deadlocks))
        assert all(words) or not any(words), (example, words)
        # The counts of meetings may differ after a failure: only named ones go on.
        assert len(agree("between", int, name=f"between {number}")) == 3
        failed += all(words)
    assert 0 < failed < 40
