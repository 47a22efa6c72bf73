"""Times training steps of a U-Net whose skips are many times the hidden state, on slow hosts.

benchmarks/network/cluster.sh -n 4 -r 1gbit benchmarks/unet/unet.py [--rounds 12] [--json FILE]

The number of hosts, 2 or 4, is the number of stages.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipegrad
from pipegrad.comm import sync_points
from pipegrad.comm.sync_points import Done, Work
from pipegrad.schedules import Schedule

sys.path.append(str(Path(__file__).parents[1] / "network"))
from slow_hop import live_activations
from stages import COMPUTES, MESSAGES, Step, burst, hop_seconds, ratios, time_in_turns

MICROBATCHES, KIB = 16, 1024  # of a step; of the message that is measured
BASE, NOTHING = "1f1b, without overlap", "eager-1f1b, nothing to send"


class Part(NamedTuple):
    """What a stage takes, and what it makes: floats of a sample, divided by the channels."""

    takes: tuple[str, ...]
    makes: Mapping[str, int]


# The U-Net that Alpa measures: 32 x 32 pixels of C channels, 16 x 16 of 2 C, 8 x 8 of 4 C, and in
# the middle 4 x 4 of 4 C. All that the way down makes is a skip to the way up.
LARGE = 2 * 32**2 + 16**2  # of 32 x 32 pixels, and what is made smaller
SMALL = 2 * 16**2 + 2 * 8**2 + 4 * 8**2 + 2 * 4 * 4**2
CUTS = {
    2: [
        Part(("x",), {"x": 4 * 4**2, "skip": LARGE + SMALL}),
        Part(("x", "skip"), {"x": 1}),
    ],
    4: [
        Part(("x",), {"x": 16**2, "large": LARGE}),
        Part(("x",), {"x": 4 * 4**2, "small": SMALL}),
        Part(("x", "small"), {"x": 2 * 16**2}),
        Part(("x", "large"), {"x": 1}),
    ],
}


class _Sleep(torch.autograd.Function):
    """Adds what it takes, in the first column; both ways take as long as told."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        seconds: tuple[float, float],
        widths: tuple[int, ...],
        weight: Tensor,
        *taken: Tensor,
    ) -> tuple[Tensor, ...]:
        time.sleep(seconds[0])
        ctx.seconds, ctx.widths = seconds[1], [each.shape[1] for each in taken]
        total = torch.stack([weight, *(each[:, :1] for each in taken)]).sum(0)
        return tuple(_wide(total, width) for width in widths)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        time.sleep(ctx.seconds)
        total = torch.stack([each[:, :1] for each in gradients]).sum(0)
        return None, None, total, *(_wide(total, width) for width in ctx.widths)


def _wide(column: Tensor, width: int) -> Tensor:
    wide = column.new_zeros(1, width)
    wide[:, :1] = column
    return wide


class SleepingPart(nn.Module):
    """A stage of one number; its outputs are as large as those of the U-Net."""

    def __init__(self, seconds: tuple[float, float], widths: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))
        self._seconds, self._widths = seconds, widths

    def forward(self, *taken: Tensor) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = _Sleep.apply(self._seconds, self._widths, self.weight, *taken)  # type: ignore[no-untyped-call]
        return made


class Waiting(sync_points.Backend):
    """A rank waits for each message until the receiver has it, and only then computes on.

    Receives are posted ahead as always, so no rank waits for ever. A thread of the receiver says
    that a message has arrived.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(64)

    def send(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, tag: int) -> Work:
        """Sends."""
        work = super().send(group, tensor, peer, tag)
        super().receive(group, torch.empty(1), peer, tag + 2**20).wait()
        work.wait()
        return Done()

    def receive(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, tag: int) -> Work:
        """Starts to receive."""
        work = super().receive(group, tensor, peer, tag)

        def answer() -> None:
            work.wait()
            super(Waiting, self).send(group, torch.empty(1), peer, tag + 2**20).wait()

        return Answered(self._threads.submit(answer))


class Answered:
    """A receive whose sender knows that it has arrived."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def wait(self) -> None:
        """Waits for it."""
        self._future.result()


class Model:
    """The U-Net over all ranks, and what is known of a step of it.

    Args:
        channels: C; with 0 every value is one number, so that nothing is to be sent.
        seconds: Of a forward, and of a backward.
    """

    def __init__(self, channels: int, seconds: tuple[float, float]) -> None:
        self.parts = CUTS[dist.get_world_size()]
        self.floats = [{n: f * channels or 1 for n, f in part.makes.items()} for part in self.parts]
        self.seconds = seconds
        generator = torch.Generator().manual_seed(0)
        self.x, self.target = torch.randn(2, MICROBATCHES, 1, generator=generator)
        # The loss looks at the first column. A stage's number gets there on so many ways.
        self.ways = [0] * (len(self.parts) - 1) + [1]
        for stage in reversed(range(len(self.parts) - 1)):
            self.ways[stage] = sum(self.ways[taker] for taker, _, _ in self.sent(stage))

    def sent(self, stage: int) -> list[tuple[int, str, int]]:
        """Returns who takes what a stage makes, its name, and its bytes."""
        found = []
        for name, floats in self.floats[stage].items():
            takers = (t for t in range(stage + 1, len(self.parts)) if name in self.parts[t].takes)
            found += [(taker, name, 4 * floats) for taker in [next(takers, None)] if taker]
        return found

    def nbytes(self, stage: int, taker: int) -> int:
        """Returns the bytes of a microbatch from one stage to another."""
        return sum(nbytes for to, _, nbytes in self.sent(stage) if to == taker)

    def module(self, stage: int) -> SleepingPart:
        """Returns a stage's module."""
        return SleepingPart(self.seconds, tuple(self.floats[stage].values()))

    def step(self, schedule: Schedule, backend: sync_points.Backend) -> Step:
        """Returns a step under a schedule, that checks its gradient."""
        topology = pipegrad.Topology.create(pipeline=schedule.num_ranks)
        rank = topology.coordinate("pp")
        module, part = self.module(rank), self.parts[rank]
        scheduler = pipegrad.Scheduler(
            [pipegrad.Stage(module, rank, part.takes, tuple(part.makes))],
            topology,
            schedule=schedule,
            loss_fn=_loss,
            handlers=["noop"],
        )
        output = self.ways[0] * self.x  # all numbers are 0
        expected = self.ways[rank] * 2 * (output - self.target).mean()

        def step() -> list[Any]:
            with sync_points.using(backend):
                scheduler.step(self.x, target=self.target)
            torch.testing.assert_close(module.weight.grad, expected.reshape(1, 1))
            module.weight.grad = None
            return []

        # Here ranks learn how large values are. Until then a value goes in two messages, the second
        # of which must not be waited for before the first is sent.
        scheduler.step(self.x, target=self.target)
        module.weight.grad = None
        return step

    def alone(self) -> tuple[float, float]:
        """Returns the least that a forward and a backward take alone, mean of ranks."""
        rank, times = dist.get_rank(), []
        module = self.module(rank)
        made = {name: f for each in self.floats[:rank] for name, f in each.items()} or {"x": 1}
        taken = [torch.zeros(1, made[name]).requires_grad_() for name in self.parts[rank].takes]
        for _ in range(COMPUTES):
            stamps = [time.perf_counter()]
            outputs = module(*taken)
            stamps.append(time.perf_counter())
            torch.autograd.backward(outputs, [each.detach() for each in outputs])
            stamps.append(time.perf_counter())
            times.append([stamps[1] - stamps[0], stamps[2] - stamps[1]])
        least = torch.tensor([min(column) for column in zip(*times, strict=True)])
        dist.all_reduce(least)
        forward, backward = (least / dist.get_world_size()).tolist()
        return forward, backward

    def bounds(self, forward: float, backward: float, seconds_per_byte: float) -> tuple[float, ...]:
        """Returns what no schedule can beat: by the ranks' compute, and by their NICs.

        A stage begins when all that it takes has come there. From then on its rank has everything
        to compute, or its NIC everything to send, or to receive. Then its last gradients go back.
        """
        count = len(self.parts)
        ways = {
            (stage, taker): self.nbytes(stage, taker) * seconds_per_byte
            for stage in range(count)
            for taker in range(count)
            if self.nbytes(stage, taker)
        }
        both, begins, ends = forward + backward, [0.0] * count, [0.0] * count
        for (stage, taker), way in sorted(ways.items(), key=lambda each: each[0][1]):
            begins[taker] = max(begins[taker], begins[stage] + forward + way)
            ends[taker] = max(ends[taker], way + backward + ends[stage])
        compute = [begins[s] + MICROBATCHES * both + ends[s] for s in range(count)]
        nics = []
        for at in range(count):
            # A message may leave then, and when it has arrived there is so much left to do.
            values = [(begins[s] + forward, both + ends[t], s, t) for s, t in ways]
            gradients = [(begins[t] + both, backward + ends[s], t, s) for s, t in ways]
            busy = MICROBATCHES * sum(way for pair, way in ways.items() if at in pair)
            for end in (2, 3):  # what leaves the NIC, and what enters it, is as much
                passed = [each for each in (*values, *gradients) if each[end] == at]
                nics.append(min(e[0] for e in passed) + busy + min(e[1] for e in passed))
        return max(compute), max(nics)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, 0] - target[:, 0]).square().mean()


def build(name: str, **options: object) -> Schedule:
    """Returns the schedule of that name."""
    ranks = dist.get_world_size()
    return pipegrad.schedules.build(name, num_ranks=ranks, num_microbatches=MICROBATCHES, **options)


def measure(channels: int, seconds: tuple[float, float], rounds: int) -> dict[str, Any]:
    """Returns everything that is measured of one size of the U-Net, in seconds."""
    model, nothing = Model(channels, seconds), Model(0, seconds)
    hops = hop_seconds(KIB)
    per_byte = statistics.mean(hops) / (2**10 * KIB)
    forward, backward = model.alone()
    last = dist.get_world_size() - 1
    costs = {
        "hop_seconds": [model.nbytes(stage, stage + 1) * per_byte for stage in range(last)],
        "compute_seconds": forward + backward,
    }
    schedules = {
        BASE: build("1f1b"),
        "1f1b": build("1f1b"),
        "hop-aware-1f1b": build("hop-aware-1f1b", **costs),
        "eager-1f1b": build("eager-1f1b"),
        NOTHING: build("eager-1f1b"),
    }
    overlapping = sync_points.Backend()
    steps = {
        name: (nothing if name == NOTHING else model).step(
            schedule, Waiting() if name == BASE else overlapping
        )
        for name, schedule in schedules.items()
    }
    times = time_in_turns({**steps, "burst": burst(KIB)}, None, rounds)
    loaded = statistics.median(times.pop("burst")) / (MESSAGES * min(last, 2))
    least = min(statistics.mean(hops), loaded)  # a bound is by the faster of both
    return {
        "channels": channels,
        "alone": (forward, backward),
        "hops": hops,
        "loaded": loaded,
        "sent": {
            f"{name} to stage {taker}": nbytes
            for stage in range(last)
            for taker, name, nbytes in model.sent(stage)
        },
        "bounds": model.bounds(forward, backward, least / (2**10 * KIB)),
        "held": {name: live_activations(schedule) for name, schedule in schedules.items()},
        "times": times,
    }


def print_table(found: dict[str, Any]) -> None:
    """Prints one of the README's tables."""
    (forward, backward), times = found["alone"], found["times"]
    sent = ", ".join(f"{name} {nbytes / 2**20:.2f}" for name, nbytes in found["sent"].items())
    messages = ", ".join(f"{1e3 * each:.1f}" for each in found["hops"])
    skips = sum(n for name, n in found["sent"].items() if not name.startswith("x "))
    hidden = min(n for name, n in found["sent"].items() if name.startswith("x "))
    print(f"\n{found['channels']} channels. MiB of a microbatch, each way: {sent}.", end=" ")
    print(f"Skips are {skips / hidden:.0f} times the smallest hidden state.", end=" ")
    print(f"Alone, a forward and a backward take {1e3 * forward:.1f}, {1e3 * backward:.1f} ms.")
    print(f"A message of 1 MiB takes {messages} ms, and {1e3 * found['loaded']:.1f} under load:\n")
    bound = max(found["bounds"])
    print("| | time | ms | over the bound | activations held |\n|---|---|---|---|---|")
    for name, taken in times.items():
        median = statistics.median(taken)
        over = "" if name == NOTHING else f"{median / bound - 1:+.1%}"
        cells = [name, ratios(taken, times[BASE]), f"{1e3 * median:.0f}", over]
        print(f"| {' | '.join(cells)} | {found['held'][name]} |")
    for what, each in zip(("compute", "NICs"), found["bounds"], strict=True):
        print(f"| bound by {what} | | {1e3 * each:.0f} | | |")
    sys.stdout.flush()


def main() -> None:
    """Prints the README's tables, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forward-ms", type=float, default=10)
    parser.add_argument("--backward-ms", type=float, default=20)
    parser.add_argument("--channels", type=int, nargs="+", default=[80, 160, 320])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    found = []
    for channels in given.channels:
        seconds = given.forward_ms / 1e3, given.backward_ms / 1e3
        found.append(measure(channels, seconds, given.rounds))
        if dist.get_rank() == 0:
            print_table(found[-1])
    if given.json and dist.get_rank() == 0:
        given.json.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
