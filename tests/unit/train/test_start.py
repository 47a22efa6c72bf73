"""Ranks of one start find each other in a store that has names of earlier starts."""

from __future__ import annotations

import os
import threading

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # public

from pipegrad.train.process.start import LAUNCH, store_of_start

SIZE = 3


def started(store: Store, ranks: list[int]) -> dict[int, str | None]:
    """Lets ranks start; returns what each reads of what rank 0 wrote, None if it fails."""
    found: dict[int, str | None] = {}

    def start(rank: int) -> None:
        try:
            own = store_of_start(store, rank, SIZE, 3.0)
            if rank == 0:
                own.set("address", str(len(found)))
            own.set(f"rank {rank}", "")
            own.wait([f"rank {other}" for other in range(SIZE)])
            found[rank] = own.get("address").decode()
        except dist.DistStoreError:
            found[rank] = None

    threads = [threading.Thread(target=start, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.slow
def test_a_later_start_does_not_see_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv(LAUNCH, "")
    store = HashStore()
    assert started(store, [0, 1, 2]) == dict.fromkeys(range(SIZE), "0")
    # Rank 2 was killed before it came, so the others have waited in vain.
    assert started(store, [0, 1]) == {0: None, 1: None}
    assert started(store, [2, 1, 0]) == dict.fromkeys(range(SIZE), "0")


def test_a_store_of_rank_0_is_new_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv(LAUNCH, "of a torchrun before")
    store = HashStore()
    assert store_of_start(store, 0, SIZE, 1.0) is store
    assert LAUNCH not in os.environ


def test_all_starts_of_a_launch_have_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine counts restarts alone: rank 0 began a new run after a restart of another one."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv(LAUNCH, "")
    names = []
    for store in (launch := HashStore(), launch, HashStore()):
        store_of_start(store, 0, 1, 1.0)
        names.append(os.environ[LAUNCH])
    assert names[0] == names[1] != names[2] != ""
