"""Draws predicted over measured steps of four hosts, for the README and the docs.

benchmarks/network/cluster.sh -r 1gbit benchmarks/prediction/pictures.py docs/pictures
"""

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from steps import Run, Setting

import pipegrad
from pipegrad.picture import write_figure

NAMES = ("1f1b", "eager-1f1b", "zbv")
MICROBATCHES = 6


def main() -> None:
    """Writes a figure for each schedule, on rank 0."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    for name in NAMES:
        run = Run(Setting(name, "equal"), (), num_microbatches=MICROBATCHES)
        for _ in range(2):
            run.step()
        with pipegrad.record(run.scheduler, steps=3) as recording:
            for _ in range(3):
                dist.barrier()
                run.step()
        measured = recording.timeline()
        costs = run.costs()
        predicted = pipegrad.simulate(run.scheduler.program, costs).timeline
        assert predicted is not None
        # The step of median time is drawn.
        steps = sorted((measured.of_step(i) for i in range(3)), key=lambda step: step.seconds)
        both = [replace(t, name=name) for t in (predicted, steps[1])]
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            write_figure(both, folder / f"{name}.svg", title=name)
            print(f"{name}: {predicted.seconds:.3f} s predicted, {steps[1].seconds:.3f} measured")
        run.scheduler.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
