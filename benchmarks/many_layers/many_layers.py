"""Times a step of one rank whose stage has many small layers, against plain autograd.

python benchmarks/many_layers/many_layers.py [--layers 250] [--width 16 64] [--rounds 40]
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as pipelining

import pipegrad

Step = Callable[[], object]
SCHEDULES = ("1f1b", "zb-h1")
WARM_UP = 3  # rounds
SLOPE = 0.8  # of the activation below zero


class Case(NamedTuple):
    """A stage, and what its step is given."""

    layers: int
    width: int
    rows: int
    microbatches: int

    def module(self) -> nn.Module:
        """Returns linear layers with an activation behind each; the same at every call."""
        torch.manual_seed(0)
        layers = list[nn.Module]()
        for _ in range(self.layers):
            linear = nn.Linear(self.width, self.width)
            # Gradients must come through all layers: numbers near zero are slow to compute with.
            nn.init.orthogonal_(linear.weight, nn.init.calculate_gain("leaky_relu", SLOPE))
            layers += [linear, nn.LeakyReLU(SLOPE)]
        return nn.Sequential(*layers)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Returns input and target."""
        shape = self.microbatches * self.rows, self.width
        generator = torch.Generator().manual_seed(1)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    def parts(self) -> list[tuple[Tensor, ...]]:
        """Returns the microbatches."""
        return list(zip(*(each.chunk(self.microbatches) for each in self.batch()), strict=True))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns a microbatch's part of the loss of a step."""
        return nn.functional.mse_loss(output, target) / self.microbatches


def plain(case: Case, module: nn.Module) -> Step:
    """Returns a step of autograd alone: forward and backward, a microbatch after the other."""
    parts = case.parts()

    def step() -> None:
        for x, target in parts:
            case.loss(module(x), target).backward()  # type: ignore[no-untyped-call]

    return step


def torchs_split(case: Case, module: nn.Module) -> Step:
    """Returns a step of torch's own split backward, as its pipeline stages call it."""
    parts = case.parts()

    def step() -> None:
        for x, target in parts:
            needed = x.clone().requires_grad_()  # in its first stage, torch does not split
            loss = case.loss(module(needed), target)
            groups = pipelining.stage_backward_input([loss], None, [needed], module.parameters())[1]
            pipelining.stage_backward_weight(module.parameters(), groups)

    return step


def pipegrads(case: Case, module: nn.Module, schedule: str) -> Step:
    """Returns a step of pipegrad's Scheduler."""
    scheduler = pipegrad.Scheduler(
        [pipegrad.Stage(module, 0)],
        pipegrad.Topology.create(pipeline=1),
        schedule=schedule,
        num_microbatches=case.microbatches,
        loss_fn=nn.functional.mse_loss,
    )
    x, target = case.batch()
    return lambda: scheduler.step(x, target=target)


def seconds_in_turns(case: Case, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of a step of each way, one a round."""
    modules, steps = dict[str, nn.Module](), dict[str, Step]()
    ways = {"plain": plain, "torch, split": torchs_split}
    for name, way in ways.items():
        modules[name] = case.module()
        steps[name] = way(case, modules[name])
    for schedule in SCHEDULES:
        name = f"pipegrad, {schedule}"
        modules[name] = case.module()
        steps[name] = pipegrads(case, modules[name], schedule)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARM_UP + rounds):
        for name in random.sample([*steps], len(steps)) if number else steps:
            begin = time.perf_counter()
            steps[name]()
            taken = time.perf_counter() - begin
            if number == 0:
                check(modules[name], modules["plain"])
            if number >= WARM_UP:
                times[name].append(taken)
            if number or name == [*steps][-1]:
                for module in modules.values():
                    module.zero_grad()
    return times


def check(module: nn.Module, expected: nn.Module) -> None:
    """Fails unless both have the same gradients."""
    for own, other in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def print_table(case: Case, times: dict[str, list[float]]) -> None:
    """Prints one of the README's tables."""
    print(f"\n{case}\n\n| | time | ms |\n|---|---|---|")
    for name, taken in times.items():
        ratios = [a / b for a, b in zip(taken, times["plain"], strict=True)]
        deciles = statistics.quantiles(ratios, n=10, method="inclusive")
        spread = f"**{deciles[4]:.2f}** ({deciles[0]:.2f}-{deciles[8]:.2f})"
        print(f"| {name} | {spread} | {1e3 * statistics.median(taken):.1f} |", flush=True)


def main() -> None:
    """Prints the README's tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=250)
    parser.add_argument("--width", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--rows", type=int, default=8, help="of a microbatch")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for width in given.width:
        for microbatches in given.microbatches:
            case = Case(given.layers, width, given.rows, microbatches)
            print_table(case, seconds_in_turns(case, given.rounds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
