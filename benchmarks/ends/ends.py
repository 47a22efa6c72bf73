"""Counts how scripts end: their exit codes, of ten kinds of scripts and nine ways to end them.

python benchmarks/ends/ends.py [--runs 200] [--load 4]

A script is two processes, forked from this one, which has imported torch; they end as any Python
process does, by the end of the interpreter. Kinds and ends take turns, plain torch among them.
"""

import argparse
import gc
import itertools
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # here, once: optimizers import it when they are used first
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset

from pipegrad import Bucketer, GradientSync, Scheduler, Stage, Topology, attach
from pipegrad.train.config import load
from pipegrad.train.loop import Trainer

EXAMPLE = Path(__file__).parents[2] / "examples" / "tied_gpt.toml"
RANKS, STEPS, LIMIT_SECONDS, AGAIN_SECONDS = 2, 2, 120, 5
WIDTH, ROWS, MICROBATCHES = 64, 8, 4

Close = Callable[[], object]
Step = Callable[[Callable[[], None]], object]  # calls what it is given in the middle of a step


class Layer(nn.Module):
    """Calls `during` in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.during: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.during()
        return self.linear(x)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Returns a mean."""
    return (output - target).square().mean()


# Kinds: each returns a step of a training, and what closes it.


def by_torch() -> tuple[Step, Close]:
    """DistributedDataParallel, which has nothing to close."""
    layer = nn.parallel.DistributedDataParallel(Layer())
    optimizer = torch.optim.AdamW(layer.parameters())

    def step(during: Callable[[], None]) -> None:
        layer.module.during = during
        loss_of(layer(torch.ones(ROWS, WIDTH)), torch.zeros(ROWS, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: None


def by_sync(placement: str) -> tuple[Step, Close]:
    """Rows and owners publish last: their parameters are on the way when the script ends."""
    topology = Topology.create(pipeline=2 if placement == "owner" else 1)
    layer, here = Layer(), topology.coordinate("pp")
    tied = [["linear.weight"], ["linear.bias"]] if placement == "owner" else ()
    handlers = {
        "owner": [{"name": "pipeline-shared", "placement": "owner"}],
        "sharded": ["sharded"],
        "replicate": ["data-parallel"],
    }
    sync = GradientSync({here: layer}, topology, tied=tied, handlers=handlers[placement])
    optimizer = torch.optim.AdamW(sync.optimizer_parameters())

    def step(during: Callable[[], None]) -> None:
        sync.prepare()
        sync.stage_first_use(here)
        layer.during = during
        loss_of(layer(torch.ones(ROWS, WIDTH)), torch.zeros(ROWS, WIDTH)).backward()
        sync.stage_final(here)
        sync.finish()
        optimizer.step()
        sync.publish()
        optimizer.zero_grad()

    return step, sync.close


def by_attach(placement: str) -> tuple[Step, Close]:
    """A tie of two stages, on torch's own schedule."""
    topology = Topology.create(pipeline=RANKS)
    layer, here = Layer(), topology.coordinate("pp")
    stage = PipelineStage(layer, here, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    sync = attach(
        schedule,
        topology=topology,
        tied=[["linear.weight"]],
        handlers=[{"name": "pipeline-shared", "placement": placement}, "data-parallel"],
    )
    optimizer = torch.optim.AdamW(sync.optimizer_parameters())

    def step(during: Callable[[], None]) -> None:
        layer.during = during
        x = torch.ones(ROWS, WIDTH)
        schedule.step(*([x] if here == 0 else []), target=x if here else None)
        optimizer.step()
        sync.publish()
        optimizer.zero_grad()

    return step, sync.close


def by_scheduler(placement: str) -> tuple[Step, Close]:
    """The same on a Scheduler."""
    topology = Topology.create(pipeline=RANKS)
    layer, here = Layer(), topology.coordinate("pp")
    scheduler = Scheduler(
        [Stage(layer, here)],
        topology,
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=loss_of,
        tied=[["linear.weight"]],
        handlers=[{"name": "pipeline-shared", "placement": placement}, "data-parallel"],
    )
    optimizer = torch.optim.AdamW(scheduler.sync.optimizer_parameters())

    def step(during: Callable[[], None]) -> None:
        layer.during = during
        x = torch.ones(ROWS, WIDTH)
        scheduler.step(*([x] if here == 0 else []), target=x if here else None)
        optimizer.step()
        scheduler.sync.publish()
        optimizer.zero_grad()

    return step, scheduler.close


def by_trainer() -> tuple[Step, Close]:
    """The example, in a process group of the script."""
    small = ["train.steps=9", "model.layers=2", "model.width=16", "data.batch_size=4"]
    trainer, numbers = Trainer(lambda: load(EXAMPLE, small)), itertools.count(1)

    def step(during: Callable[[], None]) -> None:
        during()
        trainer.step(next(numbers))

    return step, trainer.sync.close


def by_bucketer() -> tuple[Step, Close]:
    """Sums are open when the script ends."""
    bucketer = Bucketer(capacity_bytes=2**14)

    def step(during: Callable[[], None]) -> None:
        for _ in range(8):
            bucketer.all_reduce(torch.ones(WIDTH, WIDTH), callback=lambda _: None)
        during()

    def close() -> None:
        bucketer.flush()
        bucketer.release()

    return step, close


KINDS: dict[str, Callable[[], tuple[Step, Close]]] = {
    "plain torch (DDP)": by_torch,
    "GradientSync, replicate": lambda: by_sync("replicate"),
    "GradientSync, sharded": lambda: by_sync("sharded"),
    "GradientSync, owner": lambda: by_sync("owner"),
    "attach, replicate": lambda: by_attach("replicate"),
    "attach, owner": lambda: by_attach("owner"),
    "Scheduler, replicate": lambda: by_scheduler("replicate"),
    "Scheduler, owner": lambda: by_scheduler("owner"),
    "trainer": by_trainer,
    "Bucketer": by_bucketer,
}


# Ends: what a script does last, and the code that it is to end with.


def interrupt() -> None:
    """Does what Ctrl-C in a terminal does: all ranks get the signal, wherever they are."""
    if dist.get_rank() == 0:
        os.killpg(0, signal.SIGINT)
    time.sleep(AGAIN_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)  # where Python could not raise it: in a callback of C++


def fail() -> None:
    """Does what a mistake does."""
    raise ValueError("a mistake of the script")


def with_workers(step: Step) -> None:
    """Trains while there are workers, which are forks of this process."""
    data = TensorDataset(torch.ones(4, 1))
    for _ in DataLoader(data, num_workers=1):
        step(lambda: None)


ENDS: dict[str, int] = {
    "nothing": 0,
    "close": 0,
    "destroy": 0,
    "close, destroy": 0,
    "DataLoader workers": 0,
    "exception": 1,
    "exception in a step": 1,
    "sys.exit(3)": 3,
    "Ctrl-C in a step": -signal.SIGINT,
}


def script(kind: str, end: str) -> None:
    """Trains a little and ends; at the top level of a process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    dist.init_process_group("gloo")
    step, close = KINDS[kind]()
    for _ in range(STEPS):
        step(lambda: None)
    if end == "DataLoader workers":
        with_workers(step)
    if "close" in end:
        close()
    if "destroy" in end:
        dist.destroy_process_group()
    if end == "exception":
        fail()
    if end == "exception in a step":
        step(fail)
    if end == "sys.exit(3)":
        sys.exit(3)
    if end == "Ctrl-C in a step":
        step(interrupt)


# Running them.


def started(rank: int, port: int, log: int, group: int) -> int:
    """Forks a rank; returns its process id. In the rank itself, returns 0.

    Args:
        rank: Its rank.
        port: Where ranks meet.
        log: A file for what it prints.
        group: The process group to enter; 0 for one of its own.
    """
    process = os.fork()
    os.setpgid(process, group or process)  # by both: whichever comes first
    if process == 0:
        settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in settings.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": str(RANKS)}
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.dup2(log, 1)
        os.dup2(log, 2)
    return process


def code_of(process: int, deadline: float) -> int | str:
    """Returns the exit code of a rank; kills it behind the deadline."""
    while time.monotonic() < deadline:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "hangs"


def run(kind: str, end: str) -> list[int | str] | None:
    """Returns the exit code of each rank; None in a rank, which has to go on to `script`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        processes: list[int] = []
        for rank in range(RANKS):
            process = started(rank, port, log.fileno(), group=processes[0] if processes else 0)
            if process == 0:
                return None
            processes.append(process)
        deadline = time.monotonic() + LIMIT_SECONDS
        codes = [code_of(process, deadline) for process in processes]
        if any(code != ENDS[end] for code in codes):
            log.seek(0)
            sys.stderr.write(f"\n{kind}, {end}: {codes}\n{log.read().decode()[-1500:]}\n")
    return codes


def spinning() -> int:
    """Forks a process that computes beside; returns its process id."""
    mine, process = os.getpid(), os.fork()
    while process == 0:
        sum(range(10**5))
        if os.getppid() != mine:
            os._exit(0)
    return process


def table(codes: dict[str, list[tuple[str, list[int | str]]]]) -> None:
    """Prints how many runs of each kind ended badly."""
    print("\n| kind | runs | bad ends | which |\n|---|---|---|---|")
    for kind, found in codes.items():
        bad = [
            f"{end}: {code}"
            for end, ranks in found
            if (wrong := [c for c in ranks if c != ENDS[end]])
            for code in wrong[:1]
        ]
        which = ", ".join(f"{what} ({number})" for what, number in Counter(bad).items())
        print(f"| {kind} | {len(found)} | {len(bad)} | {which} |")


def arguments() -> argparse.Namespace:
    """Returns what was given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--load", type=int, default=0, help="processes that compute beside")
    parser.add_argument("--only", default="", help="a pattern of 'KIND, END', as they are printed")
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is imported here need not be collected at the end of each script
    beside = [spinning() for _ in range(given.load)]
    pairs = [(kind, end) for end in ENDS for kind in KINDS]
    turns = itertools.cycle([pair for pair in pairs if re.search(given.only, ", ".join(pair))])
    found: dict[str, list[tuple[str, list[int | str]]]] = {}
    for kind, end in itertools.islice(turns, given.runs):
        codes = run(kind, end)
        if codes is None:
            script(kind, end)
            break
        found.setdefault(kind, []).append((end, codes))
        sys.stderr.write(f"{kind}, {end}: {codes}\n")
    else:
        for process in beside:
            os.kill(process, signal.SIGKILL)
        table(found)
