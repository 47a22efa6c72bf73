"""Times training steps of a pipeline of four hosts: pipegrad's schedules and torch's.

benchmarks/network/cluster.sh -r 1gbit benchmarks/network/steps.py [--rounds 20] [--json FILE]

With --weight-ms it is the schedules that split backward. With --ahead it is a few of them, each on
torch's executor, and on ours with few receives posted ahead, or many.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nics import InTurns, Shared
from optimum import makespan, optimum
from stages import (
    MESSAGES,
    Batch,
    Seconds,
    SleepingStage,
    Step,
    burst,
    compute_seconds,
    hop_seconds,
    ours,
    ratios,
    split_seconds,
    time_in_turns,
)
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineSchedule, _PipelineScheduleRuntime

import pipegrad
from pipegrad.schedules import Kind, Schedule
from pipegrad.schedules.torch_csv import for_torch

RANKS, MICROBATCHES = 4, 16
ROW, LOOP, V = (0, 1, 2, 3), (0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 2, 3, 3, 2, 1, 0)  # stages to ranks
BASE = "torch, Schedule1F1B"
COLUMNS = ("", "time", "ms", "over the bound", "simulated", "over it", "shared", "over it")

Way = Callable[[Seconds, Batch], Step]  # given what a rank's computes take
costs: dict[str, dict[str, Any]] = {}  # measured: what schedules that know hops are given


def build(name: str) -> Schedule:
    """Returns the schedule of that name."""
    sizes = {"num_ranks": RANKS, "num_microbatches": MICROBATCHES}
    return pipegrad.schedules.build(name, **sizes, **costs.get(name, {}))


def shares(seconds: Seconds, stages_per_rank: int) -> dict[Kind, float]:
    """Returns what each of a rank's stages sleeps."""
    return {kind: each / stages_per_rank for kind, each in seconds.items()}


def torchs(
    seconds: Seconds, batch: Batch, *, name: str, stage_to_rank: tuple[int, ...] = ROW
) -> Step:
    """Returns a step of a schedule of torch's."""
    indices = [stage for stage, rank in enumerate(stage_to_rank) if rank == dist.get_rank()]
    last = len(stage_to_rank) - 1
    modules = [SleepingStage(shares(seconds, len(indices))) for _ in indices]
    stages = [
        PipelineStage(module, index, len(stage_to_rank), torch.device("cpu"))
        for index, module in zip(indices, modules, strict=True)
    ]
    schedule = getattr(pipelining, name)(
        stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=batch.loss
    )
    return torchs_step(schedule, modules, batch, is_first=0 in indices, is_last=last in indices)


def torchs_runtime(seconds: Seconds, batch: Batch, *, name: str) -> Step:
    """Returns a step of one of pipegrad's schedules on torch's executor of schedules in files."""
    order = build(name)
    indices = [stage for stage, rank in enumerate(order.stage_to_rank) if rank == dist.get_rank()]
    last = len(order.stage_to_rank) - 1
    modules = [SleepingStage(shares(seconds, len(indices))) for _ in indices]
    stages = [
        PipelineStage(module, index, last + 1, torch.device("cpu"))
        for index, module in zip(indices, modules, strict=True)
    ]
    schedule = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=batch.loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.csv")
        path.write_text(for_torch(order))
        schedule._load_csv(str(path))
    return torchs_step(schedule, modules, batch, is_first=0 in indices, is_last=last in indices)


def torchs_step(
    schedule: _PipelineSchedule,
    modules: list[SleepingStage],
    batch: Batch,
    *,
    is_first: bool,
    is_last: bool,
) -> Step:
    """Returns a step of a schedule of torch's, on a rank that has the first or the last stage."""
    given, target = [batch.x] if is_first else [], batch.target if is_last else None

    def step() -> list[SleepingStage]:
        schedule.step(*given, target=target, return_outputs=False)
        return modules

    return step


def pipegrads(seconds: Seconds, batch: Batch, *, name: str, **options: Any) -> Step:  # noqa: ANN401
    """Returns a step of one of pipegrad's schedules."""
    schedule = build(name)
    stages_per_rank = len(schedule.stage_to_rank) // RANKS
    return ours(schedule, shares(seconds, stages_per_rank), batch, **options)


def named(*names: str) -> dict[str, Way]:
    """Returns pipegrad's schedules of these names."""
    return {f"pipegrad, {name}": partial(pipegrads, name=name) for name in names}


def runtime(*names: str) -> dict[str, Way]:
    """Returns the same schedules on torch's executor."""
    return {f"torch's runtime, {name}": partial(torchs_runtime, name=name) for name in names}


def ahead(name: str) -> dict[str, Way]:
    """Returns a schedule on torch's executor, and on ours with several receives posted ahead."""
    return runtime(name) | {
        f"pipegrad, {name}, {depth} ahead": partial(pipegrads, name=name, depth=depth)
        for depth in (0, 1, 2, 4)
    }


WAYS: dict[str, Way] = {
    "torch, ScheduleGPipe": partial(torchs, name="ScheduleGPipe"),
    BASE: partial(torchs, name="Schedule1F1B"),
    "torch, ScheduleInterleaved1F1B": partial(
        torchs, name="ScheduleInterleaved1F1B", stage_to_rank=LOOP
    ),
    **runtime("1f1b", "eager-1f1b"),
    **named("1f1b", "eager-1f1b", "hop-aware-1f1b", "gpipe", "interleaved-1f1b"),
}
SPLIT_WAYS: dict[str, Way] = {
    BASE: partial(torchs, name="Schedule1F1B"),
    "torch, ScheduleInterleavedZeroBubble": partial(
        torchs, name="ScheduleInterleavedZeroBubble", stage_to_rank=LOOP
    ),
    "torch, ScheduleZBVZeroBubble": partial(torchs, name="ScheduleZBVZeroBubble", stage_to_rank=V),
    **runtime("zb-h1", "zbv"),
    **named("1f1b", "eager-1f1b", "zb-h1", "hop-aware-zb-h1", "zbv", "v-half", "v-min"),
}
TABLES = {  # by --ahead, and whether weights are split
    (False, False): WAYS,
    (False, True): SPLIT_WAYS,
    (True, False): {BASE: WAYS[BASE], **ahead("1f1b"), **ahead("eager-1f1b")},
    (True, True): {BASE: WAYS[BASE], **ahead("zb-h1"), **ahead("zbv")},
}


def measure(ways: dict[str, Way], seconds: Seconds, kib: int, rounds: int) -> dict[str, Any]:
    """Returns everything that is measured of one size of activations, in seconds."""
    batch = Batch(MICROBATCHES, kib)
    alone = {count: compute_seconds(shares(seconds, count), batch) for count in (1, 2)}
    hops = hop_seconds(kib)
    known = {"hop_seconds": hops, "compute_seconds": alone[1]["F"] + alone[1]["B"]}
    costs["hop-aware-1f1b"] = known
    costs["hop-aware-zb-h1"] = {**known, "weight_seconds": alone[1]["W"]}
    steps = {name: way(seconds, batch) for name, way in ways.items()}
    times = time_in_turns({**steps, "burst": burst(kib)}, batch, rounds)
    loaded = statistics.median(times.pop("burst")) / (2 * MESSAGES)  # to each of two neighbours
    return {"kib": kib, "alone": alone, "hops": hops, "loaded": loaded, "times": times}


def simulated(name: str, found: dict[str, Any]) -> tuple[float, float]:
    """Returns the times that a schedule of ours would take if only its transfers waited.

    The first with NICs that send in turns, as fast as idle ones; the second with NICs that share
    their rate, as fast as under load.
    """
    schedule = build(name)
    durations = found["alone"][len(schedule.stage_to_rank) // RANKS]
    in_turns = makespan(schedule, durations, statistics.mean(found["hops"]), InTurns)
    return in_turns, makespan(schedule, durations, found["loaded"], Shared)


def shortest(alone: Seconds, hops_seconds: float) -> float:
    """Returns the time that no schedule of one stage a rank can beat.

    The last rank begins when a microbatch has come there. After its last input's gradient it still
    has all its weights' gradients to compute, or else the first rank, once it is there, its last.
    """
    on_the_way = (RANKS - 1) * alone["F"] + hops_seconds
    on_the_way_back = (RANKS - 1) * alone["I"] + hops_seconds
    rest = max(MICROBATCHES * alone["W"], on_the_way_back + alone["W"])
    return on_the_way + MICROBATCHES * (alone["F"] + alone["I"]) + rest


def in_ms(*seconds: float) -> str:
    """Returns times in milliseconds."""
    return ", ".join(f"{1e3 * each:.1f}" for each in seconds)


def compared(taken: float, *expected: float) -> list[str]:
    """Returns cells: each that is expected, in ms, and how far what was taken is over it."""
    return [cell for e in expected for cell in (f"{1e3 * e:.0f}", f"{taken / e - 1:+z.1%}")]


def print_row(*cells: str) -> None:
    """Prints a row of a table, the rest of it empty."""
    print("|", " | ".join([*cells, *[""] * (len(COLUMNS) - len(cells))]), "|")


def print_table(found: dict[str, Any]) -> None:
    """Prints one of the README's tables."""
    alone, times = found["alone"][1], found["times"]
    transfer = statistics.mean(found["hops"])
    ideal, bound = shortest(alone, 0), shortest(alone, sum(found["hops"]))
    kinds, words = ["F", "B"], "a forward and a backward"
    if alone["W"] > 0:
        kinds, words = ["F", "B", "W"], "a forward, a backward and its weights' part"
    whole, half = (in_ms(*map(found["alone"][count].get, kinds)) for count in (1, 2))
    print(f"\nActivations of {found['kib'] / 1024:g} MiB. ", end="")
    print(f"Alone, {words} take {whole} ms; of two stages a rank {half}.")
    print(f"A message takes {in_ms(*found['hops'])}, and {in_ms(found['loaded'])} under load:\n")
    print_row(*COLUMNS)
    print("|---" * len(COLUMNS) + "|")
    for way, taken in times.items():
        median = statistics.median(taken)
        name, is_whole = way.removeprefix("pipegrad, "), way.count(",") == 1
        expected = simulated(name, found) if name != way and is_whole else ()
        _, over = compared(median, bound)
        time = ratios(taken, times[BASE])
        print_row(way, time, f"{1e3 * median:.0f}", over, *compared(median, *expected))
    print_row("ideal", "", f"{1e3 * ideal:.0f}")
    print_row("bound", "", f"{1e3 * bound:.0f}")
    if alone["W"] == 0:
        best, name = optimum(RANKS, MICROBATCHES, alone, transfer)
        print_row(f"optimum, {name}", "", "", compared(best, bound)[1], f"{1e3 * best:.0f}")
    sys.stdout.flush()


def main() -> None:
    """Prints the README's tables, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forward-ms", type=float, default=10)
    parser.add_argument("--backward-ms", type=float, default=20)
    parser.add_argument("--weight-ms", type=float, default=0, help="what W can take of a backward")
    parser.add_argument("--kib", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="ways whose name contains this, and the base")
    parser.add_argument("--ahead", action="store_true", help="receives that are posted ahead")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    ways = TABLES[given.ahead, given.weight_ms > 0]
    ways = {name: way for name, way in ways.items() if given.only in name or name == BASE}
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    milliseconds = given.forward_ms, given.backward_ms, given.weight_ms
    seconds, found = split_seconds(*(each / 1e3 for each in milliseconds)), []
    for kib in given.kib:
        found.append(measure(ways, seconds, kib, given.rounds))
        if dist.get_rank() == 0:
            print_table(found[-1])
    if given.json and dist.get_rank() == 0:
        given.json.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
