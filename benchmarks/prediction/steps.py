"""Compares steps that `simulate` predicts with steps that four hosts take.

benchmarks/network/cluster.sh -r 1gbit benchmarks/prediction/steps.py [--rounds 8] [--json FILE]
benchmarks/prediction/steps.py --table FILE...
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipegrad
from pipegrad.observe.links import measure_hops
from pipegrad.schedules import Schedule

sys.path.insert(0, str(Path(__file__).parents[1] / "network"))
from stages import KIB, SleepingStage, split_seconds

RANKS, MICROBATCHES, KIB_SENT, TIED_KIB = 4, 16, 512, 2048
FORWARD, BACKWARD, WEIGHTS = 0.010, 0.020, 0.010
SLOW_RANK, SLOWER = 2, 1.5  # of unequal stages
EVERY = ("gpipe", "1f1b", "eager-1f1b", "hop-aware-1f1b", "interleaved-1f1b", "zb-h1", "zbv")


class Setting(NamedTuple):
    """What is run."""

    schedule: str
    kind: str  # "equal", "unequal", "tied: all-reduce", "tied: owner"


SETTINGS = [
    *(Setting(name, "equal") for name in EVERY),
    *(Setting(name, "unequal") for name in ("1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1")),
    *(Setting(name, "tied: all-reduce") for name in ("1f1b", "zb-h1")),
    *(Setting(name, "tied: owner") for name in ("1f1b", "eager-1f1b")),
]


class Tied(nn.Module):
    """A sleeping stage with a weight that the first and the last stage share."""

    def __init__(self, stage: SleepingStage) -> None:
        super().__init__()
        self.stage = stage
        self.table = nn.Parameter(torch.zeros(TIED_KIB * KIB))

    def forward(self, x: Tensor) -> Tensor:
        return self.stage(x + self.table[:1])


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Returns the mean loss of a microbatch; it looks at one column, so it takes no time."""
    return (output[:, 0] - target).square().mean()


class Run:
    """One setting on this rank: its Scheduler and its optimizer."""

    def __init__(
        self, setting: Setting, hops: tuple[float, ...], num_microbatches: int = MICROBATCHES
    ) -> None:
        options: dict[str, Any] = {}
        if setting.schedule == "hop-aware-1f1b":
            options = {"hop_seconds": hops, "compute_seconds": FORWARD + BACKWARD}
        schedule = pipegrad.schedules.build(
            setting.schedule, num_ranks=RANKS, num_microbatches=num_microbatches, **options
        )
        self.topology = pipegrad.Topology.create(
            pipeline=RANKS, stage_to_rank=schedule.stage_to_rank
        )
        is_tied = setting.kind.startswith("tied")
        ends = (0, len(schedule.stage_to_rank) - 1)
        modules: dict[int, nn.Module] = {}
        for stage in self.topology.local_stages:
            own = SleepingStage(seconds_of(setting, schedule, stage))
            modules[stage] = Tied(own) if is_tied and stage in ends else own
        placement = "owner" if setting.kind == "tied: owner" else "replicate"
        handler = {"name": "pipeline-shared", "placement": placement}
        self.scheduler = pipegrad.Scheduler(
            [pipegrad.Stage(module, index) for index, module in modules.items()],
            self.topology,
            schedule=schedule,
            num_microbatches=num_microbatches,
            loss_fn=loss,
            tied=[dict.fromkeys(ends, "table")] if is_tied else (),
            handlers=[handler] if is_tied else ["noop"],
        )
        self.optimizer = self.scheduler.optimizer(torch.optim.SGD, lr=1e-3)
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(num_microbatches, KIB_SENT * KIB, generator=generator)
        self.target = torch.randn(num_microbatches, generator=generator)

    def step(self) -> None:
        """Makes a step; the loss is read on every rank."""
        result = self.scheduler.step(self.x, target=self.target)
        self.optimizer.step()
        result.loss.item()
        self.optimizer.zero_grad()

    def costs(self) -> pipegrad.Costs:
        """Measures what the step takes, as a user would."""
        with pipegrad.record(self.scheduler, steps=2) as recording:
            for _ in range(3):
                self.step()
        return pipegrad.measure_costs(
            self.scheduler,
            self.x,
            target=self.target,
            optimizer=self.optimizer,
            timeline=recording.timeline(),
            repeats=9,
        )


def seconds_of(setting: Setting, schedule: Schedule, stage: int) -> Mapping[Any, float]:
    """Returns what a stage sleeps."""
    per_rank = len(schedule.stage_to_rank) // RANKS
    slower = SLOWER if setting.kind == "unequal" else 1.0
    share = (slower if schedule.stage_to_rank[stage] == SLOW_RANK else 1.0) / per_rank
    return split_seconds(*(share * s for s in (FORWARD, BACKWARD, WEIGHTS)))


def measured(runs: Mapping[Setting, Run], rounds: int) -> dict[Setting, list[float]]:
    """Returns the seconds of a step on the slowest rank: two steps a round, settings in turns.

    Of two steps from a barrier on, half is a step: what a step leaves to the next one counts too.
    """
    times: dict[Setting, list[float]] = {setting: [] for setting in runs}
    for repeat in range(rounds + 1):
        for setting, run in runs.items():
            dist.barrier()
            begin = time.perf_counter()
            run.step()
            run.step()
            if repeat > 0:
                times[setting].append((time.perf_counter() - begin) / 2)
    slowest = torch.tensor([*times.values()], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(times, slowest.tolist(), strict=True))


def predicted(run: Run, costs: pipegrad.Costs) -> float:
    """Returns the seconds of a step, of two that follow each other."""
    return sum(pipegrad.simulate(run.scheduler.program, costs, num_steps=2).step_seconds) / 2


def rows(rounds: int) -> Iterator[dict[str, Any]]:
    """Yields what was found for each setting."""
    topology = pipegrad.Topology.create(pipeline=RANKS)
    hops = measure_hops(topology, num_bytes=KIB_SENT * 1024)
    runs = {setting: Run(setting, hops) for setting in SETTINGS}
    costs = {setting: run.costs() for setting, run in runs.items()}
    times = measured(runs, rounds)
    for setting, run in runs.items():
        yield {
            "schedule": setting.schedule,
            "kind": setting.kind,
            "measured": times[setting],
            "predicted": predicted(run, costs[setting]),
            "costs": costs[setting].to_json(),
        }
    for run in runs.values():
        run.scheduler.close()


def print_table(files: list[Path]) -> None:
    """Prints the README's table, of the files of several networks."""
    tables = [json.loads(path.read_text()) for path in files]
    names = [table["network"] for table in tables]
    print(f"| stages | schedule | {' | '.join(f'{name}: ms, predicted' for name in names)} |")
    print(f"|---|---|{'---|' * len(names)}")
    errors: list[float] = []
    for found in zip(*(table["rows"] for table in tables), strict=True):
        cells = []
        for row in found:
            median = statistics.median(row["measured"])
            errors.append(row["predicted"] / median - 1)
            cells.append(f"{1e3 * median:.0f}, {errors[-1]:+.1%}")
        print(f"| {found[0]['kind']} | {found[0]['schedule']} | {' | '.join(cells)} |")
    off = sorted(map(abs, errors))
    print(f"\n{len(off)} settings: median error {statistics.median(off):.1%}, worst {off[-1]:.1%}")


def main() -> None:
    """Measures on the hosts of a cluster, or prints the table of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--network", default="1 Gbit/s", help="its name in the table")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, nargs="+")
    given = parser.parse_args()
    if given.table:
        print_table(given.table)
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    found = {"network": given.network, "rows": list(rows(given.rounds))}
    if dist.get_rank() == 0:
        for row in found["rows"]:
            median = statistics.median(row["measured"])
            print(
                f"{row['kind']:18} {row['schedule']:18} {1e3 * median:7.0f} ms, predicted "
                f"{1e3 * row['predicted']:7.0f}, {row['predicted'] / median - 1:+.1%}",
                flush=True,
            )
        if given.json:
            given.json.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
