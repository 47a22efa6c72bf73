"""The process of a rank: its process group, its device, and its end.

[Note: how a rank ends] A Python interpreter that finalizes kills threads that come back to it. If
this unwinds C++ code, the process aborts, and torchrun takes an abort for a failed job. This
happened after errors, to threads that waited in torch for peers that were gone. It also happened
to one or two of about 150 runs that had ended well, probably because threads of comm streams were
not joined yet. Therefore exit functions run, and then the process ends without finalization.

[Note: a store outlives its ranks] torchrun keeps one key-value store for all its restarts. There a
new rank finds the address of a rank that was killed, and cannot reach it. Rank 0 draws a name for
each start, because the number of restarts does not identify it: torchrun counts on each machine
alone. The other ranks answer with names of their own, and rank 0 writes a list of the answers. A
rank that reads the name of an earlier start does not find itself in its list, and reads again.

A run that receives a signal saves first. A failure has one report for all ranks, which the watch
makes (`pipegrad.comm.watch`). The rank that has made it prints it. torchrun gets the cause on each
machine, and prints it last.

[Note: a signal in a step] A signal may reach one rank alone, at any moment. It only sets a number.
All ranks stop after the same step, because they exchange this number in the message of metrics
after every step.

A thread reads the signals from a socket, into which Python writes each signal at once. Python's own
handlers would be too late, because they run in the main thread between two instructions, and a rank
that waits in a collective executes none. Therefore a second signal ends even a process that hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]  # public
from torch.distributed.rendezvous import rendezvous

from pipegrad import run_files
from pipegrad.comm.activity import failure_of
from pipegrad.comm.agreement import once_a_machine
from pipegrad.comm.ending import set_all_in_vain
from pipegrad.comm.failures import FAILED, STALLED, FailureReport
from pipegrad.comm.store import SignedStore
from pipegrad.comm.watch import watch
from pipegrad.errors import ConfigError, PipegradError, TopologyError, refuse
from pipegrad.printable import say

_KEY = "pipegrad/start"
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
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Launchers send a signal again that the terminal or the cluster has already sent to each process.
_ECHO_SECONDS = 1.0
_LATER_SECONDS = 0.5  # the rank that prints the report ends first: then torchrun ends all others


def device_of_rank(name: str) -> torch.device:
    """Returns this rank's device, and makes it the current one.

    Args:
        name: A device of torch; "auto" is the CPU unless every local rank has a CUDA GPU.

    Raises:
        TopologyError: If there is no such device for this rank.
    """
    # Without torchrun this process is the only rank of its machine.
    local, num_local = (int(os.environ.get(n, d)) for n, d in _LOCAL.items())
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = "cpu" if accelerator is None else accelerator.type
    cards = torch.accelerator.device_count()
    if name == "auto":
        name = "cuda" if available == "cuda" and cards >= num_local else "cpu"
    kind, _, index = name.partition(":")
    if name == "cpu":
        return torch.device("cpu")
    location = index or str(local)
    refuse(
        TopologyError,
        {
            "all ranks of a machine share its cores: write 'cpu'": kind == "cpu",
            f"this machine has {available}{' or cpu' * (available != 'cpu')}": kind != available,
            f"{num_local} ranks need a {kind} device each, this machine has {cards}: start fewer "
            f"ranks, choose 'cpu', or name one that is there, as in '{kind}:0'": (
                not location.isdigit() or int(location) >= cards
            ),
        },
    )
    torch.accelerator.set_device_index(int(location))
    return torch.device(kind, int(location))


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

    Raises:
        ConfigError: If variables of the environment are missing or wrong, or ranks do not join.
    """
    if dist.is_initialized():
        yield
        return
    _check_environment(os.environ)
    # CUDA puts all streams into 8 hardware queues. A kernel that waits in a queue holds up all
    # after it: measured on an H200, a kernel waited 79 ms, and 20 with this (benchmarks/card).
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
    # From here on every way out ends in `os._exit`. The exit code must be right all the same,
    # because torchrun decides by it whether the job has failed.
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
    """Ends a process that still runs long after the end of its run."""
    names = [t.name for t in threading.enumerate() if not t.daemon and t.name != "MainThread"]
    say(f"Error: the run has ended, but not its process; threads that still run: {names}")
    os._exit(STALLED)


def _end_at_once(number: int) -> None:
    """Ends this process by a signal, outside of the steps of a run: there is nothing to save."""
    watched = watch()
    # Let the report be printed if there is one, because a launcher that sees one rank end sends
    # SIGTERM to all others. The watch ends the process if the main thread does not.
    if watched is not None and watched.has_alarm_soon():
        return
    if os.environ.get("LOCAL_RANK", "0") == "0":
        say(f"stopped by {signal.Signals(number).name}")
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

    Without names, torch would make the accelerator's backend alone.
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

    Raises:
        dist.DistStoreError: If a rank does not come in time.
        MessageError: If another program has written into the store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return store  # it ends with the ranks, because rank 0 keeps it
    own, signed = uuid.uuid4().hex, SignedStore(store)
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


# A signal, or a failure.


class Signals(ExitStack):
    """Takes SIGINT, SIGTERM and SIGUSR1 inside of ``with signals``, in the main thread.

    The first one sets `received`. A second one ends the process at once. Contexts may be nested:
    the innermost one takes the signals.

    Args:
        end: Called by a thread with the first signal, to end the process. By default nothing is.

    Attributes:
        received: Number of the first signal; 0 if there was none.
    """

    def __init__(self, end: Callable[[int], object] = lambda _: None) -> None:
        super().__init__()
        self.received = 0
        self._end = end
        self._since = 0.0

    def __enter__(self) -> Self:
        # Python allows handlers in the main thread alone. A notebook's thread keeps its own.
        if threading.current_thread() is not threading.main_thread():
            return self
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        self.callback(writing.close)  # this ends the thread
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        self.callback(signal.set_wakeup_fd, before)
        for number in ENDING:
            handler = signal.signal(number, lambda *_: None)  # it does not act; the thread takes it
            # None: it was not made by Python, and cannot be set again.
            self.callback(signal.signal, number, handler or signal.SIG_DFL)
        threading.Thread(
            target=self._read, args=(reading,), name="pipegrad signals", daemon=True
        ).start()
        return self

    def _read(self, reading: socket.socket) -> None:
        """Takes the numbers of signals until the other end is closed."""
        with reading:
            while numbers := reading.recv(64):
                for number in numbers:
                    if number in ENDING:
                        self._take(number)

    def _take(self, number: int) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self._since = number, now
            self._end(number)
        elif now - self._since > _ECHO_SECONDS:
            name = signal.Signals(number).name
            line = f"{name} came after {signal.Signals(self.received).name}: ended at once\n"
            with suppress(OSError):
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
            os._exit(exit_code(number))


def exit_code(number: int) -> int:
    """Returns the exit code for a signal, as shells have it."""
    return 128 + number


def show_in(folder: Path) -> None:
    """Writes the report of a later failure into a run's folder, too."""

    def show(report: FailureReport) -> None:
        say(f"Error: {report.text}")
        with suppress(OSError):
            _write_text(folder / "failure.txt", f"{report.text}\n")

    if (watched := watch()) is not None:
        watched.show = show


def fail(error: BaseException, folder: Path | None, *, shows_traceback: bool) -> int:
    """Prints a failure, once for all ranks; returns the exit code.

    It takes some seconds at most, also if other ranks are gone.
    """
    file = _write_traceback(error, folder, shows=shows_traceback)
    note = f" (traceback: {file})" if file else ""
    watched = watch()
    # Do not end the job in a process group of the caller, because its ranks go on.
    if watched is None or not watched.ends_process:
        words = str(error) if isinstance(error, PipegradError) else failure_of(error).error
        once_a_machine(partial(say, f"Error: {words}{note}"))
        FailureReport(words, words, 0, "common").tell_launcher()
        return FAILED
    report = watched.fail(error, note)
    if report.kind == "common":
        once_a_machine(partial(say, f"Error: {report.cause}"))
    if dist.get_rank() != report.reporter:
        time.sleep(_LATER_SECONDS)
    return report.exit_code


def _write_traceback(error: BaseException, folder: Path | None, *, shows: bool) -> str:
    """Prints a traceback, writes it into a folder, or both; returns the file, "" without one."""
    text = "".join(traceback.format_exception(error))
    if shows:
        say(text)
    if folder is not None:
        with suppress(OSError):
            rank = dist.get_rank() if dist.is_initialized() else 0
            _write_text(file := folder / f"failure-rank{rank}.txt", text)
            return str(file)
    return ""


def _write_text(file: Path, text: str) -> None:
    run_files.replace(file, text.encode(errors="backslashreplace"))  # names of files may need it
