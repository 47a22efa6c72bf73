"""Times what a parameter costs the host in a step, beyond plain autograd.

python benchmarks/host/host.py [--repeats 40] [--number 1000] [--calls] [--one-card]

With --one-card both ranks are on card 0, and NCCL talks through sockets. Then time is that of the
host until a step returns; the device may still compute.
"""

import argparse
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from calls import print_calls, print_walks
from torch import nn
from ways import DDP, FOUR, ONE, PLAIN, Case, Make

from pipegrad.testing import run_ranks, share_one_card

RANKS, WARM_UP, MICROBATCHES = 2, 5, 4
SIZES = ((1000, (4, 2)), (200, (4, 2)), (64, (512, 512)))  # number of parameters, and of what shape


def enter_card(folder: str) -> None:
    """Makes the default group anew, on NCCL; ranks on one card must seem to be on other hosts."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    share_one_card(rank)
    torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=RANKS)


def seconds_in_turns(
    case: Case, makes: Mapping[str, Make], repeats: int, folder: str
) -> dict[str, list[float]]:
    """Returns the seconds of a step of each way on this rank, one a repeat.

    They are the processor's, of all threads; on a card the host's, until the step returns.
    """
    clock, finish = time.process_time, bool
    if case.device != "cpu":
        enter_card(folder)
        clock, finish = time.perf_counter, torch.cuda.synchronize
    shuffled = random.Random(0)  # the same on all ranks
    ways = {name: make(case) for name, make in makes.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(-WARM_UP, repeats):
        gc.collect()
        gc.disable()
        for name in shuffled.sample([*ways], len(ways)) if repeat > -WARM_UP else ways:
            module, step = ways[name]
            module.zero_grad()
            finish()
            dist.barrier()
            finish()
            began = clock()
            step()
            taken = clock() - began
            finish()
            if repeat >= 0:
                times[name].append(taken)
            elif name != PLAIN:
                check(module, ways[PLAIN].module)
        gc.enable()
    return times


def check(module: nn.Module, own: nn.Module) -> None:
    """Fails unless a way's gradients are the mean of the ranks' own, which `own` has."""
    for parameter, other in zip(module.parameters(), own.parameters(), strict=True):
        assert other.grad is not None
        mean = other.grad / RANKS
        dist.all_reduce(mean)
        torch.testing.assert_close(parameter.grad, mean)


def spread(values: list[float], digits: int) -> str:
    """Returns the median, and the 10th and 90th percentile."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    low, middle, high = (f"{deciles[i]:.{digits}f}" for i in (0, 4, 8))
    return f"**{middle}** ({low} to {high})"


def cells(case: Case, times: Mapping[str, list[float]]) -> dict[str, list[str]]:
    """Returns a way's microseconds a parameter beyond plain autograd, and its ratio to DDP's."""
    over = {
        name: [(a - b) * 1e6 / case.number for a, b in zip(taken, times[PLAIN], strict=True)]
        for name, taken in times.items()
    }
    found = {PLAIN: [f"{1e3 * statistics.median(times[PLAIN]):.1f} ms a step", ""]}
    for name, microseconds in over.items():
        ratios = [a / b for a, b in zip(microseconds, over[DDP], strict=True)]
        found.setdefault(name, [spread(microseconds, 1), spread(ratios, 2)])
    return found


def print_table(makes: Mapping[str, Make], cases: list[Case], repeats: int) -> None:
    """Prints one of the README's tables."""
    columns = list[dict[str, list[str]]]()
    for case in cases:
        limit = 120 + 3.0 * repeats
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(
                seconds_in_turns, RANKS, case, makes, repeats, folder, timeout_seconds=limit
            )
        columns.append(cells(case, ranks[0]))
    print(f"\n| | {' | '.join(f'{case}, us | by DDP' for case in cases)} |")
    print(f"|---|{'---|' * 2 * len(cases)}")
    for name in makes:
        print(f"| {name} | {' | '.join(c for column in columns for c in column[name])} |")


def main() -> None:
    """Prints the README's tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--number", type=int, nargs="*", help="only cases of so many parameters")
    parser.add_argument("--calls", action="store_true", help="count calls; time nothing")
    parser.add_argument("--one-card", action="store_true", help="both ranks on card 0")
    given = parser.parse_args()
    device = "cuda" if given.one_card else "cpu"
    if given.calls:
        print_calls()
        print_walks()
        return
    for makes, microbatches in ((ONE, 1), (FOUR, MICROBATCHES)):
        cases = [Case(number, shape, microbatches, device) for number, shape in SIZES]
        print_table(
            makes, [c for c in cases if given.number in (None, [], [c.number])], given.repeats
        )


if __name__ == "__main__":
    main()
