"""The process of a rank: its process group, its device, and its end.

[Note: how a rank ends] A Python interpreter that finalizes kills threads that come back to it. If
this unwinds C++ code, the process aborts, and torchrun takes an abort for a failed job. This
happened after errors, to threads that waited in torch for peers that were gone. It also happened
to one or two of about 150 runs that had ended well, probably because threads of comm streams were
not joined yet. So exit functions run, and then the process ends without finalization.

[Note: a store outlives its ranks] torchrun keeps one key-value store for all its restarts. There a
new rank finds the address of a rank that was killed, and cannot reach it. The number of restarts
cannot tell the starts apart: torchrun counts on each machine alone. So rank 0 draws a name for each
start. The other ranks answer with names of their own, and rank 0 writes whom it has heard. A rank
that reads the name of an earlier start does not find itself there, and reads again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]  # public
from torch.distributed.rendezvous import rendezvous

from pipegrad.comm.ending import set_all_in_vain
from pipegrad.comm.failures import STALLED
from pipegrad.comm.store import SignedStore
from pipegrad.comm.watch import watch
from pipegrad.errors import ConfigError
from pipegrad.train.config import Config
from pipegrad.train.process_end import Signals, exit_code, fail

LAUNCH = "PIPEGRAD_LAUNCH"  # the variable with a name of this launch, over all its starts
_KEY = "pipegrad/start"
_LAUNCH_KEY = "pipegrad/launch"
_LOOK_SECONDS = 1.0  # between looks for another start
_PAUSE_SECONDS = 0.05
_NEEDED = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
# The number of started processes, as torch, Slurm and MPI name it.
_COUNTS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_START = "Start the ranks by `torchrun --nproc-per-node N -m pipegrad train CONFIG`"
_JOIN_SECONDS = 600.0  # timeout for the last rank to join
_SILENT_SECONDS = 10.0  # a rank that waits longer prints a line
# Longer than any that the watch may have: torch's own timeout ends a process without a report.
_COLLECTIVE_SECONDS = 7 * 86400.0
_END_SECONDS = 600.0  # for threads of the user to end, after a run that has ended well
_LOCAL = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}


def device_of_rank(config: Config) -> torch.device:
    """Returns this rank's device; ``auto`` is the CPU unless every local rank has a CUDA card."""
    # Without torchrun this process is the only rank of its machine.
    local, num_local = (int(os.environ.get(n, d)) for n, d in _LOCAL.items())
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    cards = torch.accelerator.device_count() if accelerator is not None else 0
    device = config.train.device
    if device == "auto":
        device = automatic_kind()
    kind, _, index = device.partition(":")
    if kind == "cpu":
        if index:
            config.refuse("train.device", "all ranks of a machine share its cores: write 'cpu'")
        return torch.device("cpu")
    if accelerator is None or kind != accelerator.type:
        available = "cpu" if accelerator is None else f"{accelerator.type} or cpu"
        config.refuse("train.device", f"this machine has {available}")
    location = index if index.isdigit() else str(local)
    if int(location) >= cards or (index and not index.isdigit()):
        config.refuse(
            "train.device",
            f"{num_local} ranks need a {kind} device each, this machine has {cards}: start fewer "
            f"ranks, choose 'cpu', or name one that is there, as in '{kind}:0'",
        )
    return torch.device(kind, int(location))


def automatic_kind() -> str:
    """Returns "cuda" if each rank of this machine has a CUDA card, else "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    has_own = accelerator is not None and accelerator.type == "cuda"
    return "cuda" if has_own and torch.accelerator.device_count() >= num_local else "cpu"


def choose_algorithms(*, deterministic: bool) -> None:
    """Lets torch use all algorithms of this process, or only those that give equal bits each time.

    Call it before CUDA computes anything: cuBLAS reads its variable once.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False  # else it may choose another algorithm each time
    torch.use_deterministic_algorithms(deterministic)


@contextlib.contextmanager
def process_group(timeout_seconds: float | None = None) -> Iterator[None]:
    """Makes the default process group, of torchrun's ranks or of this process alone.

    An existing process group is left unchanged. A rank of torchrun ends its process here; see
    [Note: how a rank ends].

    Args:
        timeout_seconds: How long ranks wait for each other, to join and in collectives; by default
            ten minutes to join. In collectives the watch ends a job that stalls, with a report.

    Raises:
        ConfigError: If variables of the environment are missing or wrong, or ranks do not join.
    """
    if dist.is_initialized():
        yield
        return
    _check_environment(os.environ)
    # CUDA puts all streams into 8 hardware queues. A kernel that waits in a queue holds up all
    # behind it: measured on an H200, a kernel waited 79 ms, and 20 with this (benchmarks/card).
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if "RANK" not in os.environ:
        dist.init_process_group(_backends(), store=HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
        return
    _join(timeout_seconds)
    watched = watch()
    if watched is not None:
        watched.ends_process = True
    # From here on every way out ends in `os._exit`. The exit code must be right all the same, as
    # torchrun decides by it whether the job has failed.
    code = 0
    try:
        # Until the process ends: torchrun sends SIGTERM when it sees another rank end.
        ExitStack().enter_context(Signals(_end_at_once))
        yield
        if watched is not None:
            watched.leave()
            timer = threading.Timer(_END_SECONDS, _end_late)
            timer.daemon = True
            timer.start()
        dist.destroy_process_group()
        # Waits for all threads that are not daemons, as the interpreter would at its end.
        threading._shutdown()  # type: ignore[attr-defined]
    except SystemExit as exit_error:
        code = (
            exit_error.code
            if isinstance(exit_error.code, int)
            else int(exit_error.code is not None)
        )
    except BaseException as error:  # noqa: BLE001 - the process ends here
        code = fail(error, None, shows_traceback=True)
    if watched is not None:
        watched.leave()
    if code:
        set_all_in_vain()  # the process must end within the timeout of the step
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_late() -> None:
    """Ends a process whose run has ended, and which does not."""
    names = [t.name for t in threading.enumerate() if not t.daemon and t.name != "MainThread"]
    print(  # noqa: T201
        f"Error: the run has ended, but not its process; threads that still run: {names}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(STALLED)


def _end_at_once(number: int) -> None:
    """Ends this process by a signal, outside of the steps of a run: there is nothing to save."""
    watched = watch()
    # A launcher that sees one rank end sends SIGTERM to all others. Then the last words of this
    # process are the report, and the watch ends the process if the main thread does not.
    if watched is not None and watched.has_alarm_soon():
        return
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(exit_code(number))


def _check_environment(variables: Mapping[str, str]) -> None:
    """Refuses variables that torchrun would not set, and ranks that would each train alone."""
    # Without RANK this process trains alone. If a launcher started several processes, each would
    # train the whole job, and nothing would look wrong.
    if "RANK" not in variables:
        for name in _COUNTS:
            if variables.get(name, "1").isdigit() and int(variables.get(name, "1")) > 1:
                raise ConfigError(
                    f"{name} is {variables[name]}, but RANK is not set: each process would train "
                    f"alone. {_START}; if one process is wanted, unset {name}"
                )
        return
    missing = [name for name in _NEEDED if not variables.get(name)]
    if missing:
        raise ConfigError(f"RANK is set, but {', '.join(missing)} not. {_START}")
    for name in _NUMBERS:
        if not variables.get(name, "0").isdecimal():
            raise ConfigError(f"{name} is {variables[name]!r}, expected a number. {_START}")
    if int(variables["RANK"]) >= int(variables["WORLD_SIZE"]):
        size = variables["WORLD_SIZE"]
        complaint = f"RANK is {variables['RANK']}, expected less than WORLD_SIZE, {size}"
        raise ConfigError(f"{complaint}. {_START}")


def _backends() -> str:
    """Returns the backends of the default group: of the CPU, and of an accelerator.

    Without a name torch makes that of the accelerator alone.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "gloo"
    kind = accelerator.type
    return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def _join(timeout_seconds: float | None) -> None:
    """Makes the default process group of the ranks that the environment describes.

    Raises:
        ConfigError: If not all ranks join in time.
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
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one rank of each machine prints it
        waiting.start()
    try:
        joining = rendezvous("env://", timeout=timedelta(seconds=timeout_seconds or _JOIN_SECONDS))
        store, of_rank, of_size = next(joining)
        # torchrun's store has keys of ranks that were killed.
        store = store_of_start(store, of_rank, of_size, timeout_seconds or _JOIN_SECONDS)
        # The timeout to join must not become the timeout of every later use of the store.
        store.set_timeout(timedelta(minutes=30))  # as torch does
        dist.init_process_group(
            _backends(),
            store=PrefixStore("default_pg", store),
            rank=of_rank,
            world_size=of_size,
            timeout=timedelta(seconds=timeout_seconds or _COLLECTIVE_SECONDS),
        )
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"rank {rank} of {size} (WORLD_SIZE) cannot join the others at {location} "
            f"(MASTER_ADDR, MASTER_PORT): {reason}"
        ) from error
    finally:
        waiting.cancel()


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
