"""Which process this is: its process group, its device, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]  # public
from torch.distributed.rendezvous import rendezvous

from pipegrad.errors import ConfigError, in_words, root_of
from pipegrad.train.config import Config

_NEEDED = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
# How many processes were started, by torch's name and by those of Slurm and MPI.
_COUNTS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_START = "Start the ranks by `torchrun --nproc-per-node N -m pipegrad train CONFIG`"
_JOIN_SECONDS = 600.0  # for the last rank to come
_SILENT_SECONDS = 10.0  # before a rank that waits says so
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
    location = index if index.isdigit() else str(local)
    if int(location) >= cards or (index and not index.isdigit()):
        config.refuse(
            "train.device",
            f"{num_local} ranks need a {kind} device each, this machine has {cards}: start fewer "
            f"ranks, choose 'cpu', or name one that is there, as in '{kind}:0'",
        )
    return torch.device(kind, int(location))


@contextlib.contextmanager
def world() -> Iterator[None]:
    """Joins torchrun's ranks, or is a world of one; a process group that is there is left alone.

    A rank of torchrun ends here. See [Note: how a rank ends].

    Raises:
        ConfigError: If the environment is not one that ranks can be joined by, or they do not come.
    """
    if dist.is_initialized():
        yield
        return
    _check_environment(os.environ)
    if "RANK" not in os.environ:
        dist.init_process_group(store=HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()
        return
    _join()
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


def _check_environment(found: Mapping[str, str]) -> None:
    """Refuses variables that torchrun would not set, and ranks that would each train alone."""
    if "RANK" not in found:
        for name in _COUNTS:
            if found.get(name, "1").isdigit() and int(found.get(name, "1")) > 1:
                raise ConfigError(
                    f"{name} is {found[name]}, but RANK is not set: each process would train "
                    f"alone. {_START}; if one process is wanted, unset {name}"
                )
        return
    missing = [name for name in _NEEDED if not found.get(name)]
    if missing:
        raise ConfigError(f"RANK is set, but {', '.join(missing)} not. {_START}")
    for name in _NUMBERS:
        if not found.get(name, "0").isdecimal():
            raise ConfigError(f"{name} is {found[name]!r}, expected a number. {_START}")
    if int(found["RANK"]) >= int(found["WORLD_SIZE"]):
        told = f"RANK is {found['RANK']}, expected less than WORLD_SIZE, {found['WORLD_SIZE']}"
        raise ConfigError(f"{told}. {_START}")


def _join() -> None:
    """Makes the default process group of the ranks that the environment tells of.

    Raises:
        ConfigError: If not all of them come in time.
    """
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    location = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    waiting = threading.Timer(
        _SILENT_SECONDS,
        print,
        [f"rank {rank} waits for all {size} ranks (WORLD_SIZE) to come to {location}"],
        {"file": sys.stderr, "flush": True},
    )
    waiting.daemon = True
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one a machine says so
        waiting.start()
    try:
        found = rendezvous("env://", timeout=timedelta(seconds=_JOIN_SECONDS))
        store, of_rank, of_size = next(found)
        store.set_timeout(timedelta(minutes=30))  # as torch does
        dist.init_process_group(
            store=PrefixStore("default_pg", store), rank=of_rank, world_size=of_size
        )
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        told = str(error).partition("\n")[0]
        raise ConfigError(
            f"rank {rank} of {size} (WORLD_SIZE) cannot join the others at {location} "
            f"(MASTER_ADDR, MASTER_PORT): {told}"
        ) from error
    finally:
        waiting.cancel()


# [Note: how a rank ends] An interpreter that finalizes kills the threads that come back to it, and
# where that unwinds C++ it aborts the process: after an error, those that waited in torch for peers
# that are gone; and, it seems, one after two of some hundred and fifty runs that had ended
# well, when comm streams' threads were not joined yet. torchrun takes an abort for a failed job.
# What is registered to run at exit is run, and the process ends without finalization.
