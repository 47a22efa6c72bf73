"""Times steps of sequences in chunks of time, beside whole ones, over four hosts.

benchmarks/network/cluster.sh -r 1gbit benchmarks/long_context/steps.py [--attention 0.5]

A stage sleeps instead of computing: a part of the time for each token, the rest for each pair of a
token and one before it, as attention does. It carries a tensor whose gradient is checked.
"""

import argparse
import math
import statistics
import sys
import time
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "network"))
from stages import SleepingWeight, hop_seconds, ratios

import pipegrad
from pipegrad.schedules import lower
from pipegrad.simulation.costs import Costs, Network, StageCosts
from pipegrad.simulation.simulator import simulate

RANKS, MICROBATCHES, LENGTH = 4, 4, 1024
FORWARD, BACKWARD, WEIGHT = 0.160, 0.320, 0.160  # of a whole sequence on a stage, in seconds


class Way(NamedTuple):
    """A schedule, and into how many chunks it cuts a sequence, of these lengths or even."""

    schedule: str
    chunks: int
    lengths: tuple[int, ...] = ()

    @property
    def spec(self) -> dict[str, Any]:
        """Its table."""
        return {"name": self.schedule} | ({"chunks": self.chunks} if self.chunks > 1 else {})


def cost(end: float, attention: float) -> float:
    """Returns what the first `end` of a sequence costs, both as parts of the whole."""
    return (1 - attention) * end + attention * end**2


def balanced(number: int, attention: float) -> tuple[int, ...]:
    """Returns lengths of chunks that cost alike."""
    ends = [0]
    for i in range(1, number + 1):
        a, b, c = attention, 1 - attention, i / number
        end = c / b if a == 0 else (math.sqrt(b * b + 4 * a * c) - b) / (2 * a)
        ends.append(round(LENGTH * end))
    return tuple(end - begin for begin, end in pairwise(ends))


class _Sleep(torch.autograd.Function):
    """Hands on its input and adds the state; both ways take as long as told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor, forward: float, backward: float) -> Tensor:  # noqa: ANN401
        ctx.seconds = backward
        time.sleep(forward)
        output = x.clone()
        output[:, :, :1] += added
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: ANN401
        time.sleep(ctx.seconds)
        return gradient, gradient[:, :, :1], None, None


class _Ones(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        return x.new_ones(len(x), x.shape[1], 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # noqa: ANN401
        return None


class Sleeper(nn.Module):
    """A stage with one number to train: it is added as often as tokens came before."""

    def __init__(self, attention: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))
        self._attention = attention

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:  # noqa: ANN401
        begin, total = (0, x.new_zeros(len(x), 1, 1)) if state is None else state
        end = begin + x.shape[1]
        share = cost(end / LENGTH, self._attention) - cost(begin / LENGTH, self._attention)
        weight = SleepingWeight.apply(self.weight, share * WEIGHT)  # type: ignore[no-untyped-call]
        added = total + (_Ones.apply(x) @ weight).cumsum(1)  # type: ignore[no-untyped-call]
        inputs = share * (BACKWARD - WEIGHT)
        x = _Sleep.apply(x, added, share * FORWARD, inputs)  # type: ignore[no-untyped-call]
        return x, (end, added[:, -1:])


def alone(chunks: int, attention: float, width: int) -> StageCosts:
    """Returns what a stage takes for a sequence in chunks: medians, the mean of all ranks.

    Small computes take longer than their part of a large one: sleeps are late, hosts have work.
    """
    module, taken = Sleeper(attention), []
    x = torch.zeros(1, LENGTH // chunks, width, requires_grad=True)
    for _ in range(5):
        state: Any = None
        stamps = [0.0, 0.0, 0.0]
        for _ in range(chunks):
            begin = time.perf_counter()
            y, (end, carried) = module(x, state)
            middle = time.perf_counter()
            y.backward(torch.ones_like(y), inputs=[x], retain_graph=True)
            behind = time.perf_counter()
            y.backward(torch.ones_like(y))
            last = time.perf_counter()
            state = end, carried.detach().requires_grad_()
            for i, seconds in enumerate((middle - begin, behind - middle, last - behind)):
                stamps[i] += seconds
        taken.append(stamps)
    medians = torch.tensor(taken, dtype=torch.float64).median(0).values
    dist.all_reduce(medians)
    forward, inputs, backward = (medians / dist.get_world_size()).tolist()
    return StageCosts(forward, backward, backward - inputs, outputs={"x": LENGTH * width * 4})


def loss(x: Tensor, target: Tensor) -> Tensor:
    """Returns the mean over tokens; it looks at one column, so it takes no time."""
    return (x[:, :, 0] - target).square().mean()


def ways_of(attention: float) -> dict[str, Way]:
    """Returns what is compared, by name."""
    ways: dict[str, Way] = {"1f1b": Way("1f1b", 1)}
    ways |= {f"chunked-1f1b, {k} chunks": Way("chunked-1f1b", k) for k in (2, 4, 8, 16)}
    if attention:
        lengths = balanced(8, attention)
        ways["chunked-1f1b, 8 chunks that cost alike"] = Way("chunked-1f1b", 8, lengths)
    return ways | {"zb-h1": Way("zb-h1", 1), "chunked-zb-h1, 8 chunks": Way("chunked-zb-h1", 8)}


def measured(ways: dict[str, Way], attention: float, width: int, rounds: int) -> list[list[float]]:
    """Returns the seconds of each way on the slowest rank, one a round; gradients are checked."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MICROBATCHES, LENGTH, width, generator=generator)
    target = torch.randn(MICROBATCHES, LENGTH, generator=generator)
    # All weights are 0, and each adds 1 for each token up to the present one.
    counts = torch.arange(1, LENGTH + 1)
    expected = (2 * (x[:, :, 0] - target) * counts).mean().reshape(1, 1)
    topology = pipegrad.Topology.create(pipeline=RANKS)
    modules = [Sleeper(attention) for _ in ways]
    schedulers = [
        pipegrad.Scheduler(
            [pipegrad.Stage(module, dist.get_rank(), carry=("state",))],
            topology,
            schedule=way.spec,
            num_microbatches=MICROBATCHES,
            loss_fn=loss,
            handlers=["noop"],
        )
        for module, way in zip(modules, ways.values(), strict=True)
    ]
    times: list[list[float]] = [[] for _ in ways]
    for repeat in range(rounds + 1):
        for number, way in enumerate(ways.values()):
            dist.barrier()
            begin = time.perf_counter()
            schedulers[number].step(x, target=target, chunks=way.lengths or way.chunks)
            seconds = time.perf_counter() - begin
            gradient = modules[number].weight.grad
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-3)
            modules[number].weight.grad = None
            if repeat > 0:
                times[number].append(seconds)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    found: list[list[float]] = slowest.tolist()
    return found


def predicted(way: Way, stage: StageCosts, network: Network) -> float:
    """Returns the seconds that the simulator says."""
    sizes = {"num_ranks": RANKS, "num_microbatches": MICROBATCHES}
    made = pipegrad.schedules.build(**{**way.spec, **sizes})
    costs = Costs((stage,) * (RANKS - 1) + (replace(stage, outputs={}),), network)
    return simulate(lower(made), costs, num_steps=2).step_seconds[-1]


def main() -> None:
    """Prints a table of the README, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", type=float, default=0.0, help="its part of the time")
    parser.add_argument("--mib", type=float, default=8.0, help="of a sequence between two stages")
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    width, ways = int(given.mib * 2**20 / 4 / LENGTH), ways_of(given.attention)
    times = measured(ways, given.attention, width, given.rounds)
    stages = {k: alone(k, given.attention, width) for k in (1, 2, 4, 8, 16)}
    # Two sizes say what a message takes and what its bytes take.
    small, large = (statistics.mean(hop_seconds(kib)) for kib in (64, 1024))
    rate = (1024 - 64) * 2**10 / (large - small)
    network = Network(rate, max(0.0, small - 64 * 2**10 / rate))
    if dist.get_rank() == 0:
        print(
            f"\n{given.mib:g} MiB a sequence, attention {given.attention:g} of the time, ", end=""
        )
        print(f"{rate / 1e6:.0f} MB/s, {1e6 * network.latency_seconds:.0f} us a message.\n")
        print("| | time | ms | simulated | off |\n|---|---|---|---|---|")
        for (name, way), taken in zip(ways.items(), times, strict=True):
            cells, median = ["", ""], statistics.median(taken)
            # Chunks are simulated as taking alike.
            if given.attention == 0 or way.chunks == 1 or way.lengths:
                seconds = predicted(way, stages[way.chunks], network)
                cells = [f"{1e3 * seconds:.0f}", f"{median / seconds - 1:+.1%}"]
            row = [name, ratios(taken, times[0]), f"{1e3 * median:.0f}", *cells]
            print("|", " | ".join(row), "|")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
