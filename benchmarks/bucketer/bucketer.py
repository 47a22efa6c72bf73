"""Times 200 small reduce-scatters and all-reduces, in buckets and one by one, and counts bytes.

python benchmarks/bucketer/bucketer.py [--repeats 40]
"""

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import pipegrad
from pipegrad.testing import run_ranks

RANKS, WORLDS, WARM_UP, COUNTED = 4, 4, 5, 2
SELDOM = 5  # repeats of the others for one of those that take seconds
CALLS, KIB = 200, 2**10 // 4  # a KiB of fp32, in elements
OURS, OUR_SUMS = "pipegrad.Bucketer, reduce_scatter", "pipegrad.Bucketer, all_reduce"
LOOPBACK = Path("/proc/net/dev")

Inputs = Sequence[list[Tensor]]  # of each call, one a rank
Way = Callable[[], Sequence[Tensor]]  # returns the sum of each call
Figures = dict[tuple[str, str], list[float]]  # (quantity, way) -> one a repeat


def ours(inputs: Inputs, capacity_bytes: int = 25 * 2**20) -> Way:
    """Returns pipegrad's."""
    bucketer = pipegrad.Bucketer(capacity_bytes=capacity_bytes)

    def run() -> list[Tensor]:
        results: list[Tensor] = []
        for rows in inputs:
            bucketer.reduce_scatter(rows, callback=results.append)
        bucketer.flush()
        return results

    return run


def fairscale(inputs: Inputs, capacity_mib: int = 25) -> Way:
    """Returns fairscale's; without its own switch it asks gloo for what gloo refuses."""
    os.environ["ENABLE_NCCL_BASE_COLLECTIVES"] = "0"  # read when it is imported
    module = import_module("fairscale.internal.reduce_scatter_bucketer")
    bucketer = module.ReduceScatterBucketer(bucket_cap_mb=capacity_mib)

    def run() -> list[Tensor]:
        results: list[Tensor] = []
        for rows in inputs:
            bucketer.reduce_scatter_async(rows, dist.group.WORLD, callback_fn=results.append)
        bucketer.flush()
        return results

    return run


def torch_scatter(inputs: Inputs) -> Way:
    """Returns torch's reduce_scatter, one by one."""

    def run() -> list[Tensor]:
        results = [torch.empty_like(rows[0]) for rows in inputs]
        for result, rows in zip(results, inputs, strict=True):
            dist.reduce_scatter(result, rows)
        return results

    return run


def our_sums(inputs: Inputs) -> Way:
    """Returns pipegrad's all-reduces, of all ranks' inputs of a call in one tensor."""
    bucketer, tensors = pipegrad.Bucketer(), [torch.cat(rows) for rows in inputs]

    def run() -> list[Tensor]:
        results: list[Tensor] = []
        for tensor in tensors:
            bucketer.all_reduce(tensor, callback=results.append)
        bucketer.flush()
        return [mine(result) for result in results]

    return run


def torch_sums(inputs: Inputs) -> Way:
    """Returns torch's all_reduce, one by one. Copies first: it works in place."""
    tensors = [torch.cat(rows) for rows in inputs]

    def run() -> list[Tensor]:
        results = [tensor.clone() for tensor in tensors]
        for result in results:
            dist.all_reduce(result)
        return [mine(result) for result in results]

    return run


def mine(total: Tensor) -> Tensor:
    """Returns this rank's part of what was summed in one tensor."""
    return total.chunk(RANKS)[dist.get_rank()]


WAYS: dict[str, Callable[[Inputs], Way]] = {
    OURS: ours,
    "fairscale, ReduceScatterBucketer": fairscale,
    "pipegrad.Bucketer, capacity 0": partial(ours, capacity_bytes=0),
    "fairscale, capacity 0": partial(fairscale, capacity_mib=0),
    "torch, one reduce_scatter a call": torch_scatter,
    OUR_SUMS: our_sums,
    "torch, one all_reduce a call": torch_sums,
}

ONE_BY_ONE = {name for name in WAYS if "capacity 0" in name or "a call" in name}


def sent_bytes() -> int:
    """Returns how many bytes have left over the loopback device since the machine started."""
    lines = LOOPBACK.read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")


def time_ways(names: Sequence[str], kib: int, repeats: int, seed: int) -> Figures:
    """Times the ways in turns, in random order, and checks what they compute."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tensors = [torch.randn(RANKS, kib * KIB, generator=generator) for _ in range(CALLS)]
    inputs = [list(rows) for rows in tensors]
    shuffled = random.Random(seed)  # the same on all ranks
    ways = {name: WAYS[name](inputs) for name in shuffled.sample(names, len(names))}
    expected = torch_scatter(inputs)()
    figures: Figures = {}
    for repeat in range(-WARM_UP, repeats):
        for name in shuffled.sample(names, len(names)):
            seconds = cpu = math.nan
            if name not in ONE_BY_ONE or repeat % SELDOM == 0:
                dist.barrier()
                cpu, start = time.process_time(), time.perf_counter()
                results = ways[name]()
                seconds = time.perf_counter() - start
                dist.barrier()  # what gloo still sends is this way's
                cpu = time.process_time() - cpu
                torch.testing.assert_close(list(results), list(expected))
            if repeat >= 0:
                figures.setdefault(("time", name), []).append(seconds)
                figures.setdefault(("cpu", name), []).append(cpu)
    for name, way in ways.items() if LOOPBACK.exists() else ():
        dist.barrier()
        before = sent_bytes()
        for _ in range(COUNTED):
            way()
        dist.barrier()
        figures["sent", name] = [(sent_bytes() - before) / COUNTED]
        dist.barrier()
    return figures


def ratios(theirs: Sequence[float], mine: Sequence[float]) -> str:
    """Returns the median, and the 10th and 90th percentile, of the repeats' ratios."""
    both = [a / b for a, b in zip(theirs, mine, strict=True) if not math.isnan(a)]
    deciles = statistics.quantiles(both, n=10)
    return f"**{deciles[4]:.2f}** ({deciles[0]:.2f}-{deciles[8]:.2f})"


def over_ranks(quantity: str, values: Sequence[Sequence[float]]) -> list[float]:
    """Returns one figure a repeat: a repeat ends when its slowest rank does; CPU seconds add up."""
    return [(sum if quantity == "cpu" else max)(x) for x in zip(*values, strict=True)]


def print_table(names: Sequence[str], kib: int, repeats: int) -> None:
    """Measures and prints one of the README's tables."""
    timed = partial(run_ranks, time_ways, RANKS, names, kib, -(-repeats // WORLDS))
    worlds = [timed(seed, timeout_seconds=120 + 10.0 * repeats) for seed in range(WORLDS)]
    figures = {
        key: [x for ranks in worlds for x in over_ranks(key[0], [rank[key] for rank in ranks])]
        for key in worlds[0][0]
    }
    print(f"\n{CALLS} calls, {RANKS} tensors of {kib} KiB each ({RANKS * kib} KiB a call):\n")
    print("| | time | CPU | ms | MiB sent |\n|---|---|---|---|---|")
    for name in names:
        base = OUR_SUMS if "all_reduce" in name else OURS
        cells = [ratios(figures[q, name], figures[q, base]) for q in ("time", "cpu")]
        seconds = [x for x in figures["time", name] if not math.isnan(x)]
        cells.append(f"{1e3 * statistics.median(seconds):.0f}")
        sent = figures.get(("sent", name), [])
        cells.append(f"{statistics.median(sent) / 2**20:.0f}" if sent else "")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Prints the README's tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    repeats = parser.parse_args().repeats
    names = list(WAYS)
    if find_spec("fairscale") is None:
        names = [name for name in names if "fairscale" not in name]
        print("fairscale is not installed, its rows are left out: the README says how")
    for kib in (16, 64):
        print_table(names, kib, repeats)


if __name__ == "__main__":
    main()
