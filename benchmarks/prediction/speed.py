"""Times how long simulating large Programs takes, in seconds of the processor.

python benchmarks/prediction/speed.py
"""

import time
from itertools import pairwise

import pipegrad
from pipegrad.simulation.costs import Costs, Network, StageCosts

SIZES = ((64, 1600), (512, 200), (4096, 24))  # ranks and microbatches: a million items each


def main() -> None:
    """Prints a row of the README's table for each size."""
    print("| ranks | microbatches | items | lower | simulate | with a timeline |")
    print("|---|---|---|---|---|---|")
    for num_ranks, num_microbatches in SIZES:
        schedule = pipegrad.schedules.build(
            "1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches
        )
        stage = StageCosts(0.010, 0.020, outputs={"x": 2**17}, activation_bytes=2**20)
        costs = Costs((stage,) * num_ranks, Network(125e6, 1e-4))
        stamps = [time.process_time()]
        program = pipegrad.schedules.lower(schedule)
        stamps.append(time.process_time())
        pipegrad.simulate(program, costs, records=False)
        stamps.append(time.process_time())
        pipegrad.simulate(program, costs)
        stamps.append(time.process_time())
        seconds = [f"{b - a:.1f} s" for a, b in pairwise(stamps)]
        print(
            f"| {num_ranks} | {num_microbatches} | {program.num_items:,} | {' | '.join(seconds)} |"
        )


if __name__ == "__main__":
    main()
