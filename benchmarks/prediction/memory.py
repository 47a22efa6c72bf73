"""Compares the peak memory of each rank that `simulate` predicts with what it really allocates.

torchrun --nproc-per-node 4 benchmarks/prediction/memory.py [--rows 512]
"""

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import profile, record_function

import pipegrad

RANKS, MICROBATCHES, WIDTH, LAYERS = 4, 8, 512, 8
NAMES = (
    *("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1", "zbv"),
    *("v-half", "v-min"),
)
STEPS = 3


def block(num_layers: int) -> nn.Module:
    """Returns layers whose activations are held."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(num_layers)]
    return nn.Sequential(*layers)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Returns the mean loss of a microbatch."""
    return nn.functional.mse_loss(output, target)


def peaks(name: str, rows: int) -> tuple[int, int, float]:
    """Returns the predicted and the measured peak of this rank, in bytes, and what is alive.

    That is the most microbatches whose activations the rank holds, in stages as large as a rank.
    """
    schedule = pipegrad.schedules.build(name, num_ranks=RANKS, num_microbatches=MICROBATCHES)
    topology = pipegrad.Topology.create(pipeline=RANKS, stage_to_rank=schedule.stage_to_rank)
    torch.manual_seed(0)  # ranks of a pipeline train on one batch
    x = torch.randn(MICROBATCHES * rows, WIDTH)
    with profile(profile_memory=True) as profiler:
        per_rank = len(schedule.stage_to_rank) // RANKS
        scheduler = pipegrad.Scheduler(
            [pipegrad.Stage(block(LAYERS // per_rank), i) for i in topology.local_stages],
            topology,
            schedule=schedule,
            num_microbatches=MICROBATCHES,
            loss_fn=loss,
        )
        optimizer = scheduler.optimizer(torch.optim.Adam, lr=1e-3)
        for step in range(STEPS):
            with record_function(f"step {step}"):
                scheduler.step(x, target=x)
                optimizer.step()
                optimizer.zero_grad()
    costs = pipegrad.measure_costs(scheduler, x, target=x, optimizer=optimizer, links=False)
    predicted = pipegrad.simulate(scheduler.program, costs, records=False).peak_bytes
    rank = topology.coordinate("pp")
    alive = pipegrad.schedules.verify(scheduler.program).live_activations[rank] / per_rank
    scheduler.close()
    return predicted[rank], peak_of(profiler, f"step {STEPS - 1}"), alive


def peak_of(profiler: profile, name: str) -> int:
    """Returns the most bytes that were allocated at a time while `name` ran."""
    assert profiler.profiler is not None
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    begin, end = next(
        (e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == name
    )
    held = peak = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            if begin <= event.start_ns() <= end:
                peak = max(peak, held)
    return peak


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64, help="of a microbatch")
    rows = parser.parse_args().rows
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    worst = 0.0
    if dist.get_rank() == 0:
        print("| schedule | alive | for each rank: measured MiB, predicted |\n|---|---|---|")
    for name in NAMES:
        found = torch.tensor(peaks(name, rows), dtype=torch.float64)
        every = [torch.zeros(3, dtype=torch.float64) for _ in range(RANKS)]
        dist.all_gather(every, found)
        cells = []
        for predicted, measured, _ in (each.tolist() for each in every):
            error = predicted / measured - 1
            worst = max(worst, abs(error))
            cells.append(f"{measured / 2**20:.1f}, {error:+.1%}")
        if dist.get_rank() == 0:
            alive = " · ".join(f"{each[2].item():g}" for each in every)
            print(f"| {name} | {alive} | {' · '.join(cells)} |", flush=True)
    if dist.get_rank() == 0:
        print(f"worst: {worst:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
