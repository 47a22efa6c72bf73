"""Times steps of a pipeline of four hosts whose first and last stage hold one weight.

benchmarks/network/cluster.sh -r 1gbit benchmarks/tied_exchange/tied_exchange.py [--rounds 12]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipegrad
from pipegrad.plugins.handler import HandlerSpec
from pipegrad.schedules import Kind, Schedule

sys.path.append(str(Path(__file__).parents[1] / "network"))
from stages import (
    KIB,
    Batch,
    Seconds,
    SleepingStage,
    compute_seconds,
    hop_seconds,
    ratios,
    split_seconds,
)

RANKS = 4
FIRST, LAST = 0, RANKS - 1  # who hold the weight
PARTS = {FIRST: 1.0, LAST: 2.0}  # the weight's gradient on each, in its rows: any bits lost show
WIDTH, EVERY = 256, {FIRST: 20, LAST: 1}  # of a row; which rows are used on each: one in so many
LEARNING_RATE = 2.0**-20  # with which all sums are exact
LEAD_IN, WARM_UP = 1, 3  # steps before those that are timed: in a round; in all, of each way
PROBE_KIB, REPEATS = 4096, 20
SHARE = 0.8  # of the fill that the weight's way back may take: it shares the NIC with activations


class Way(NamedTuple):
    """How the two gradients come together.

    Attributes:
        handlers: Of pipegrad.
        blocking: Whether the holders all-reduce after the step, and wait for it.
        ties: Whether they come together at all.
    """

    handlers: Sequence[HandlerSpec]
    blocking: bool = False
    ties: bool = True


BASE = "no tie"
WAYS = {
    BASE: Way(["noop"], ties=False),
    "blocking": Way(["noop"], blocking=True),
    "REPLICATE": Way(["pipeline-shared"]),
    "OWNER": Way([{"name": "pipeline-shared", "placement": "owner"}]),
    "asymmetric": Way([{"name": "pipeline-shared", "exchange": "asymmetric"}]),
}


def part_of(rank: int, num_rows: int) -> Tensor:
    """Returns the weight's gradient on a rank, one number a row, ``(num_rows, 1)``."""
    part = torch.zeros(num_rows, 1)
    part[:: EVERY[rank]] = PARTS[rank]
    return part


class _Use(torch.autograd.Function):
    """A zero for a weight, whose gradient is one number in each row: nobody has to compute it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, part: Tensor) -> Tensor:  # noqa: ANN401
        ctx.part, ctx.shape = part, weight.shape
        return weight.new_zeros(1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return ctx.part.expand(ctx.shape), None


class TiedStage(SleepingStage):
    """A stage that sleeps, and holds the tied weight.

    The weight gets its gradient at the end of the last backward. It is multiplied with something,
    so that a split backward can leave that to W.

    Attributes:
        tied: The weight, ``(num_rows, WIDTH)``.
        seen: Its first and last number, as the first forward of each step found them.
    """

    def __init__(self, seconds: Seconds, part: Tensor, num_microbatches: int) -> None:
        super().__init__(seconds)
        self.tied = nn.Parameter(torch.zeros(len(part), WIDTH))
        self.seen: list[tuple[float, float]] = []
        self._part = part
        self._num_microbatches = num_microbatches
        self._microbatch = 0

    def forward(self, x: Tensor) -> Tensor:
        if self._microbatch == 0:
            self.seen.append((self.tied[0, 0].item(), self.tied[-1, -1].item()))
        self._microbatch = (self._microbatch + 1) % self._num_microbatches
        if self._microbatch == 0:
            used = x[:, :1] @ _Use.apply(self.tied, self._part)  # type: ignore[no-untyped-call]
            x = x.clone()
            x[:, :1] += used
        return super().forward(x)


class Trainer:
    """Trains the pipeline in one way.

    Args:
        way: How gradients come together.
        schedule: One stage a rank.
        seconds: What a rank's computes take.
        batch: Of every step.
        num_rows: Of the tied weight.
        holders: The group of the two ranks that hold it.
    """

    def __init__(
        self,
        way: Way,
        *,
        schedule: Schedule,
        seconds: Seconds,
        batch: Batch,
        num_rows: int,
        holders: dist.ProcessGroup,
    ) -> None:
        rank = dist.get_rank()
        self._way, self._batch, self._holders, self._num_steps = way, batch, holders, 0
        self._stage = SleepingStage(seconds)
        if rank in PARTS:
            parts = [part_of(each, num_rows) for each in (PARTS if way.ties else [rank])]
            self._whole = torch.stack(parts).sum(0)
            own = part_of(rank, num_rows)
            self._stage = TiedStage(seconds, own, schedule.num_microbatches)
        self.scheduler = pipegrad.Scheduler(
            [pipegrad.Stage(self._stage, rank)],
            pipegrad.Topology.create(pipeline=RANKS),
            schedule=schedule,
            num_microbatches=schedule.num_microbatches,
            loss_fn=batch.loss,
            tied=[{FIRST: "tied", LAST: "tied"}],
            handlers=way.handlers,
        )
        groups = self.scheduler.sync.optimizer_parameters()
        self._optimizer = torch.optim.SGD(groups, lr=LEARNING_RATE)

    def step(self) -> None:
        """Makes a training step."""
        self.scheduler.step(self._batch.x, target=self._batch.target)
        if self._way.blocking and isinstance(self._stage, TiedStage):
            dist.all_reduce(self._stage.tied.grad, group=self._holders)
        self._optimizer.step()
        self.scheduler.sync.publish()
        self._optimizer.zero_grad()
        self._num_steps += 1

    def check(self) -> None:
        """Raises unless each step began with the weights that the one before left."""
        if self._way.ties:
            self.scheduler.sync.check_replicas()  # which waits for a weight that is on its way
        if isinstance(self._stage, TiedStage):
            each = -LEARNING_RATE * self._whole
            first, last = each[0].item(), each[-1].item()
            assert self._stage.seen == [(first * n, last * n) for n in range(self._num_steps)]
            assert bool((self._stage.tied == each * self._num_steps).all())


def time_in_turns(
    trainers: dict[str, Trainer], rounds: int, num_steps: int
) -> dict[str, list[float]]:
    """Returns the seconds of a step of each way, one a round: from one's start to the next's.

    A round begins at a barrier. Steps then follow one another, the first `LEAD_IN` not counted, so
    that what a step leaves to the next is in the time.
    """
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for trainer in trainers.values():
        for _ in range(WARM_UP):
            trainer.step()
        trainer.check()
    for _ in range(rounds):
        for name, trainer in trainers.items():
            dist.barrier()
            for _ in range(LEAD_IN):
                trainer.step()
            begin = time.perf_counter()
            for _ in range(num_steps):
                trainer.step()
            times[name].append((time.perf_counter() - begin) / num_steps)
            trainer.check()
    return times


def seconds_of(call: Callable[[], object]) -> float:
    """Returns what a call takes: a median."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def weight_seconds(num_rows: int) -> tuple[float, float]:
    """Returns what the tied weight costs this host in a step: its gradient, and its update."""
    stage = TiedStage(split_seconds(0, 0), part_of(LAST, num_rows), 1)
    stage.tied.grad, x = torch.zeros_like(stage.tied), torch.zeros(1, 1)
    optimizer = torch.optim.SGD([stage.tied], lr=LEARNING_RATE)

    def backward() -> None:
        optimizer.zero_grad(set_to_none=False)
        stage(x).backward()

    return seconds_of(backward), seconds_of(optimizer.step)


def measure(
    given: argparse.Namespace, schedule: Schedule, seconds: Seconds, holders: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Returns everything that is measured, in seconds, one record for each exchange."""
    batch = Batch(given.microbatches, given.kib)
    alone = compute_seconds(seconds, batch)
    hop = statistics.mean(hop_seconds(given.kib))
    kib_per_second = PROBE_KIB / statistics.mean(hop_seconds(PROBE_KIB))
    found = []
    for fraction in given.exchanges:
        kib = round(fraction * (RANKS - 1) * alone["B"] * kib_per_second)
        exchange = statistics.mean(hop_seconds(kib))
        cost = weight_seconds(kib * KIB // WIDTH) if dist.get_rank() == 0 else (0.0, 0.0)
        dist.barrier()
        trainers = {
            name: Trainer(
                WAYS[name],
                schedule=schedule,
                seconds=seconds,
                batch=batch,
                num_rows=kib * KIB // WIDTH,
                holders=holders,
            )
            for name in given.ways
        }
        times = time_in_turns(trainers, given.rounds, given.steps)
        for trainer in trainers.values():
            trainer.scheduler.close()
        record = {"kib": kib, "exchange": exchange, "cost": cost, "alone": alone, "hop": hop}
        found.append({**record, "times": times})
        if dist.get_rank() == 0:
            print_needs(found[-1])
    return found


def in_ms(*seconds: float) -> str:
    """Returns times in milliseconds."""
    return ", ".join(f"{1e3 * each:.1f}" for each in seconds)


def needs(record: dict[str, Any]) -> tuple[float, float]:
    """Returns what an exchange takes of the drain, and the weight's way back of its share of fill.

    OWNER costs nothing where neither is above 1. Where backward is split there are other windows.
    """
    alone: dict[Kind, float] = record["alone"]
    drain = (RANKS - 1) * alone["B"]
    fill = (RANKS - 1) * (alone["F"] + record["hop"])
    return record["exchange"] / drain, record["exchange"] / (SHARE * fill)


def print_needs(record: dict[str, Any]) -> None:
    """Prints what was measured beside the steps."""
    print(f"\nThe weight has {record['kib'] / 1024:.2f} MiB, ", end="")
    print(f"and takes {in_ms(record['exchange'])} ms. ", end="")
    print("To zero its gradient and add to it, and to update it: ", end="")
    print(f"{in_ms(*record['cost'])} ms. Median steps of ", end="")
    medians = {name: statistics.median(taken) for name, taken in record["times"].items()}
    print(", ".join(f"{name} {in_ms(each)}" for name, each in medians.items()), "ms", flush=True)


def print_table(found: list[dict[str, Any]], ways: Sequence[str], *, is_split: bool) -> None:
    """Prints the README's table."""
    alone = found[0]["alone"]
    print(f"\nAlone, a forward and a backward take {in_ms(alone['F'], alone['B'])} ms, ", end="")
    print(f"an activation {in_ms(found[0]['hop'])}.\n")
    columns = ["exchange, ms", "of the drain", "back, of its share of the fill", "fits"]
    columns += [f"{BASE}, ms", *(name for name in ways if name != BASE)]
    print("|", " | ".join(columns), "|")
    print("|---" * len(columns) + "|")
    for record in found:
        base = record["times"][BASE]
        drain, fill = needs(record)
        cells = [in_ms(record["exchange"]), *(["", "", ""] if is_split else [])]
        if not is_split:
            cells += [f"{drain:.2f}", f"{fill:.2f}", "yes" if max(drain, fill) <= 1 else "no"]
        cells.append(f"{1e3 * statistics.median(base):.0f}")
        for name in ways:
            if name != BASE:
                taken = record["times"][name]
                more = statistics.median(taken) - statistics.median(base)
                cells.append(f"{ratios(taken, base)} {1e3 * more:+.0f} ms")
        print("|", " | ".join(cells), "|", flush=True)


def arguments() -> argparse.Namespace:
    """Returns the command line's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exchanges", type=float, nargs="+", default=[0.3, 0.4, 0.5, 0.9, 1.2])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--schedule", default="1f1b", help="with one stage a rank")
    parser.add_argument("--head-w-first", action="store_true", help="an option of zb-h1")
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--forward-ms", type=float, default=10)
    parser.add_argument("--backward-ms", type=float, default=20)
    parser.add_argument("--weight-ms", type=float, default=0, help="what W can take of a backward")
    parser.add_argument("--kib", type=int, default=64, help="of an activation")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5, help="in a round, of each way")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if BASE not in given.ways:
        given.ways.insert(0, BASE)
    return given


def main() -> None:
    """Prints the README's table, on rank 0."""
    given = arguments()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    schedule = pipegrad.schedules.build(
        given.schedule,
        num_ranks=RANKS,
        num_microbatches=given.microbatches,
        **({"head_w_first": True} if given.head_w_first else {}),
    )
    milliseconds = given.forward_ms, given.backward_ms, given.weight_ms
    seconds = split_seconds(*(each / 1e3 for each in milliseconds))
    found = measure(given, schedule, seconds, dist.new_group([FIRST, LAST]))
    if dist.get_rank() == 0:
        print_table(found, given.ways, is_split=given.weight_ms > 0)
        if given.json:
            given.json.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
