"""Times training steps with a large skip between two hosts: one connection against two.

benchmarks/network/cluster.sh -n 2 -r 1gbit benchmarks/skips/skips.py [--mib X,SKIP ...]
"""

import argparse
import statistics
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import pipegrad
from pipegrad.schedules.program.program import Program

sys.path += [str(Path(__file__).parents[1] / name) for name in ("network", "unet")]
from stages import Step, ratios, time_in_turns
from unet import SleepingPart

MICROBATCHES, SCHEDULE = 16, "interleaved-1f1b"
SECONDS = (0.005, 0.010)  # of a stage's forward and backward; each host has two stages
FLOATS = 2**18  # of a MiB
BASE, TWO, NOTHING = "one connection", "two connections", "nothing to send"
TAKES = (["x"], ["x"], ["x"], ["x", "skip"])


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, 0] - target[:, 0]).square().mean()


def step_of(x_floats: int, skip_floats: int, *, is_apart: bool) -> Step:
    """Returns a step of four stages on two hosts, that checks its gradients.

    Stage 0 makes a skip, and stage 3 takes it. All between two hosts goes both ways.
    """
    makes = [{"x": x_floats, "skip": skip_floats}, {"x": x_floats}, {"x": x_floats}, {"x": 1}]
    schedule = pipegrad.schedules.build(
        SCHEDULE, num_ranks=dist.get_world_size(), num_microbatches=MICROBATCHES
    )
    topology = pipegrad.Topology.create(
        pipeline=schedule.num_ranks, stage_to_rank=schedule.stage_to_rank
    )
    modules = {s: SleepingPart(SECONDS, tuple(makes[s].values())) for s in topology.local_stages}
    stages = [
        pipegrad.Stage(module, stage, TAKES[stage], list(makes[stage]))
        for stage, module in modules.items()
    ]
    # What a Scheduler asks when it connects.
    apart = Program.skips if is_apart else frozenset()
    with mock.patch.object(Program, "skips", apart):
        scheduler = pipegrad.Scheduler(
            stages, topology, schedule=schedule, loss_fn=_loss, handlers=["noop"]
        )
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, MICROBATCHES, 1, generator=generator)

    def step() -> list[object]:
        scheduler.step(x, target=target)
        for stage, module in modules.items():
            # Stage 0's number is in x and in the skip; all numbers are 0.
            ways = 2 if stage == 0 else 1
            expected = ways * 2 * (2 * x - target).mean()
            torch.testing.assert_close(module.weight.grad, expected.reshape(1, 1))
            module.weight.grad = None
        return []

    step()  # ranks learn how large values are
    return step


def main() -> None:
    """Prints the README's table, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--mib", nargs="+", default=["0.1,4", "0.25,0.5", "0.25,1", "0.25,2", "0.5,2", "1,1"]
    )
    given = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    nothing = step_of(1, 1, is_apart=True)
    if dist.get_rank() == 0:
        print("| x, MiB | skip, MiB | one connection, ms | two | nothing to send |")
        print("|---|---|---|---|---|")
    for sizes in given.mib:
        x_mib, skip_mib = map(float, sizes.split(","))
        floats = round(x_mib * FLOATS), round(skip_mib * FLOATS)
        steps = {
            BASE: step_of(*floats, is_apart=False),
            TWO: step_of(*floats, is_apart=True),
            NOTHING: nothing,
        }
        times = time_in_turns(steps, None, given.rounds)
        if dist.get_rank() == 0:
            milliseconds = f"{1e3 * statistics.median(times[BASE]):.0f}"
            cells = [ratios(times[way], times[BASE]) for way in (TWO, NOTHING)]
            row = [f"{x_mib:g}", f"{skip_mib:g}", milliseconds, *cells]
            print("|", " | ".join(row), "|", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
