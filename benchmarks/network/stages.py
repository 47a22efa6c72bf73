"""Stages that sleep instead of computing, and how these benchmarks time steps and messages."""

import statistics
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipegrad
from pipegrad.schedules import Kind, Schedule
from pipegrad.schedules.program.lower import DEPTH

KIB = 2**10 // 4  # a KiB of fp32, in elements
COMPUTES, MESSAGES = 40, 20  # measured alone, of which medians are taken

Step = Callable[[], list["SleepingStage"]]  # returns the stages of this rank
Seconds = Mapping[Kind, float]  # what each kind of action takes


def split_seconds(forward: float, backward: float, weight: float = 0.0) -> dict[Kind, float]:
    """Returns the seconds of each kind, where `weight` of a backward is what W can take of it."""
    return {"F": forward, "B": backward, "I": backward - weight, "W": weight}


class _Sleep(torch.autograd.Function):
    """Adds to the first column of its input; both ways take as long as told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor, forward: float, backward: float) -> Tensor:  # noqa: ANN401
        ctx.seconds = backward
        time.sleep(forward)
        output = x.clone()
        output[:, :1] += added
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: ANN401
        time.sleep(ctx.seconds)
        return gradient, gradient[:, :1], None, None


class SleepingWeight(torch.autograd.Function):
    """A weight whose gradient takes as long as told, on top of what makes it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:  # noqa: ANN401
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        time.sleep(ctx.seconds)
        return gradient, None


class _Ones(torch.autograd.Function):
    """A column of ones that autograd takes for something made of `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        return x.new_ones(len(x), 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # noqa: ANN401
        return None


class SleepingStage(nn.Module):
    """A stage with one number to train, whose output is as large as its input.

    Its backward sleeps I on the way to the input and W on the way to the weight. Torch and pipegrad
    split it where something on the way to the input is multiplied with a weight: here ones, for
    the gradient of a part of the input would be as large as the input, and take its time.
    """

    def __init__(self, seconds: Seconds) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        weight = SleepingWeight.apply(self.weight, self._seconds["W"])  # type: ignore[no-untyped-call]
        added = _Ones.apply(x) @ weight  # type: ignore[no-untyped-call]
        output: Tensor = _Sleep.apply(x, added, self._seconds["F"], self._seconds["I"])  # type: ignore[no-untyped-call]
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
        torch.testing.assert_close(module.weight.grad, expected.reshape(1, 1))
        module.weight.grad = None


def ours(schedule: Schedule, seconds: Seconds, batch: Batch, *, depth: int = DEPTH) -> Step:
    """Returns a step of pipegrad's Scheduler, each of whose stages sleeps `seconds`."""
    topology = pipegrad.Topology.create(
        pipeline=schedule.num_ranks, stage_to_rank=schedule.stage_to_rank
    )
    modules = {stage: SleepingStage(seconds) for stage in topology.local_stages}
    scheduler = pipegrad.Scheduler(
        [pipegrad.Stage(module, index) for index, module in modules.items()],
        topology,
        schedule=schedule,
        num_microbatches=schedule.num_microbatches,
        loss_fn=batch.loss,
        handlers=["noop"],
        depth=depth,
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


def compute_seconds(seconds: Seconds, batch: Batch) -> dict[Kind, float]:
    """Returns what each kind takes when nothing is sent: medians, mean of ranks.

    W is what a backward takes more than I, and I all of it where W does not sleep.
    """
    module, row = SleepingStage(seconds), batch.x[:1].clone().requires_grad_()
    times = []
    for _ in range(COMPUTES):
        stamps = [time.perf_counter()]
        output = module(row)
        stamps.append(time.perf_counter())
        output.backward(row.detach(), inputs=[row], retain_graph=True)
        stamps.append(time.perf_counter())
        output.backward(row.detach())
        stamps.append(time.perf_counter())
        times.append([end - begin for begin, end in pairwise(stamps)])
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    total = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(total)
    forward, inputs, backward = (total / dist.get_world_size()).tolist()
    return split_seconds(forward, backward, backward - inputs if seconds["W"] > 0 else 0.0)


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


def burst(kib: int) -> Step:
    """Returns a step of messages alone: all neighbours send both ways at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    peers = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < size]
    sent, received = torch.zeros(kib * KIB), {peer: torch.zeros(kib * KIB) for peer in peers}

    def step() -> list[SleepingStage]:
        works = [dist.irecv(received[peer], peer) for _ in range(MESSAGES) for peer in peers]
        works += [dist.isend(sent, peer) for _ in range(MESSAGES) for peer in peers]
        for work in works:
            assert work is not None
            work.wait()
        return []

    return step


def ratios(times: list[float], base: list[float]) -> str:
    """Returns the median, and the 10th and 90th percentile, of the rounds' ratios."""
    both = [a / b for a, b in zip(times, base, strict=True)]
    deciles = statistics.quantiles(both, n=10, method="inclusive")
    return f"**{deciles[4]:.2f}** ({deciles[0]:.2f}-{deciles[8]:.2f})"
