"""Times training steps of a pipeline of four hosts: pipegrad's schedules and torch's.

benchmarks/network/cluster.sh -r 1gbit benchmarks/network/steps.py [--rounds 20] [--json FILE]
"""

import argparse
import json
import statistics
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from optimum import makespan, optimum
from stages import (
    Batch,
    SleepingStage,
    Step,
    compute_seconds,
    hop_seconds,
    ours,
    ratios,
    time_in_turns,
)
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

import pipegrad
from pipegrad.schedules import Schedule

RANKS, MICROBATCHES = 4, 16
BASE = "torch, Schedule1F1B"
OURS = ("1f1b", "eager-1f1b", "hop-aware-1f1b", "gpipe", "interleaved-1f1b")

Way = Callable[[tuple[float, float], Batch], Step]  # given a rank's forward and backward seconds
costs: dict[str, Any] = {}  # measured: what hop-aware-1f1b is given


def build(name: str) -> Schedule:
    """Returns the schedule of that name."""
    options = costs if name == "hop-aware-1f1b" else {}
    return pipegrad.schedules.build(name, num_ranks=RANKS, num_microbatches=MICROBATCHES, **options)


def shares(seconds: tuple[float, float], stages_per_rank: int) -> tuple[float, float]:
    """Returns what each of a rank's stages sleeps."""
    return seconds[0] / stages_per_rank, seconds[1] / stages_per_rank


def torchs(seconds: tuple[float, float], batch: Batch, *, name: str, stages_per_rank: int) -> Step:
    """Returns a step of a schedule of torch's."""
    indices = range(dist.get_rank(), RANKS * stages_per_rank, RANKS)
    modules = [SleepingStage(*shares(seconds, stages_per_rank)) for _ in indices]
    stages = [
        PipelineStage(module, index, RANKS * stages_per_rank, torch.device("cpu"))
        for index, module in zip(indices, modules, strict=True)
    ]
    schedule = getattr(pipelining, name)(
        stages if stages_per_rank > 1 else stages[0], MICROBATCHES, loss_fn=batch.loss
    )
    given = [batch.x] if indices[0] == 0 else []
    target = batch.target if indices[-1] == RANKS * stages_per_rank - 1 else None

    def step() -> list[SleepingStage]:
        schedule.step(*given, target=target, return_outputs=False)
        return modules

    return step


def pipegrads(seconds: tuple[float, float], batch: Batch, *, name: str) -> Step:
    """Returns a step of one of pipegrad's schedules."""
    schedule = build(name)
    return ours(schedule, shares(seconds, len(schedule.stage_to_rank) // RANKS), batch)


WAYS: dict[str, Way] = {
    "torch, ScheduleGPipe": partial(torchs, name="ScheduleGPipe", stages_per_rank=1),
    BASE: partial(torchs, name="Schedule1F1B", stages_per_rank=1),
    "torch, ScheduleInterleaved1F1B": partial(
        torchs, name="ScheduleInterleaved1F1B", stages_per_rank=2
    ),
    **{f"pipegrad, {name}": partial(pipegrads, name=name) for name in OURS},
}


def measure(
    ways: dict[str, Way], seconds: tuple[float, float], kib: int, rounds: int
) -> dict[str, Any]:
    """Returns everything that is measured of one size of activations, in seconds."""
    batch = Batch(MICROBATCHES, kib)
    forward, backward = compute_seconds(seconds, batch)
    hops = hop_seconds(kib)
    costs.update(hop_seconds=hops, compute_seconds=forward + backward)
    times = time_in_turns({name: way(seconds, batch) for name, way in ways.items()}, batch, rounds)
    return {"kib": kib, "forward": forward, "backward": backward, "hops": hops, "times": times}


def simulated(name: str, forward: float, backward: float, transfer: float) -> str:
    """Returns the time in ms that a schedule of ours would take if only its transfers waited."""
    if name.removeprefix("pipegrad, ") not in OURS:
        return ""
    schedule = build(name.removeprefix("pipegrad, "))
    each = shares((forward, backward), len(schedule.stage_to_rank) // RANKS)
    return f"{1e3 * makespan(schedule, *each, transfer):.0f}"


def print_table(found: dict[str, Any]) -> None:
    """Prints one of the README's tables."""
    forward, backward, times = found["forward"], found["backward"], found["times"]
    transfer = statistics.mean(found["hops"])
    ideal = (MICROBATCHES + RANKS - 1) * (forward + backward)
    bound = ideal + 2 * sum(found["hops"])
    best, name = optimum(RANKS, MICROBATCHES, forward, backward, transfer)
    each = ", ".join(f"{1e3 * hop:.1f}" for hop in found["hops"])
    print(
        f"\nActivations of {found['kib'] / 1024:g} MiB. Alone, a forward takes {1e3 * forward:.1f}",
        end="",
    )
    print(f" ms, a backward {1e3 * backward:.1f}, a message {each}:\n")
    print("| | time | ms | over the bound | simulated |\n|---|---|---|---|---|")
    for way, taken in times.items():
        median = statistics.median(taken)
        cells = [
            way,
            ratios(taken, times[BASE]),
            f"{1e3 * median:.0f}",
            f"{median / bound - 1:+.1%}",
        ]
        print(f"| {' | '.join(cells)} | {simulated(way, forward, backward, transfer)} |")
    print(f"| ideal | | {1e3 * ideal:.0f} | | |\n| bound | | {1e3 * bound:.0f} | | |")
    print(f"| optimum, {name} | | | {best / bound - 1:+z.1%} | {1e3 * best:.0f} |", flush=True)


def main() -> None:
    """Prints the README's tables, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forward-ms", type=float, default=10)
    parser.add_argument("--backward-ms", type=float, default=20)
    parser.add_argument("--kib", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="ways whose name contains this, and the base")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    ways = {name: way for name, way in WAYS.items() if given.only in name or name == BASE}
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    seconds, found = (given.forward_ms / 1e3, given.backward_ms / 1e3), []
    for kib in given.kib:
        found.append(measure(ways, seconds, kib, given.rounds))
        if dist.get_rank() == 0:
            print_table(found[-1])
    if given.json and dist.get_rank() == 0:
        given.json.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
