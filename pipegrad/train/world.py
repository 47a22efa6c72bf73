"""Which process this is: its process group, its device, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public

from pipegrad.errors import in_words, root_of
from pipegrad.train.config import Config

_LOCAL = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}


def device_of_rank(config: Config) -> torch.device:
    """Returns this rank's device; ``auto`` is the CPU unless every local rank has a CUDA card."""
    local, num_local = (int(os.environ.get(n, d)) for n, d in _LOCAL.items())
    found = torch.accelerator.current_accelerator(check_available=True)
    cards = torch.accelerator.device_count() if found is not None else 0
    wanted = config.train.device
    if wanted == "auto":
        has_own = found is not None and found.type == "cuda" and cards >= num_local
        wanted = "cuda" if has_own else "cpu"
    kind, _, index = wanted.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if found is None or kind != found.type:
        there = "cpu" if found is None else f"{found.type} or cpu"
        config.refuse("train.device", f"this machine has {there}")
    place = index if index.isdigit() else str(local)
    if int(place) >= cards or (index and not index.isdigit()):
        config.refuse(
            "train.device",
            f"{num_local} ranks need a {kind} device each, this machine has {cards}: start fewer "
            f"ranks, choose 'cpu', or name one that is there, as in '{kind}:0'",
        )
    return torch.device(kind, int(place))


@contextlib.contextmanager
def world() -> Iterator[None]:
    """Joins torchrun's ranks, or is a world of one; a process group that is there is left alone.

    A rank of torchrun ends here. See [Note: how a rank ends].
    """
    if dist.is_initialized():
        yield
        return
    if "RANK" not in os.environ:
        dist.init_process_group(store=HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()
        return
    dist.init_process_group()
    rank, code = dist.get_rank(), 0
    try:
        yield
        dist.destroy_process_group()
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    except SystemExit as told:
        code = told.code if isinstance(told.code, int) else int(told.code is not None)
    except BaseException as error:  # noqa: BLE001 - the process ends here
        traceback.print_exception(error)
        print(f"Error on rank {rank}: {in_words(root_of(error))}", file=sys.stderr)  # noqa: T201
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# [Note: how a rank ends] An interpreter that finalizes kills the threads that come back to it, and
# where that unwinds C++ it aborts the process: after an error, those that waited in torch for peers
# that are gone; and, it seems, one after two of some hundred and fifty runs that had ended
# well, when lanes' threads were not joined yet. torchrun takes an abort for a failed job. What is
# registered to run at exit is run, and the process ends without finalization.
