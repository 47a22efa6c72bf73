"""`pipegrad launch`: starts the ranks of this machine, and says in one line why they failed.

torch's elastic agent starts, watches, restarts and ends the processes, as it does for torchrun.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipegrad.commands.options import usage_errors, wants_traceback
from pipegrad.commands.train import train
from pipegrad.errors import ConfigError

if TYPE_CHECKING:
    from types import FrameType

    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from pipegrad.train.config import Config

_MOST_RANKS = 4096  # of a machine
# A signal ends the ranks after they have saved. A second signal ends them at once.
_SAVE_SECONDS = 600
_JOIN_SECONDS = 600  # for the launchers of other machines


class _Count(click.ParamType):
    """A number of ranks, or None for ``auto``."""

    name = "N"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        if value == "auto":
            return None
        return click.IntRange(1, _MOST_RANKS).convert(value, param, ctx)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=Path)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF TRAIN]...")
@click.option(
    "-n",
    "num_ranks",
    type=_Count(),
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
    "--log-dir",
    type=Path,
    metavar="DIR",
    help="Write what each rank prints into a file there, too.",
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
    log_dir: Path | None,
    nodes: int,
    rendezvous: str | None,
) -> None:
    """Start the ranks of this machine, and train what CONFIG describes.

    pipegrad launch -n 4 CONFIG --set train.steps=10
    """
    words = [str(config), *arguments]
    options = train.make_context("pipegrad train", list(words)).params
    with usage_errors():
        _check_rendezvous(nodes, rendezvous)
        loaded = _loaded(options)
        num_ranks = num_ranks or _automatic(loaded, nodes)
        _set_threads(num_ranks)
        traceback = ["--traceback"] if wants_traceback() else []
        with _log_folder(log_dir) as folder:
            agent = _make_agent(
                ["train", *words, *traceback],
                num_ranks=num_ranks,
                max_restarts=max_restarts,
                logs=folder,
                is_logged=log_dir is not None,
                nodes=nodes,
                rendezvous=rendezvous,
            )
            code = _run(agent, log_dir)
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


def _set_threads(num_ranks: int) -> None:
    """Divides the cores by the ranks. torch would take all cores on each of them."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))


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
        raise ConfigError(f"--log-dir {log_dir}: cannot be made: {error}") from error
    yield log_dir


def _make_agent(
    words: Sequence[str],
    *,
    num_ranks: int,
    max_restarts: int,
    logs: Path,
    is_logged: bool,
    nodes: int,
    rendezvous: str | None,
) -> LocalElasticAgent:
    """Returns torch's agent for the ranks of this machine."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    # One machine needs no name service, which may take seconds to say that it knows no name.
    local = "127.0.0.1" if nodes == 1 else None
    meeting = RendezvousParameters(
        backend="c10d",
        endpoint=rendezvous or "127.0.0.1:0",
        run_id="pipegrad" if rendezvous else f"{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}",
        min_nodes=nodes,
        max_nodes=nodes,
        local_addr=local,
        timeout=_JOIN_SECONDS,
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        entrypoint=sys.executable,
        args=("-u", "-m", "pipegrad.commands.rank", str(os.getpid()), *words),
        rdzv_handler=get_rendezvous_handler(meeting),
        max_restarts=max_restarts,
        monitor_interval=0.1,
        local_addr=local,
    )
    # torch before 2.12 always waits for 30 seconds.
    is_known = "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters
    return LocalElasticAgent(
        spec,
        logs_specs=DefaultLogsSpecs(str(logs), tee=Std.ALL if is_logged else Std.NONE),
        log_line_prefix_template="[${rank}] ",
        **({"shutdown_timeout": _SAVE_SECONDS} if is_known else {}),
    )


def _run(agent: LocalElasticAgent, log_dir: Path | None) -> int:
    """Runs the ranks to their end; returns the exit code of the one that failed first."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    handler = agent.get_worker_group().spec.rdzv_handler
    try:
        with _quiet(), _forwarded(agent):
            result = agent.run()
    except SignalException as error:
        return 128 + error.sigval
    except KeyboardInterrupt:  # before there were ranks
        return 128 + signal.SIGINT
    except (RendezvousError, OSError, RuntimeError) as error:
        reason = error.__cause__ or error
        raise ConfigError(f"the ranks could not be started: {reason}") from error
    handler.shutdown()
    if not result.is_failed():
        return 0
    failed = min(result.failures.items(), key=_order)
    click.echo(f"Error: {_cause(*failed, log_dir)}", err=True)
    return _exit_code(failed[1])


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
def _forwarded(agent: LocalElasticAgent) -> Iterator[None]:
    """Sends SIGUSR1 on to all ranks. torch sends SIGINT and SIGTERM, and then ends."""

    def forward(number: int, _frame: FrameType | None) -> None:
        for worker in agent.get_worker_group().workers:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(worker.id, number)

    before = signal.signal(signal.SIGUSR1, forward)
    # A closed terminal ends the ranks as SIGTERM does; nohup keeps them.
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signals = "SIGTERM,SIGINT,SIGQUIT" + ("" if is_kept else ",SIGHUP")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = signals
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _order(failed: tuple[int, ProcessFailure]) -> tuple[bool, int]:
    """Sorts failures: the agent ends all other ranks by SIGTERM after the first has failed."""
    _, failure = failed
    return failure.exitcode == -signal.SIGTERM, failure.timestamp


def _cause(rank: int, failure: ProcessFailure, log_dir: Path | None) -> str:
    """Returns one line: which rank failed first, how it ended, and what it said."""
    end = f"exit code {failure.exitcode}"
    if failure.exitcode < 0:
        end = f"killed by {failure.signal_name()}"
    message: Any = failure.error_file_data.get("message")
    if isinstance(message, dict):
        message = message.get("message")
    if isinstance(message, str) and message != "<NONE>":
        return f"rank {rank} failed first ({end}): {message.partition(chr(10))[0]}"
    where = f"in {log_dir}" if log_dir else "above"
    return f"rank {rank} failed first ({end}): look at its output {where}"


def _exit_code(failure: ProcessFailure) -> int:
    """Returns the exit code as a shell has it."""
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
