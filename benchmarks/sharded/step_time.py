"""Times training steps of one model, the optimizer sharded or not, in turns in one run.

torchrun --standalone --nproc-per-node 4 benchmarks/sharded/step_time.py [--microbatches 4]
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from ways import (
    OURS,
    SHORT,
    WAYS,
    Shape,
    Text,
    Way,
    add_options,
    check_losses,
    construct,
    join,
    leave,
    mean_losses,
)

WARM_UP = 1


def turn(way: Way, text: Text, steps: int, losses: list[Tensor]) -> float:
    """Returns the seconds from a step's start to the next one's, the mean of so many.

    One step more comes first: it has no all-gather of an earlier one to wait for. The last one's
    is waited for after the clock has stopped: that of the first one was in the time.
    """
    gc.collect()
    dist.barrier()
    start = 0.0
    for number in range(steps + 1):
        if number == 1:
            start = time.perf_counter()
        losses.append(way.step(text.step(way.num_steps)))
    seconds = time.perf_counter() - start
    way.settle()
    dist.barrier()
    return seconds / steps


def time_ways(
    ways: dict[str, Way], text: Text, rounds: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, list[Tensor]]]:
    """Lets all ways take turns, in random order; returns seconds a round, and all losses."""
    shuffled = random.Random(0)  # the same on all ranks
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[Tensor]] = {name: [] for name in ways}
    for number in range(-WARM_UP, rounds):
        for name in shuffled.sample(list(ways), len(ways)):
            slowest = torch.tensor(turn(ways[name], text, steps, losses[name]))
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number >= 0:
                seconds[name].append(slowest.item())
    return seconds, losses


def deciles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median, and the 10th and 90th percentile."""
    found = statistics.quantiles(values, n=10, method="inclusive")
    return found[4], found[0], found[8]


def main() -> None:
    """Prints a table; times are ratios, each of one round."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="timed ones of a turn")
    arguments = parser.parse_args()
    join()
    shape, names = Shape.of(arguments), [SHORT[short] for short in arguments.ways]
    text = Text(shape)
    ways = {name: WAYS[name](construct(shape), shape) for name in names}
    seconds, losses = time_ways(ways, text, arguments.rounds, arguments.steps)
    found = check_losses({name: mean_losses(x) for name, x in losses.items()})
    if dist.get_rank() == 0:
        base = OURS if OURS in ways else names[0]
        numel = sum(p.numel() for p in construct(shape).parameters())
        print(f"{numel / 1e6:.1f} M parameters, {dist.get_world_size()} ranks, {shape}\n{found}\n")
        print(f"| | step, over {base}'s | ms (10th to 90th percentile) |\n|---|---|---|")
        for name in names:
            pairs = zip(seconds[name], seconds[base], strict=True)
            middle, low, high = deciles([a / b for a, b in pairs])
            ms, least, most = (1e3 * x for x in deciles(seconds[name]))
            print(
                f"| {name} | **{middle:.2f}** ({low:.2f}-{high:.2f}) "
                f"| {ms:.0f} ({least:.0f}-{most:.0f}) |"
            )
    for way in ways.values():
        way.close()
    leave()


if __name__ == "__main__":
    main()
