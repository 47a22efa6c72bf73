"""Measures what it costs to refuse what would train on wrong numbers, and to divide at the end.

python benchmarks/overhead/refusals.py [--rounds 200]

Two ranks, replicas of one stage. Each pair of steps takes turns in one run:

- a step of 200 parameters of 64 numbers, host work alone, with and without looking at the versions
  of parameters (does a forward write them?) and of gradients (did somebody change them?);
- a step of four gradients of 16 MiB, divided by 8 and by 1.

Beside them stand the times of the parts alone.
"""

import argparse
import statistics
import time
import timeit
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from pipegrad import GradientSync, Topology
from pipegrad.gradients.local_gradients import LooseLeaves, _leaves
from pipegrad.gradients.optimizer_watch import OptimizerWatch
from pipegrad.gradients.step import Step
from pipegrad.pipeline.loss_message import IGNORED
from pipegrad.pipeline.trees import versions_of
from pipegrad.testing import run_ranks

MANY, SMALL, LARGE = 200, 64, 2**22


def parameters(number: int, numel: int) -> nn.ParameterList:
    """Returns a stage, the same on both ranks."""
    return nn.ParameterList(nn.Parameter(torch.ones(numel)) for _ in range(number))


def step(
    sync: GradientSync, stage: nn.ParameterList, optimizer: torch.optim.Optimizer, divisor: float
) -> None:
    """Takes a step of all parameters."""
    sync.prepare(divisor=divisor)
    sync.stage_first_use(0)
    total = torch.stack([p.sum() for p in stage]).sum()
    sync.stage_last_backward(0)
    total.backward()
    sync.stage_final(0)
    sync.finish()
    optimizer.step()
    optimizer.zero_grad()


def turns(rounds: int, run: Callable[[bool], None]) -> tuple[float, float]:
    """Returns the median seconds of ``run(True)`` and ``run(False)``, which take turns."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * rounds):
        dist.barrier()
        began = time.perf_counter()
        run(bool(number % 2))
        seconds[bool(number % 2)].append(time.perf_counter() - began)
    return statistics.median(seconds[True][5:]), statistics.median(seconds[False][5:])


def best(function: Callable[[], object], number: int = 100) -> float:
    """Returns the seconds of one call."""
    return min(timeit.repeat(function, number=number, repeat=7)) / number


def measured(rounds: int) -> dict[str, float]:
    """Returns seconds by name."""
    topology = Topology.create(pipeline=1)
    stage = parameters(MANY, SMALL)
    sync = GradientSync({0: stage}, topology, handlers=["data-parallel"])
    optimizer = sync.optimizer(torch.optim.SGD, lr=0.0)
    versions, refuses = Step._note_versions, Step._refuse_written
    looks = OptimizerWatch._warn_of_changes
    sync._watch._alike = False  # as on stages

    def run(looking: bool) -> None:
        Step._note_versions = versions if looking else _nothing  # type: ignore[method-assign]
        Step._refuse_written = refuses if looking else _nothing  # type: ignore[method-assign]
        OptimizerWatch._warn_of_changes = looks if looking else _nothing  # type: ignore[method-assign]
        step(sync, stage, optimizer, 1.0)

    found: dict[str, float] = {}
    found["with"], found["without"] = turns(rounds, run)
    run(True)
    watch = sync._watch
    found["versions"] = best(lambda: (sync._note_versions(0), sync._refuse_written(0)))
    for bucket in sync._buckets.values():  # as after a step: gradients are the slots
        for tensor, slot in zip(bucket._live, bucket.buffer.slots, strict=True):
            tensor.grad = slot
    watch._looks = True
    watch.note_results()
    found["changes"] = best(lambda: watch._warn_of_changes())
    loose = LooseLeaves(sync, {})
    found["loose"] = best(lambda: (setattr(loose, "_num_steps", 2), loose.begin()))
    root = torch.stack([p.sum() for p in stage]).sum()
    found["walk"] = best(lambda: _leaves([root]))
    inputs = [torch.ones(8, 4), torch.ones(8, 4)]
    found["inputs"] = best(lambda: versions_of(inputs))
    labels = torch.full((8, 2048), 7)
    found["labels"] = best(lambda: int((labels != IGNORED).sum()))
    sync.close()

    large = parameters(4, LARGE)
    sync = GradientSync({0: large}, topology, handlers=["data-parallel"])
    optimizer = sync.optimizer(torch.optim.SGD, lr=0.0)
    found["divided"], found["undivided"] = turns(
        max(rounds // 5, 10), lambda divides: step(sync, large, optimizer, 8.0 if divides else 1.0)
    )
    sync.close()
    return found


def _nothing(*_: object) -> None:
    pass


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    found = run_ranks(measured, 2, parser.parse_args().rounds, timeout_seconds=600)
    mean = {name: statistics.mean(each[name] for each in found) for name in found[0]}
    without = mean["without"]
    print(f"a step of {MANY} parameters {without * 1e3:.2f} ms; ", end="")
    print(f"with looking, by without {mean['with'] / without:.3f}")
    for name, what in (("versions", "versions of parameters"), ("changes", "changed gradients")):
        seconds = mean[name]
        print(f"{what}: {seconds * 1e6:.0f} us, {seconds / MANY * 1e9:.0f} ns each, ", end="")
        print(f"{seconds / without:.2%} of that step")
    print(f"loose leaves, a usual step: {mean['loose'] * 1e6:.1f} us; ", end="")
    print(f"a walk: {mean['walk'] / MANY * 1e6:.2f} us a leaf with its two nodes")
    print(f"versions of two inputs: {mean['inputs'] * 1e6:.1f} us a stage and step")
    print(f"labels that count, of 8 x 2048: {mean['labels'] * 1e6:.0f} us a microbatch")
    print(f"64 MiB of gradients: {mean['undivided'] * 1e3:.1f} ms; ", end="")
    print(f"divided, by undivided {mean['divided'] / mean['undivided']:.3f}")


if __name__ == "__main__":
    main()
