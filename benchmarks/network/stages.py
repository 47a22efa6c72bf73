"""Stages that sleep instead of computing, and how these benchmarks time steps and messages."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipegrad
from pipegrad.schedules import Schedule

KIB = 2**10 // 4  # a KiB of fp32, in elements
COMPUTES, MESSAGES = 40, 20  # measured alone, of which medians are taken

Step = Callable[[], list["SleepingStage"]]  # returns the stages of this rank


class _Sleep(torch.autograd.Function):
    """Adds a weight to the first column of its input; both ways take as long as told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward: float, backward: float) -> Tensor:  # noqa: ANN401
        ctx.seconds = backward
        time.sleep(forward)
        output = x.clone()
        output[:, 0] += weight
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: ANN401
        time.sleep(ctx.seconds)
        return gradient, gradient[:, 0].sum(), None, None


class SleepingStage(nn.Module):
    """A stage with one number to train, whose output is as large as its input."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self._seconds = forward_seconds, backward_seconds

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Sleep.apply(x, self.weight, *self._seconds)  # type: ignore[no-untyped-call]
        return output


class Batch:
    """The same on every rank: microbatches of one row, and what the model should make of them."""

    def __init__(self, num_microbatches: int, kib: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(num_microbatches, kib * KIB, generator=generator)
        self.target = torch.randn(num_microbatches, generator=generator)

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:
        """Returns the mean loss of a microbatch; it looks at one column, so it takes no time."""
        return (output[:, 0] - target).square().mean()

    def check(self, module: SleepingStage) -> None:
        """Raises unless a stage has the whole batch's gradient; takes it away.

        All weights are 0, so it is the same on all stages.
        """
        expected = 2 * (self.x[:, 0] - self.target).mean()
        torch.testing.assert_close(module.weight.grad, expected)
        module.weight.grad = None


def ours(schedule: Schedule, seconds: tuple[float, float], batch: Batch) -> Step:
    """Returns a step of pipegrad's Scheduler; each stage sleeps `seconds`, forward and backward."""
    topology = pipegrad.Topology.create(
        pipeline=schedule.num_ranks, stage_to_rank=schedule.stage_to_rank
    )
    modules = {stage: SleepingStage(*seconds) for stage in topology.local_stages}
    scheduler = pipegrad.Scheduler(
        [pipegrad.Stage(module, index) for index, module in modules.items()],
        topology,
        schedule=schedule,
        num_microbatches=schedule.num_microbatches,
        loss_fn=batch.loss,
        handlers=["noop"],
    )

    def step() -> list[SleepingStage]:
        scheduler.step(batch.x, target=batch.target)
        return list(modules.values())

    return step


def time_in_turns(steps: Mapping[str, Step], batch: Batch, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each step on the slowest rank, one a round; the first is not counted.

    A step begins at a barrier and ends, on each rank, where `step()` returns. Its gradients are
    then compared with those of the whole batch.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            modules = step()
            seconds = time.perf_counter() - begin
            for module in modules:
                batch.check(module)
            if repeat > 0:
                times[name].append(seconds)
    slowest = torch.tensor([*times.values()], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(times, slowest.tolist(), strict=True))


def compute_seconds(seconds: tuple[float, float], batch: Batch) -> tuple[float, float]:
    """Returns what a forward and a backward take when nothing is sent: medians, mean of ranks."""
    module, row = SleepingStage(*seconds), batch.x[:1].clone().requires_grad_()
    times = []
    for _ in range(COMPUTES):
        begin = time.perf_counter()
        output = module(row)
        middle = time.perf_counter()
        output.backward(row.detach())
        times.append((middle - begin, time.perf_counter() - middle))
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    total = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(total)
    forward, backward = (total / dist.get_world_size()).tolist()
    return forward, backward


def hop_seconds(kib: int) -> list[float]:
    """Returns, for each hop, half of what a message takes there and back: a median."""
    rank, hops = dist.get_rank(), dist.get_world_size() - 1
    sent, received = torch.zeros(kib * KIB), torch.zeros(kib * KIB)
    medians = torch.zeros(hops, dtype=torch.float64)
    for hop in range(hops):
        times = []
        for _ in range(MESSAGES if rank in (hop, hop + 1) else 0):
            if rank == hop:
                work = dist.irecv(received, hop + 1)  # posted first, or the answer waits for it
                begin = time.perf_counter()
                dist.send(sent, hop + 1)
                assert work is not None
                work.wait()
                times.append((time.perf_counter() - begin) / 2)
            else:
                dist.recv(received, hop)
                dist.send(sent, hop)
        if rank == hop:
            medians[hop] = statistics.median(times)
        dist.barrier()
    dist.all_reduce(medians)
    return [float(x) for x in medians.tolist()]


def ratios(times: list[float], base: list[float]) -> str:
    """Returns the median, and the 10th and 90th percentile, of the rounds' ratios."""
    both = [a / b for a, b in zip(times, base, strict=True)]
    deciles = statistics.quantiles(both, n=10, method="inclusive")
    return f"**{deciles[4]:.2f}** ({deciles[0]:.2f}-{deciles[8]:.2f})"
