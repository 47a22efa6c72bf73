"""Times steps of a pipeline of four hosts while its hops become slow and fast again.

benchmarks/network/cluster.sh benchmarks/adaptive/adaptive.py [--rounds 3] [--json FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import pipegrad

sys.path.insert(0, str(Path(__file__).parents[1] / "network"))
from stages import Batch, SleepingStage, compute_seconds, hop_seconds, split_seconds

RANKS, MICROBATCHES, KIB = 4, 16, 128
SECONDS = split_seconds(0.020, 0.040)
LIMIT = 10  # activations that rank 0 may hold
FAST = 1000  # Mbit/s of every hop
MEASURED = {FAST: 0, 40: 0, 20: 0}  # the rates that scenarios have
Phase = tuple[int, dict[int, int]]  # a number of steps, and the rates of hops that are not fast
SCENARIOS: dict[str, list[Phase]] = {
    "one slow hop": [(4, {}), (6, {1: 20}), (6, {})],
    "alternating": [(4, {}), (5, {0: 40}), (5, {1: 40}), (5, {2: 40}), (5, {})],
    "all hops": [(4, {}), (6, {0: 40, 1: 40, 2: 40}), (6, {})],
}
WAYS = ("1f1b", "hop-aware-1f1b", "adaptive-1f1b")


class Links:
    """What this host may send to its neighbours; each has a class of its own beside the NIC's."""

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._neighbours = [r for r in (self._rank - 1, self._rank + 1) if 0 <= r < RANKS]
        for number, peer in enumerate(self._neighbours, start=2):
            self._class("add", number, FAST)
            address = f"10.88.0.{100 + peer}/32"
            match = f"parent 1: protocol ip u32 match ip dst {address} flowid 1:{number}"
            _tc(f"filter add dev eth0 {match}")

    def set(self, rates: dict[int, int]) -> None:
        """Gives hops their rates, in Mbit/s; all others are fast."""
        for number, peer in enumerate(self._neighbours, start=2):
            self._class("change", number, rates.get(min(self._rank, peer), FAST))

    def _class(self, verb: str, number: int, rate: int) -> None:
        size = "burst 16kb quantum 60000"
        _tc(f"class {verb} dev eth0 parent 1: classid 1:{number} htb rate {rate}mbit {size}")


def _tc(arguments: str) -> None:
    subprocess.run(["tc", *arguments.split()], check=True)


def measured_hops(links: Links) -> dict[int, float]:
    """Returns what a message takes at each rate: the mean of all hops, between idle hosts."""
    seconds = {}
    for rate in MEASURED:
        links.set(dict.fromkeys(range(RANKS - 1), rate))
        dist.barrier()
        seconds[rate] = statistics.mean(hop_seconds(KIB))
    links.set({})
    return seconds


def bound(compute: float, hops: dict[int, float], rates: dict[int, int]) -> float:
    """Returns what no schedule with one stage a rank can beat, if no hop is always busy."""
    each = [hops[rates.get(hop, FAST)] for hop in range(RANKS - 1)]
    return (MICROBATCHES + RANKS - 1) * compute + 2 * sum(each)


def run(way: str, phases: list[Phase], links: Links, batch: Batch) -> list[tuple[float, int]]:
    """Returns the seconds of each step on the slowest rank, and what rank 0 held at most."""
    topology = pipegrad.Topology.create(pipeline=RANKS)
    module = SleepingStage(SECONDS)
    spec = {"name": way, "max_live_activations": LIMIT} if way == "adaptive-1f1b" else way
    scheduler = pipegrad.Scheduler(
        [pipegrad.Stage(module, dist.get_rank())],
        topology,
        schedule=spec,
        num_microbatches=MICROBATCHES,
        loss_fn=batch.loss,
        handlers=["noop"],
    )
    steps = []
    middle = (MICROBATCHES + RANKS) * sum(SECONDS[kind] for kind in ("F", "B")) / 2
    following = [rates for _, rates in phases[1:]] + [None]
    for (number, _), after in zip(phases, following, strict=True):
        for step in range(number):
            dist.barrier()
            if step == number - 1 and after is not None:
                threading.Timer(middle, links.set, [after]).start()
            begin = time.perf_counter()
            scheduler.step(batch.x, target=batch.target)
            seconds = time.perf_counter() - begin
            batch.check(module)
            steps.append((seconds, scheduler.proof.live_activations[0]))
    scheduler.close()
    slowest = torch.tensor(steps, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    links.set({})
    return [(seconds, int(held)) for seconds, held in slowest.tolist()]


def main() -> None:
    """Prints the README's tables, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scenario", choices=[*SCENARIOS], nargs="*", default=[*SCENARIOS])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    batch, links = Batch(MICROBATCHES, KIB), Links()
    alone, hops = compute_seconds(SECONDS, batch), measured_hops(links)
    compute = alone["F"] + alone["B"]
    if dist.get_rank() == 0:
        told = ", ".join(f"{1e3 * s:.1f} at {rate} Mbit/s" for rate, s in hops.items())
        print(f"A forward and a backward take {1e3 * compute:.1f} ms, a message {told}")
    found = {}
    for scenario in given.scenario:
        phases = SCENARIOS[scenario]
        # Ways take turns, so that what else the machine does meets all of them.
        times = [{way: run(way, phases, links, batch) for way in WAYS} for _ in range(given.rounds)]
        found[scenario] = times
        if dist.get_rank() == 0:
            report(scenario, phases, times, compute, hops)
    if dist.get_rank() == 0 and given.json:
        given.json.write_text(json.dumps({"compute": compute, "hops": hops, "steps": found}))
    dist.destroy_process_group()


def report(
    scenario: str,
    phases: list[Phase],
    times: list[dict[str, list[tuple[float, int]]]],
    compute: float,
    hops: dict[int, float],
) -> None:
    """Prints for each phase how much steps take over the bound, by steps since the change."""
    print(f"\n### {scenario}\n")
    print("| slow hops | way | 1 later | 2 later | all after that | rank 0 holds |")
    print("|---|---|---|---|---|---|")
    first = phases[0][0]
    for number, rates in phases[1:]:
        least = bound(compute, hops, rates)
        for way in WAYS:
            rounds = [each[way][first : first + number] for each in times]
            columns = [
                [steps[0][0] for steps in rounds],
                [steps[1][0] for steps in rounds],
                # The rate changes in the middle of the last step.
                [seconds for steps in rounds for seconds, _ in steps[2:-1]],
            ]
            over = " | ".join(f"{statistics.median(c) / least - 1:+.1%}" for c in columns)
            held = max(steps[-1][1] for steps in rounds)
            print(f"| {[*rates] or 'none'} | {way} | {over} | {held} |", flush=True)
        first += number


if __name__ == "__main__":
    main()
