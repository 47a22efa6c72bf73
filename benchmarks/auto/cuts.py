"""Compares the cut that is even in serial time with the one of the shortest simulated step.

benchmarks/network/cluster.sh -s 1:100mbit benchmarks/auto/cuts.py [--rounds 3] [--only 2]
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import pipegrad
from pipegrad.schedules import lower
from pipegrad.simulation.choose import chain_of, cut_at
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.explain.inferred import costs_of
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.fastest_cut import Begins, balanced_seconds, fastest_cut
from pipegrad.simulation.simulator import simulate

sys.path.insert(0, str(Path(__file__).parents[1] / "network"))
from stages import Batch, SleepingStage, split_seconds

RANKS, MICROBATCHES = 4, 12
FORWARD, BACKWARD, WEIGHTS = 0.012, 0.024, 0.012  # of a layer


class Setting(NamedTuple):
    """A model, a schedule and a network."""

    name: str
    schedule: str
    layers: tuple[float, ...]  # what each takes, in the time of a layer
    kib: int  # of a message
    is_slow: bool  # whether the link in the middle is slow


EQUAL = (1.0,) * 12
HEAVY = (0.5, *EQUAL, 2.5)  # an embedding, blocks, and a head with its loss
SETTINGS = [
    Setting("equal layers", "1f1b", EQUAL, 1024, False),
    Setting("a heavy head", "1f1b", HEAVY, 1024, False),
    Setting("a heavy head, a slow link in the middle", "1f1b", HEAVY, 1024, True),
    Setting("a heavy head, a slow link in the middle", "zb-h1", HEAVY, 1024, True),
    Setting("a heavy head", "interleaved-1f1b", HEAVY, 256, False),
]


def set_slow_link(is_slow: bool) -> None:
    """Makes the link between hosts 1 and 2 slow, or as fast as the others."""
    rate = f"htb rate {100 if is_slow else 1000}mbit burst 16kb quantum 60000"
    if dist.get_rank() in (1, 2):
        subprocess.run(f"tc class change dev eth0 parent 1: classid 1:2 {rate}".split(), check=True)
    dist.barrier()


class Run:
    """A model that is cut somewhere, on this rank."""

    def __init__(self, setting: Setting, begins: Begins, batch: Batch) -> None:
        schedule = pipegrad.schedules.build(
            setting.schedule, num_ranks=RANKS, num_microbatches=MICROBATCHES
        )
        topology = pipegrad.Topology.create(pipeline=RANKS, stage_to_rank=schedule.stage_to_rank)
        edges = list(pairwise([0, *begins, len(setting.layers)]))
        self.modules = {
            stage: nn.Sequential(
                *(
                    SleepingStage(split_seconds(x * FORWARD, x * BACKWARD, x * WEIGHTS))
                    for x in setting.layers[slice(*edges[stage])]
                )
            )
            for stage in topology.local_stages
        }
        self.scheduler = pipegrad.Scheduler(
            [pipegrad.Stage(module, index) for index, module in self.modules.items()],
            topology,
            schedule=schedule,
            loss_fn=batch.loss,
            handlers=["noop"],
        )

    def seconds(self, batch: Batch, steps: int = 2) -> float:
        """Returns what one of some steps took on this rank, behind one that is not timed."""
        self.scheduler.step(batch.x, target=batch.target)
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            self.scheduler.step(batch.x, target=batch.target).loss.item()
        seconds = (time.perf_counter() - begin) / steps
        for module in self.modules.values():
            module.zero_grad()
        return seconds


def measured_costs(setting: Setting, begins: Begins, batch: Batch) -> Costs:
    """Returns the costs of all layers, as a recording and the links of one cut show them."""
    run = Run(setting, begins, batch)
    run.seconds(batch)
    with pipegrad.record(run.scheduler, steps=4) as recording:
        for _ in range(2):
            run.seconds(batch, 1)
    timeline = recording.timeline()
    costs = pipegrad.measure_costs(
        run.scheduler, batch.x, target=batch.target, timeline=timeline, repeats=1
    )
    run.scheduler.close()
    stages = costs_of(Lookup(timeline)).stages
    sent = costs.stages[0].outputs
    layers = []
    for stage, (begin, end) in zip(
        stages, pairwise([0, *begins, len(setting.layers)]), strict=True
    ):
        total = sum(setting.layers[begin:end])
        layers += [
            replace(
                stage,
                forward_seconds=stage.forward_seconds * own / total,
                backward_seconds=stage.backward_seconds * own / total,
                weight_seconds=stage.weight_seconds * own / total,
                optimizer_seconds=0.0,
                outputs=sent,
            )
            for own in setting.layers[begin:end]
        ]
    return replace(costs, stages=tuple(layers))


def measured(setting: Setting, cuts: Sequence[Begins], batch: Batch, rounds: int) -> list[float]:
    """Returns the seconds of a step of each cut on the slowest rank: medians, in turns."""
    runs = [Run(setting, cut, batch) for cut in cuts]
    times = [[run.seconds(batch) for run in runs] for _ in range(rounds + 1)][1:]
    for run in runs:
        run.scheduler.close()
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [statistics.median(column) for column in slowest.T.tolist()]


def main() -> None:
    """Prints the README's table, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=int, nargs="*", default=range(len(SETTINGS)))
    given = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    if dist.get_rank() == 0:
        print(
            "| layers and links | schedule | even: layers, ms, predicted | shortest step | less |"
        )
        print("|---|---|---|---|---|")
    for setting in (SETTINGS[index] for index in given.only):
        set_slow_link(setting.is_slow)
        batch = Batch(MICROBATCHES, setting.kib)
        schedule = pipegrad.schedules.build(
            setting.schedule, num_ranks=RANKS, num_microbatches=MICROBATCHES
        )
        even = balanced_seconds(setting.layers, len(schedule.stage_to_rank))
        costs = measured_costs(setting, even, batch)
        program = lower(schedule, links=chain_of(cut_at(costs, even)))
        best = fastest_cut(program, partial(cut_at, costs), len(costs.stages), [even])
        cuts = [even, best]
        expected = [simulate(program, cut_at(costs, cut)).step_seconds[-1] for cut in cuts]
        times = measured(setting, list(dict.fromkeys(cuts)), batch, given.rounds)
        if dist.get_rank() == 0:
            cells = [
                f"{sizes(cut, setting)}: {1e3 * time:.0f}, {own / time - 1:+.1%}"
                for cut, own, time in zip(cuts, expected, (times[0], times[-1]), strict=True)
            ]
            cells[1] = "the same" if best == even else cells[1]
            gain, promised = 1 - times[-1] / times[0], 1 - expected[1] / expected[0]
            row = [setting.name, setting.schedule, *cells, f"{gain:.1%}, predicted {promised:.1%}"]
            print(f"| {' | '.join(row)} |", flush=True)
    dist.destroy_process_group()


def sizes(begins: Begins, setting: Setting) -> str:
    """Returns how many layers each stage has."""
    return " ".join(str(b - a) for a, b in pairwise([0, *begins, len(setting.layers)]))


if __name__ == "__main__":
    main()
