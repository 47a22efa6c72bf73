"""Times training steps of a pipeline of eight hosts whose hop in the middle is slow.

benchmarks/network/cluster.sh -n 8 -s 3:38mbit benchmarks/network/slow_hop.py [--json FILE]
"""

import argparse
import json
import statistics
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from stages import (
    Batch,
    compute_seconds,
    hop_seconds,
    ours,
    ratios,
    split_seconds,
    time_in_turns,
)

import pipegrad
from pipegrad.schedules import Schedule

RANKS, MICROBATCHES, KIB = 8, 32, 256
SECONDS = split_seconds(0.040, 0.080)
BASE = "1f1b"


def live_activations(schedule: Schedule) -> int:
    """Returns how many microbatches' activations all ranks hold, each at its fullest."""
    total = 0
    for row in schedule.actions:
        held = [0]
        for action in row:
            held.append(held[-1] + (1 if action.kind == "F" else -1))
        total += max(held)
    return total


def build(name: str, **options: object) -> Schedule:
    """Returns the schedule of that name."""
    return pipegrad.schedules.build(name, num_ranks=RANKS, num_microbatches=MICROBATCHES, **options)


def main() -> None:
    """Prints the README's table, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    batch = Batch(MICROBATCHES, KIB)
    alone, hops = compute_seconds(SECONDS, batch), hop_seconds(KIB)
    compute = alone["F"] + alone["B"]
    schedules = {
        BASE: build(BASE),
        "eager-1f1b": build("eager-1f1b"),
        "hop-aware-1f1b": build("hop-aware-1f1b", hop_seconds=hops, compute_seconds=compute),
    }
    steps = {name: ours(schedule, SECONDS, batch) for name, schedule in schedules.items()}
    times = time_in_turns(steps, batch, given.rounds)
    if dist.get_rank() == 0:
        ideal = (MICROBATCHES + RANKS - 1) * compute
        told = ", ".join(f"{hop / compute:.2f}" for hop in hops)
        print(
            f"\nA forward and a backward take {1e3 * compute:.0f} ms; a message, in these: {told}\n"
        )
        print("| | time | s | over the ideal | activations held |\n|---|---|---|---|---|")
        for name, taken in times.items():
            median = statistics.median(taken)
            cells = [
                name,
                ratios(taken, times[BASE]),
                f"{median:.2f}",
                f"{median / ideal - 1:+.1%}",
            ]
            print(f"| {' | '.join(cells)} | {live_activations(schedules[name])} |", flush=True)
        if given.json:
            given.json.write_text(json.dumps({"compute": compute, "hops": hops, "times": times}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
