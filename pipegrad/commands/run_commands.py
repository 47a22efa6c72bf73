"""`pipegrad train` and `pipegrad launch`: trains, and starts the ranks of a machine.

torch's elastic launcher starts, watches, restarts and ends the processes, as it does for torchrun.
A rank that it starts is `pipegrad train`, or a script of the user. A process of `pipegrad train`
ends with its launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import click

from pipegrad.commands.command_options import (
    configured,
    usage_errors,
    wants_traceback,
)
from pipegrad.errors import ConfigError, StepError, in_words
from pipegrad.limits import num_cores
from pipegrad.printable import printable

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

    from pipegrad.train.config import Config


@click.command()
@configured
@click.option("--dry-run", is_flag=True, help="Set everything up, print the plan, and exit.")
def train(loaded: Callable[[], Config], dry_run: bool) -> None:
    """Train what CONFIG describes: alone, or on the ranks of torchrun.

    torchrun --nproc-per-node 4 -m pipegrad train CONFIG
    """
    import torch.distributed as dist

    from pipegrad.tables import make_console, print_parts
    from pipegrad.train.loop import Trainer, run
    from pipegrad.train.process import fail, process_group
    from pipegrad.train.rendering import rendered_summary
    from pipegrad.train.report import Report

    with usage_errors(), process_group():
        console = make_console(quiet=dist.get_rank() != 0)
        code, trainer = 0, None
        try:
            trainer = Trainer(loaded)
            print_parts(console, trainer.notes)
            if dry_run:
                if trainer.summary:  # rank 0 has it
                    shown = rendered_summary(trainer.summary, trainer.job.schedule)
                    print_parts(console, shown)
            else:
                code = run(trainer, Report(console, trainer.job))
        # A model or plug-in raises SystemExit; pipegrad's own are not in `try`.
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user, too
            failure = _in_place_of(error) if isinstance(error, SystemExit) else error
            folder = None if trainer is None else trainer.folder
            sys.exit(fail(failure, folder, shows_traceback=wants_traceback()))
        trainer.close()
        if code:  # of a signal
            sys.exit(code)


def _in_place_of(error: SystemExit) -> StepError:
    """Returns an error that replaces an exit, with its traceback."""
    instead = StepError(
        f"the run was ended by {in_words(error)}: no model, handler or plug-in may do that"
    )
    return instead.with_traceback(error.__traceback__)


_LAUNCHER = "PIPEGRAD_LAUNCHER"  # the variable with the launcher's process
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_ONE_MACHINE = "pipegrad"  # as a name of torch's registry of rendezvous
_MOST_RANKS = 4096  # of a machine
# A signal ends the ranks after they have saved. A second signal ends them at once.
_SAVE_SECONDS = 600
_JOIN_SECONDS = 600  # for the launchers of other machines
_AT_ONCE_SECONDS = 10
_STOPPED = {128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}


def _count(_context: click.Context, _option: click.Parameter, value: str) -> int | None:
    """Returns a number of ranks; None for ``auto``."""
    if value == "auto":
        return None
    if not value.isdecimal() or not 1 <= int(value) <= _MOST_RANKS:
        raise click.BadParameter(f"{value!r}: expected auto, or a number from 1 to {_MOST_RANKS}")
    return int(value)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=Path)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF TRAIN]...")
@click.option(
    "-n",
    "num_ranks",
    callback=_count,
    metavar="N",
    default="auto",
    show_default=True,
    help="Ranks on this machine; auto: one a card, without cards as many as CONFIG names.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often all ranks are started again after one has failed.",
)
@click.option(
    "--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Number of machines."
)
@click.option(
    "--rendezvous",
    metavar="HOST:PORT",
    help="Where the launchers of several machines meet: one of the machines, and a free port.",
)
def launch(
    config: Path,
    arguments: Sequence[str],
    *,
    num_ranks: int | None,
    max_restarts: int,
    nodes: int,
    rendezvous: str | None,
) -> None:
    """Start the ranks of this machine, and train what CONFIG describes.

    CONFIG may also be a script of your own, such as train.py. Its words follow it.

    pipegrad launch -n 4 CONFIG --set train.steps=10
    """
    with usage_errors():
        _check_rendezvous(nodes, rendezvous)
        is_script = config.suffix == ".py"
        if is_script:
            num_ranks = num_ranks or _num_cards()
            if not num_ranks:
                raise ConfigError(f"how many ranks has {config}? This machine has no card: give -n")
            command = ["-u", str(config), *arguments]
        else:
            num_ranks = _checked(config, arguments, num_ranks, nodes)
            traceback = ["--traceback"] if wants_traceback() else []
            # -P, because otherwise files of the working directory could replace pipegrad, torch and
            # the standard library.
            command = ["-P", "-u", "-m", "pipegrad", "train", str(config), *arguments, *traceback]
        _set_environment(num_ranks, nodes, saves=not is_script)
        with tempfile.TemporaryDirectory(prefix="pipegrad-") as logs:
            config_of_torch = _launch_config(
                num_ranks,
                max_restarts=max_restarts,
                logs=logs,
                nodes=nodes,
                rendezvous=rendezvous,
            )
            code = _run(config_of_torch, command)
    sys.exit(code)


def _checked(config: Path, arguments: Sequence[str], num_ranks: int | None, nodes: int) -> int:
    """Returns the number of ranks; refuses a wrong configuration before any rank is started."""
    from pipegrad.train.config import load, sizes_of

    options = train.make_context("pipegrad train", [str(config), *arguments]).params
    loaded = load(
        options["config"],
        options["settings"],
        handlers=options["handlers"],
        schedule=options["schedule"],
    )
    parallel = loaded.parallel
    sizes = [parallel.pipeline or 1, parallel.data or 1, *parallel.dimensions.values()]
    num_ranks = num_ranks or _num_cards() or max(1, math.prod(sizes) // nodes)
    if nodes == 1:  # other machines may have other numbers
        sizes_of(loaded, num_ranks)
    return num_ranks


def _num_cards() -> int:
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _check_rendezvous(nodes: int, rendezvous: str | None) -> None:
    if (nodes > 1) != (rendezvous is not None):
        raise ConfigError(
            f"--nodes {nodes} {'without' if rendezvous is None else 'with'} --rendezvous: several "
            f"machines need both, and one machine needs neither"
        )
    host, _, port = (rendezvous or "localhost:0").rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--rendezvous {rendezvous}: expected HOST:PORT, as in 10.0.0.1:29500")


def _set_environment(num_ranks: int, nodes: int, *, saves: bool) -> None:
    """Sets environment variables of ranks and launcher, unless the user has set them."""
    from pipegrad.comm.store import of_one_machine

    # Otherwise torch uses all cores on each rank.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    if saves:
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SAVE_SECONDS))
    if nodes == 1:
        for name, value in of_one_machine().items():
            os.environ.setdefault(name, value)
    else:
        # Otherwise the ranks of a restart find addresses of earlier ranks in the launcher's store.
        # On one machine they use other names; see `process_group`.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def _launch_config(
    num_ranks: int,
    *,
    max_restarts: int,
    logs: str,
    nodes: int,
    rendezvous: str | None,
) -> LaunchConfig:
    """Returns the configuration of torch's launcher."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    _register_one_machine()
    return LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=num_ranks,
        run_id="pipegrad" if rendezvous else f"{datetime.now():%Y%m%d-%H%M%S}-{uuid4().hex[:8]}",
        role="rank",
        rdzv_backend=_ONE_MACHINE if nodes == 1 else "c10d",
        rdzv_endpoint=rendezvous or "127.0.0.1:0",
        rdzv_configs={"timeout": _JOIN_SECONDS},
        # One machine needs no name service, which may take seconds to fail.
        local_addr="127.0.0.1" if nodes == 1 else None,
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(logs),
        # The launcher sends each of them to all ranks, and then ends.
        signals_to_handle="SIGTERM,SIGINT,SIGQUIT,SIGUSR1",
    )


@functools.cache  # torch takes a name once in a process
def _register_one_machine() -> None:
    """Registers a rendezvous for torch's launcher that waits for no other one, and is unreachable.

    It replaces torch's rendezvous, because that one listens on all interfaces, also for one
    machine, and unpickles the values of its store.
    """
    from torch.distributed.elastic.rendezvous import (
        RendezvousParameters,
        rendezvous_handler_registry,
    )
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    from pipegrad.comm.store import LOOPBACK, loopback_store

    class OneMachine(StaticTCPRendezvous):
        """torch's rendezvous of launchers that know each other, with a store of our own."""

        def __init__(self, parameters: RendezvousParameters) -> None:
            kept = loopback_store()
            super().__init__(LOOPBACK, kept.port, 0, 1, parameters.run_id, _JOIN_SECONDS)
            self._store = kept  # torch makes no other one then

        def get_backend(self) -> str:
            return _ONE_MACHINE

    rendezvous_handler_registry.register(_ONE_MACHINE, OneMachine)


def _run(config: LaunchConfig, command: Sequence[str]) -> int:
    """Runs the ranks to their end; returns the exit code of the one that failed first."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    os.environ[_LAUNCHER] = str(os.getpid())
    try:
        with _quiet(), _ended_with_terminal():
            elastic_launch(config, sys.executable)(*command)
    except SignalException as error:
        return 128 + error.sigval
    except KeyboardInterrupt:  # before there were ranks
        return 128 + signal.SIGINT
    except ChildFailedError as error:
        return _report(error.failures, is_script="pipegrad" not in command)
    except (RendezvousError, OSError, RuntimeError) as error:
        raise ConfigError(f"the ranks cannot be started: {error.__cause__ or error}") from error
    return 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides the log of torch's launcher about ends and signals, unless --traceback is given."""
    logger = logging.getLogger("torch.distributed.elastic")
    propagated, logger.propagate = logger.propagate, wants_traceback()
    silent = logging.NullHandler()
    logger.addHandler(silent)
    try:
        yield
    finally:
        logger.propagate = propagated
        logger.removeHandler(silent)


@contextlib.contextmanager
def _ended_with_terminal() -> Iterator[None]:
    """Makes a closed terminal end the ranks as SIGTERM does; under nohup they continue."""
    before = signal.getsignal(signal.SIGHUP)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _report(failures: Mapping[int, ProcessFailure], *, is_script: bool) -> int:
    """Prints why the ranks failed; returns the exit code, as a shell has it."""
    rank, failure = _cause_of(failures)
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    # Ranks that a signal has stopped have printed this.
    if failure.exitcode not in _STOPPED and not _has_said_all(failure, is_script=is_script):
        click.echo(f"Error: {_cause(rank, failure)}", err=True)
    return code


def _has_said_all(failure: ProcessFailure, *, is_script: bool) -> bool:
    """True if the cause is the last line already; see `tell_launcher`."""
    message: Any = failure.error_file_data.get("message")
    said = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return said.get("is_all") is True or (is_script and said.get("is_all") is not None)


def _cause_of(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Returns the rank whose failure made others fail, and its failure."""
    # torch ends all other ranks by SIGTERM after the first has failed, and by SIGKILL 30 seconds
    # later. Times are in seconds, and other ranks fail at once when a rank was killed.
    begin = min(failure.timestamp for failure in failures.values())

    def order(failed: tuple[int, ProcessFailure]) -> tuple[bool, int, bool]:
        _, failure = failed
        was_ended = failure.exitcode == -signal.SIGTERM
        late = (failure.timestamp - begin) // _AT_ONCE_SECONDS
        return was_ended, late, failure.exitcode > 0

    return min(failures.items(), key=order)


def _cause(rank: int, failure: ProcessFailure) -> str:
    """Returns one line: the cause if a rank has left one; otherwise the rank that failed first."""
    message: Any = failure.error_file_data.get("message")
    if isinstance(message, dict):
        message = message.get("message")
    if isinstance(message, str) and message != "<NONE>":
        return printable(message.partition("\n")[0])
    is_killed = failure.exitcode < 0
    end = f"killed by {failure.signal_name()}" if is_killed else f"exit code {failure.exitcode}"
    if failure.exitcode == -signal.SIGKILL:
        return f"rank {rank} failed first ({end}): by somebody, or by the kernel for lack of memory"
    return f"rank {rank} failed first ({end}): look at its output above"


def begin_rank() -> None:
    """Prepares a rank of a launcher; does nothing in a process that no launcher has started.

    Each rank has a separate session, because Ctrl-C must reach the launcher alone. A launcher that
    is killed by SIGKILL cannot end its ranks. Therefore the kernel ends them, on Linux only.
    """
    # Processes that this one starts do not belong to the launcher.
    launcher = os.environ.pop(_LAUNCHER, None)
    if launcher is None:
        return
    # SIGKILL, because the launcher kept the store by which ranks would agree on a last checkpoint.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if str(os.getppid()) != launcher:  # it ended before
            os.kill(os.getpid(), signal.SIGKILL)
