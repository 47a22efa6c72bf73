"""Start: a part of torchrun's store for the ranks that were started together.

[Note: a store outlives its ranks] torchrun keeps one key-value store for all its restarts. There a
new rank finds the address of a rank that was killed, and cannot reach it. The number of restarts
cannot tell the starts apart: torchrun counts on each machine alone. So rank 0 draws a name for each
start. The other ranks answer with names of their own, and rank 0 writes whom it has heard. A rank
that reads the name of an earlier start does not find itself there, and reads again.
"""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public

from pipegrad.comm.store import SignedStore

LAUNCH = "PIPEGRAD_LAUNCH"  # the variable with a name of this launch, over all its starts
_KEY = "pipegrad/start"
_LAUNCH_KEY = "pipegrad/launch"
_LOOK_SECONDS = 1.0  # between looks for another start
_PAUSE_SECONDS = 0.05


def store_of_start(store: Store, rank: int, size: int, timeout_seconds: float) -> Store:
    """Returns the part of a store that only ranks of this start use; every rank must call it.

    Sets the variable `LAUNCH` if the store lives as long as the launch.

    Raises:
        dist.DistStoreError: If a rank does not come in time.
        MessageError: If another program has written into the store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        os.environ.pop(LAUNCH, None)
        return store  # rank 0 keeps it, so it ends with the ranks
    own, signed = uuid.uuid4().hex, SignedStore(store)
    # The first rank of the first start sets it, and all others read it.
    os.environ[LAUNCH] = signed.set_first(_LAUNCH_KEY, own).decode()
    if rank == 0:
        signed.set(_KEY, own)
        keys = [f"{_KEY}/{own}/{other}" for other in range(1, size)]
        signed.wait(keys, timedelta(seconds=timeout_seconds))
        signed.set(f"{_KEY}/{own}/all", " ".join(signed.text(key) for key in keys))
        return PrefixStore(own, store)
    deadline, answered = time.monotonic() + timeout_seconds, ""
    while time.monotonic() < deadline:
        start = signed.text(_KEY)
        if start != answered:
            signed.set(f"{_KEY}/{start}/{rank}", own)
            answered = start
        with suppress(dist.DistStoreError):  # not yet; perhaps it is an earlier start
            signed.wait([f"{_KEY}/{start}/all"], timedelta(seconds=_LOOK_SECONDS))
            if own in signed.text(f"{_KEY}/{start}/all").split():
                return PrefixStore(start, store)
        time.sleep(_PAUSE_SECONDS)
    raise dist.DistStoreError(f"rank 0 has not answered within {timeout_seconds:g} s")
