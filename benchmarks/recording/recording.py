"""Measures what recording costs: steps with and without it take turns.

python benchmarks/recording/recording.py [--steps 300] [--ranks 2]

The smallest case is four numbers a stage, where a step is host work alone. The other one is a
small transformer. A ratio is of the first quartiles, which depend less than medians on what else
runs on a machine; the spread is that of ten parts of the run. The second clock is that of the
processor, for all threads of rank 0. The last line is what a recorder itself does in a step.
"""

import argparse
import statistics
import time
import timeit
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipegrad
from pipegrad import Scheduler, Stage, Topology, schedules
from pipegrad.observe.step_recorder import Stamps, StepRecorder
from pipegrad.schedules import lower
from pipegrad.testing import run_ranks

MICROBATCHES, PARTS = 8, 10


def smallest(stage: int) -> tuple[nn.Module, Tensor]:
    """Returns a stage of next to no work, and a batch."""
    torch.manual_seed(stage)
    return nn.Linear(4, 4), torch.ones(MICROBATCHES, 4)


def transformer(stage: int) -> tuple[nn.Module, Tensor]:
    """Returns a stage of two layers, and a batch."""
    torch.manual_seed(stage)
    layers = [nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(*layers), torch.ones(MICROBATCHES, 128, 256)


CASES: dict[str, Callable[[int], tuple[nn.Module, Tensor]]] = {
    "smallest": smallest,
    "transformer": transformer,
}


Seconds = tuple[float, float]  # of a clock on the wall, and of the processor
Pair = tuple[Seconds, Seconds]  # without recording, and with it


def measured(case: str, steps: int) -> list[Pair]:
    """Returns seconds of steps without and with recording, in pairs."""
    topology = Topology.create(pipeline=dist.get_world_size())
    module, batch = CASES[case](dist.get_rank())
    scheduler = Scheduler(
        [Stage(module, dist.get_rank())],
        topology,
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=lambda out, target: (out - target).square().mean(),
    )
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=1e-3)
    tape, pairs = scheduler.sync.tape, []

    def step() -> Seconds:
        dist.barrier()
        began, worked = time.perf_counter(), time.process_time()
        result = scheduler.step(batch, target=batch)
        scheduler.sync.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        result.loss.item()
        return time.perf_counter() - began, time.process_time() - worked

    with pipegrad.record(scheduler):
        recorder = tape.recorder
        for number in range(steps + 5):
            seconds = {}
            # Who is first changes, so that what is slow now and then hits both alike.
            for on in (False, True) if number % 2 else (True, False):
                tape.recorder = recorder if on else None
                seconds[on] = step()
            pairs.append((seconds[False], seconds[True]))
    scheduler.close()
    return pairs[5:]


def ratio(pairs: list[Pair], clock: int) -> float:
    """Returns the first quartile with recording by that without."""
    off, on = (quartile([pair[i][clock] for pair in pairs]) for i in range(2))
    return on / off


def quartile(seconds: list[float]) -> float:
    """Returns the first quartile."""
    return float(statistics.quantiles(seconds, n=4)[0])


def own_seconds() -> float:
    """Returns what a recorder does in a step of rank 0 of two, without the step."""
    program = lower(
        schedules.build("1f1b", num_ranks=2, num_microbatches=MICROBATCHES),
        links=[schedules.Link("x", 0, (1,))],
    )
    recorder = StepRecorder(0, Stamps(), steps=3, names={})

    def step() -> None:
        recorder.begin_step(0, program)
        now = recorder.now
        keep = recorder.item_times()
        keep(now())
        for _ in program.items[0]:
            keep(now())
        for _ in range(4):  # reductions, waits for ranks, the optimizer
            recorder.note("wait for ranks", "the loss of all ranks", now())

    seconds = min(timeit.repeat(step, number=200, repeat=30)) / 200
    recorder.stop()
    return seconds


def main() -> None:
    """Prints two lines for each case, and one for the recorder alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    for case in CASES:
        steps = arguments.steps if case == "smallest" else max(2 * PARTS, arguments.steps // 10)
        pairs = run_ranks(measured, arguments.ranks, case, steps)[0]
        size = len(pairs) // PARTS
        for clock, name in enumerate(("a step", "of the processor")):
            parts = [ratio(pairs[i * size : (i + 1) * size], clock) for i in range(PARTS)]
            off = quartile([pair[0][clock] for pair in pairs])
            print(
                f"{case}: {off * 1e3:.2f} ms {name} without, {ratio(pairs, clock):.4f} times that "
                f"with recording; parts of the run: {min(parts):.3f} to {max(parts):.3f}"
            )
    print(f"the recorder itself: {own_seconds() * 1e6:.1f} us a step")


if __name__ == "__main__":
    main()
