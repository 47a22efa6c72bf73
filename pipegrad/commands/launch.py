"""`pipegrad launch`: starts the ranks of this machine, and says in one line why they failed.

torch's elastic launcher starts, watches, restarts and ends the processes, as it does for torchrun.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import click

from pipegrad.commands.options import Whole, usage_errors, wants_traceback
from pipegrad.commands.rank import LAUNCHER
from pipegrad.commands.train import train
from pipegrad.errors import ConfigError, reason
from pipegrad.printable import printable

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

    from pipegrad.train.config import Config

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
    type=Whole(min=0),
    default=0,
    show_default=True,
    help="How often all ranks are started again after one has failed.",
)
@click.option(
    "--log-dir",
    type=Path,
    metavar="DIR",
    help="Write what each rank prints into a file there, too.",
)
@click.option(
    "--nodes", type=Whole(min=1), default=1, show_default=True, help="Number of machines."
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
    log_dir: Path | None,
    nodes: int,
    rendezvous: str | None,
) -> None:
    """Start the ranks of this machine, and train what CONFIG describes.

    pipegrad launch -n 4 CONFIG --set train.steps=10
    """
    words = [str(config), *arguments]
    options = train.make_context("pipegrad train", list(words)).params
    from pipegrad.train.sizes import sizes_of

    with usage_errors():
        _check_rendezvous(nodes, rendezvous)
        loaded = _loaded(options)
        num_ranks = num_ranks or _automatic(loaded, nodes)
        if nodes == 1:  # other machines may have other numbers
            sizes_of(loaded, num_ranks)
        _set_environment(num_ranks, nodes)
        traceback = ["--traceback"] if wants_traceback() else []
        with _log_folder(log_dir) as folder:
            config_of_torch = _launch_config(
                num_ranks,
                max_restarts=max_restarts,
                logs=folder,
                is_logged=log_dir is not None,
                nodes=nodes,
                rendezvous=rendezvous,
            )
            code = _run(config_of_torch, ["train", *words, *traceback], log_dir)
    sys.exit(code)


def _loaded(options: Mapping[str, Any]) -> Config:
    """Returns the configuration; a wrong one is refused before any rank is started."""
    from pipegrad.train.config import load

    return load(
        options["config"],
        options["settings"],
        handlers=options["handlers"],
        schedule=options["schedule"],
    )


def _check_rendezvous(nodes: int, rendezvous: str | None) -> None:
    if (nodes > 1) != (rendezvous is not None):
        raise ConfigError(
            f"--nodes {nodes} {'without' if rendezvous is None else 'with'} --rendezvous: several "
            f"machines need both, and one machine needs neither"
        )
    host, _, port = (rendezvous or "localhost:0").rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--rendezvous {rendezvous}: expected HOST:PORT, as in 10.0.0.1:29500")


def _automatic(config: Config, nodes: int) -> int:
    """Returns the number of cards of this machine; without cards what the configuration names."""
    import torch

    if torch.accelerator.is_available():
        return torch.accelerator.device_count()
    parallel = config.parallel
    sizes = [parallel.pipeline or 1, parallel.data or 1, *parallel.dimensions.values()]
    return max(1, math.prod(sizes) // nodes)


def _set_environment(num_ranks: int, nodes: int) -> None:
    """Sets what ranks and launcher read of the environment, unless the user has set it."""
    from pipegrad.comm.store import of_one_machine

    # torch would take all cores on each rank.
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SAVE_SECONDS))
    if nodes == 1:
        for name, value in of_one_machine().items():
            os.environ.setdefault(name, value)
    else:
        # Else the ranks of a restart find addresses of those before in the launcher's store. On one
        # machine they use other names; see `process_group`.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@contextlib.contextmanager
def _log_folder(log_dir: Path | None) -> Iterator[Path]:
    """Gives the folder of the ranks' files; one that nobody asked for is removed at the end."""
    if log_dir is None:
        with tempfile.TemporaryDirectory(prefix="pipegrad-") as folder:
            yield Path(folder)
        return
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--log-dir {log_dir}: cannot be made: {reason(error)}") from error
    yield log_dir


def _launch_config(
    num_ranks: int,
    *,
    max_restarts: int,
    logs: Path,
    is_logged: bool,
    nodes: int,
    rendezvous: str | None,
) -> LaunchConfig:
    """Returns what torch's launcher is told."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    from pipegrad.commands.rendezvous import ONE_MACHINE, register

    register()
    return LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=num_ranks,
        run_id="pipegrad" if rendezvous else f"{datetime.now():%Y%m%d-%H%M%S}-{uuid4().hex[:8]}",
        role="rank",
        rdzv_backend=ONE_MACHINE if nodes == 1 else "c10d",
        rdzv_endpoint=rendezvous or "127.0.0.1:0",
        rdzv_configs={"timeout": _JOIN_SECONDS},
        # One machine needs no name service, which may take seconds to say that it knows no name.
        local_addr="127.0.0.1" if nodes == 1 else None,
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(str(logs), tee=Std.ALL if is_logged else Std.NONE),
        log_line_prefix_template="[${rank}] ",
        # Each of them is sent to all ranks, and then the launcher ends.
        signals_to_handle="SIGTERM,SIGINT,SIGQUIT,SIGUSR1",
    )


def _run(config: LaunchConfig, words: Sequence[str], log_dir: Path | None) -> int:
    """Runs the ranks to their end; returns the exit code of the one that failed first."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    os.environ[LAUNCHER] = str(os.getpid())
    # -P: otherwise files of the working directory stand in for pipegrad, torch and the library.
    rank = ("-P", "-u", "-m", "pipegrad", *words)
    try:
        with _quiet(), _ended_with_terminal():
            elastic_launch(config, sys.executable)(*rank)
    except SignalException as error:
        return 128 + error.sigval
    except KeyboardInterrupt:  # before there were ranks
        return 128 + signal.SIGINT
    except ChildFailedError as error:
        return _report(error.failures, log_dir)
    except (RendezvousError, OSError, RuntimeError) as error:
        raise ConfigError(f"the ranks cannot be started: {error.__cause__ or error}") from error
    return 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps back what torch logs of ends and signals, unless --traceback wants all."""
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
    """Lets a closed terminal end the ranks as SIGTERM does; under nohup they go on."""
    before = signal.getsignal(signal.SIGHUP)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _report(failures: Mapping[int, ProcessFailure], log_dir: Path | None) -> int:
    """Prints why the ranks failed; returns the exit code, as a shell has it."""
    (rank, failure), *_ = _cause_first(failures)
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    # Ranks that a signal has stopped have said so themselves.
    if failure.exitcode not in _STOPPED and not _has_said_all(failure):
        click.echo(f"Error: {_cause(rank, failure, log_dir)}", err=True)
    return code


def _has_said_all(failure: ProcessFailure) -> bool:
    """Whether the cause is the last line already; see `tell_launcher`."""
    message: Any = failure.error_file_data.get("message")
    return isinstance(message, dict) and message.get("extraInfo", {}).get("is_all") is True


def _cause_first(failures: Mapping[int, ProcessFailure]) -> list[tuple[int, ProcessFailure]]:
    """Returns failures by rank; the cause comes first."""
    # torch ends all other ranks by SIGTERM after the first has failed, and by SIGKILL 30 seconds
    # later. Times are in seconds, and other ranks fail at once when a rank was killed.
    begin = min(failure.timestamp for failure in failures.values())

    def order(failed: tuple[int, ProcessFailure]) -> tuple[bool, int, bool]:
        _, failure = failed
        was_ended = failure.exitcode == -signal.SIGTERM
        late = (failure.timestamp - begin) // _AT_ONCE_SECONDS
        return was_ended, late, failure.exitcode > 0

    return sorted(failures.items(), key=order)


def _cause(rank: int, failure: ProcessFailure, log_dir: Path | None) -> str:
    """Returns one line: the cause if a rank has told one; otherwise which rank failed first."""
    message: Any = failure.error_file_data.get("message")
    if isinstance(message, dict):
        message = message.get("message")
    if isinstance(message, str) and message != "<NONE>":
        return printable(message.partition("\n")[0])
    end = f"exit code {failure.exitcode}"
    if failure.exitcode < 0:
        end = f"killed by {failure.signal_name()}"
    if failure.exitcode == -signal.SIGKILL:
        return f"rank {rank} failed first ({end}): by somebody, or by the kernel for lack of memory"
    where = f"in {log_dir}" if log_dir else "above"
    return f"rank {rank} failed first ({end}): look at its output {where}"
