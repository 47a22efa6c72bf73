"""Times training steps of a pipeline on hosts whose values cross with codecs, against none.

benchmarks/network/cluster.sh -r 100mbit benchmarks/codecs/steps.py [--rounds 6] [--json FILE]
"""

import argparse
import json
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipegrad
from pipegrad import Scheduler

sys.path.insert(0, str(Path(__file__).parents[1] / "network"))
from stages import SleepingStage, ratios, split_seconds

MICROBATCHES, ROWS, WIDTH = 16, 256, 1024  # of a microbatch; 1 MiB of float32
FORWARD, BACKWARD = 0.010, 0.020
WARM_UP = 3  # the first step learns shapes
CODECS = {
    "none": None,
    "bf16": "bf16",
    "fp8": "fp8",
    "int8": "int8",
    "topk, gradients": "topk",
    "int8, topk gradients": {"activations": "int8", "gradients": "topk"},
}


def made(codecs: object, schedule: str) -> Scheduler:
    """Returns a Scheduler of one sleeping stage a rank."""
    topology = pipegrad.Topology.create(pipeline=dist.get_world_size())
    stage = SleepingStage(split_seconds(FORWARD, BACKWARD))
    return Scheduler(
        [pipegrad.Stage(stage, topology.coordinate("pp"))],
        topology,
        schedule=schedule,
        num_microbatches=MICROBATCHES,
        loss_fn=loss,
        handlers=["noop"],
        codecs=codecs,
    )


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Returns the loss of a microbatch, whose gradient has no zeros, like that of a model."""
    return (output - target[:, None]).square().mean()


def sent_bytes() -> int:
    """Returns what this host has sent so far, with all headers; 0 if it has no NIC of its own."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0


def promised_bytes(scheduler: Scheduler) -> int:
    """Returns the bytes of all messages of a step, as codecs say beforehand."""
    total, size = 0, ROWS * WIDTH * torch.float32.itemsize
    for _, kind, source, target in scheduler.program.channels:
        hop = min(source, target), max(source, target)
        codec = scheduler.codecs.of(hop, "activations" if kind == "F" else "gradients")
        shape = (ROWS, WIDTH)
        total += size if codec is None else codec.plugin.nbytes(shape, torch.float32)
    return MICROBATCHES * total


def main() -> None:
    """Prints the README's table, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--schedule", default="eager-1f1b")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=generator)
    target = torch.randn(MICROBATCHES * ROWS, generator=generator)
    schedulers = {name: made(codecs, given.schedule) for name, codecs in CODECS.items()}
    times: dict[str, list[float]] = {name: [] for name in schedulers}
    sent: dict[str, list[float]] = {name: [] for name in schedulers}
    for repeat in range(given.rounds + WARM_UP):
        for name, scheduler in schedulers.items():
            dist.barrier()
            before, begin = sent_bytes(), time.perf_counter()
            scheduler.step(x, target=target).loss.item()
            seconds = time.perf_counter() - begin
            dist.barrier()
            for stage in scheduler.steps.pipeline.stages:
                clear(stage.module)
            if repeat >= WARM_UP:
                times[name].append(seconds)
                sent[name].append(sent_bytes() - before)
    slowest = torch.tensor([*times.values()], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    total = torch.tensor([*sent.values()], dtype=torch.float64)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        taken = dict(zip(times, slowest.tolist(), strict=True))
        bytes_sent = {n: statistics.median(b) for n, b in zip(times, total.tolist(), strict=True)}
        show(schedulers, taken, bytes_sent)
        if given.json:
            given.json.write_text(json.dumps({"times": taken, "bytes": bytes_sent}))
    for scheduler in schedulers.values():
        scheduler.close()
    dist.destroy_process_group()


def clear(module: nn.Module) -> None:
    """Forgets gradients, as an optimizer's zero_grad does."""
    for parameter in module.parameters():
        parameter.grad = None


def show(
    schedulers: dict[str, Scheduler], times: dict[str, list[float]], sent: dict[str, float]
) -> None:
    """Prints the table."""
    print("\n| codecs | promised MiB | sent MiB | of none | step, of none | ms |")
    print("|---|---|---|---|---|---|")
    for name, scheduler in schedulers.items():
        cells = [
            name,
            f"{promised_bytes(scheduler) / 2**20:.1f}",
            f"{sent[name] / 2**20:.1f}",
            f"{sent[name] / sent['none']:.3f}",
            ratios(times[name], times["none"]),
            f"{1e3 * statistics.median(times[name]):.0f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
