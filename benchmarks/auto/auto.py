"""Compares the schedule that auto chooses with the best of all that four hosts ran.

benchmarks/network/cluster.sh benchmarks/auto/auto.py [--rounds 4] [--only 3] [--json FILE]
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import pipegrad
from pipegrad.schedules import Schedule
from pipegrad.simulation.choose import Choice, choose
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.explain.inferred import costs_of
from pipegrad.simulation.explain.lookup import Lookup

sys.path.insert(0, str(Path(__file__).parents[1] / "network"))
from stages import Batch, Seconds, SleepingStage, split_seconds

RANKS, MICROBATCHES, KIB_SENT = 4, 16, 512
HALVES = 2 * RANKS  # costs are of half stages, so that two of them may be on one rank
FORWARD, BACKWARD, WEIGHTS = 0.010, 0.020, 0.010  # of a rank
SLOW_RANK, SLOWER = 2, 1.5
ACTIVATION_BYTES = 8 * 2**20  # of half a stage: a declaration, which no one measures
HELD = 5  # microbatches that fit into a tight memory


class Setting(NamedTuple):
    """A job and a cluster."""

    mbits: int  # rate of every NIC
    is_tight: bool
    is_even: bool

    def __str__(self) -> str:
        memory = f"{HELD} microbatches" if self.is_tight else "no limit"
        return f"{self.mbits} Mbit/s | {memory} | {'even' if self.is_even else 'one rank slower'}"


SETTINGS = [Setting(*each) for each in product((1000, 500, 250), (False, True), (True, False))]


def slept(setting: Setting, half: int) -> Seconds:
    """Returns what half a stage sleeps. One part of the model is slow, on whatever rank."""
    is_slow = half // 2 == SLOW_RANK and not setting.is_even
    share = (SLOWER if is_slow else 1.0) / 2
    return split_seconds(share * FORWARD, share * BACKWARD, share * WEIGHTS)


class Halves(nn.Sequential):
    """A stage: the same parts of the model, however it is cut."""

    def __init__(self, setting: Setting, stage: int, num_stages: int) -> None:
        each = HALVES // num_stages
        halves = range(stage * each, (stage + 1) * each)
        super().__init__(*(SleepingStage(slept(setting, half)) for half in halves))


def set_rate(mbits: int) -> None:
    """Gives this host's NIC a rate, for what it sends."""
    rate = f"htb rate {mbits}mbit burst 16kb quantum 60000"
    change = f"tc class change dev eth0 parent 1: classid 1:1 {rate}"
    subprocess.run(change.split(), check=True)
    dist.barrier()


class Run:
    """A schedule on this rank."""

    def __init__(self, schedule: Schedule, setting: Setting) -> None:
        topology = pipegrad.Topology.create(pipeline=RANKS, stage_to_rank=schedule.stage_to_rank)
        number = len(schedule.stage_to_rank)
        self.modules = {s: Halves(setting, s, number) for s in topology.local_stages}
        self.scheduler = pipegrad.Scheduler(
            [pipegrad.Stage(module, index) for index, module in self.modules.items()],
            topology,
            schedule=schedule,
            loss_fn=Batch.loss,
            handlers=["noop"],
        )

    def seconds(self, batch: Batch) -> float:
        """Makes three steps; returns what one of the last two took on this rank.

        The first one is not timed. Other schedules have been running, and TCP begins slowly on
        connections that were idle.
        """
        self.scheduler.step(batch.x, target=batch.target)
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(2):
            self.scheduler.step(batch.x, target=batch.target).loss.item()
        seconds = (time.perf_counter() - begin) / 2
        for module in self.modules.values():
            module.zero_grad()
        return seconds


def measured_costs(setting: Setting, batch: Batch) -> Costs:
    """Returns the costs of half stages, of the network and of hosts, as a user measures them.

    Times of computes are those of real steps: a sleep takes longer on a machine that has nothing
    else to do, as when stages are measured alone.
    """
    halves = pipegrad.schedules.build("zbv", num_ranks=RANKS, num_microbatches=MICROBATCHES)
    run = Run(halves, setting)
    run.seconds(batch)
    with pipegrad.record(run.scheduler, steps=4) as recording:
        for _ in range(2):
            run.seconds(batch)
    timeline = recording.timeline()
    costs = pipegrad.measure_costs(
        run.scheduler, batch.x, target=batch.target, timeline=timeline, repeats=1
    )
    run.scheduler.close()
    stages = [
        replace(
            stage,
            forward_seconds=real.forward_seconds,
            backward_seconds=real.backward_seconds,
            weight_seconds=real.weight_seconds,
            activation_bytes=ACTIVATION_BYTES,
            factor_bytes=ACTIVATION_BYTES // 2,
        )
        for stage, real in zip(costs.stages, costs_of(Lookup(timeline)).stages, strict=True)
    ]
    return replace(costs, stages=tuple(stages))


def measured(choice: Choice, setting: Setting, batch: Batch, rounds: int) -> dict[str, float]:
    """Returns the seconds of a step of each schedule that fits: a median, in turns."""
    fitting = {c.name: c.schedule for c in choice.candidates if not c.refused}
    runs = {name: Run(made, setting) for name, made in fitting.items() if made is not None}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(rounds + 1):
        for name, run in runs.items():
            seconds = run.seconds(batch)
            if repeat > 0:
                times[name].append(seconds)
    for run in runs.values():
        run.scheduler.close()
    slowest = torch.tensor([*times.values()], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(times, slowest.median(dim=1).values.tolist(), strict=True))


def main() -> None:
    """Prints the README's table, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", type=int, default=len(SETTINGS), help="the first few settings")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    batch = Batch(MICROBATCHES, KIB_SENT)
    found = []
    if dist.get_rank() == 0:
        print("| NIC | memory | stages | auto | ms, predicted | best measured | auto over it |")
        print("|---|---|---|---|---|---|---|")
    for setting in SETTINGS[: given.only]:
        set_rate(setting.mbits)
        limit = HELD * 2 * ACTIVATION_BYTES + MICROBATCHES * KIB_SENT * 1024  # and what arrives
        choice = choose(
            num_ranks=RANKS,
            num_microbatches=MICROBATCHES,
            costs=measured_costs(setting, batch),
            memory_limit_bytes=limit if setting.is_tight else None,
        )
        times = measured(choice, setting, batch, given.rounds)
        best = min(times, key=times.__getitem__)
        chosen = choice.best
        off = chosen.step_seconds / times[chosen.name] - 1
        found.append({"setting": setting._asdict(), "times": times, "choice": choice.to_json()})
        if dist.get_rank() == 0:
            print(
                f"| {setting} | {chosen.name} | {1e3 * times[chosen.name]:.0f}, {off:+.1%} | "
                f"{best} | {times[chosen.name] / times[best] - 1:+.1%} |",
                flush=True,
            )
    if dist.get_rank() == 0 and given.json:
        given.json.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
