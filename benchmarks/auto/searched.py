"""Simulates cuts: is the search near the best of all, how long is it, and does half a head pay?

python benchmarks/auto/searched.py
"""

import random
import time
from dataclasses import replace
from functools import partial
from unittest.mock import patch

from pipegrad.schedules import build, lower
from pipegrad.schedules.program.program import Program
from pipegrad.simulation import fastest_cut as searched
from pipegrad.simulation.choose import cut_at
from pipegrad.simulation.costs import Costs, Network, StageCosts
from pipegrad.simulation.fastest_cut import Begins, balanced_seconds, fastest_cut
from pipegrad.simulation.simulator import simulate

SCHEDULES = ["1f1b", "eager-1f1b", "zb-h1", "interleaved-1f1b", "zbv"]
CASES = 40


def layer(seconds: float, kib: int) -> StageCosts:
    """Returns a layer with a forward of so many seconds, and a backward of twice as many."""
    return StageCosts(seconds, 2 * seconds, 0.9 * seconds, outputs={"x": 1024 * kib})


def even(costs: Costs, program: Program) -> Begins:
    """Returns the cut that is even in serial time."""
    seconds = (own.forward_seconds for own in costs.stages)
    return balanced_seconds(seconds, len(program.schedule.stage_to_rank))


def step(program: Program, costs: Costs, cut: Begins) -> float:
    """Returns the seconds of a simulated step."""
    return simulate(program, cut_at(costs, cut), records=False).step_seconds[0]


def found(program: Program, costs: Costs) -> float:
    """Returns the seconds of a step of the cut that is found."""
    begin = even(costs, program)
    at = partial(cut_at, costs)
    return step(program, costs, fastest_cut(program, at, len(costs.stages), [begin]))


def near() -> None:
    """Compares cuts of low floors, and the even cut, with the best of all cuts."""
    draw, off, base = random.Random(5), [], []
    for _ in range(CASES):
        ranks, name = draw.choice([3, 4]), draw.choice(SCHEDULES)
        program = lower(build(name, num_ranks=ranks, num_microbatches=9 if ranks == 3 else 8))
        each = tuple(
            layer(0.001 * draw.randint(1, 9), 256 * draw.randint(1, 8))
            for _ in range(draw.randint(13, 16))
        )
        costs = Costs(each, Network(draw.choice([125e6, 250e6, 1e12])))
        with patch.object(searched, "_ALL_TRIED", 10**6):
            best = found(program, costs)
        with patch.object(searched, "_ALL_TRIED", 0):
            off.append(found(program, costs) / best - 1)
        base.append(step(program, costs, even(costs, program)) / best - 1)
    within = sum(own <= 0.0051 for own in off)
    print(f"within 0.5 % in {within} of {CASES}, worst {max(off):.1%}; even cut {max(base):.1%}")


def hundred() -> None:
    """Times the search for 100 layers over 16 stages."""
    draw = random.Random(0)
    each = tuple(layer(0.001 * draw.randint(1, 9), 256 * draw.randint(1, 8)) for _ in range(100))
    costs = Costs(each, Network(125e6))
    for name in ("1f1b", "zb-h1"):
        program = lower(build(name, num_ranks=16, num_microbatches=64))
        begin = time.process_time()
        new = found(program, costs)
        seconds = time.process_time() - begin
        saved = 1 - new / step(program, costs, even(costs, program))
        print(f"{name}: {seconds:.1f} s, saves {saved:.1%}")


def heads() -> None:
    """Compares half of a head on each of the last two ranks with a whole one on the last."""
    ranks, kib, network = 8, 1024, Network(125e6, 1e-4)
    base = (layer(0.006, kib), *[layer(0.012, kib)] * 24)
    for name in ("1f1b", "zb-h1"):
        program = lower(build(name, num_ranks=ranks, num_microbatches=32))
        for size in (1.0, 2.5, 5.0, 8.0):
            whole = found(program, Costs((*base, layer(0.012 * size, kib)), network))
            half, blocks = layer(0.006 * size, kib), Costs(base, network)

            def at(cut: Begins, half: StageCosts = half, blocks: Costs = blocks) -> Costs:
                stages = list(cut_at(blocks, cut).stages)
                for stage in (ranks - 2, ranks - 1):
                    own = stages[stage]
                    stages[stage] = replace(
                        own,
                        forward_seconds=own.forward_seconds + half.forward_seconds,
                        backward_seconds=own.backward_seconds + half.backward_seconds,
                        weight_seconds=own.weight_seconds + half.weight_seconds,
                    )
                # What the last rank hands back to the other one goes the same way as a gradient.
                stages[ranks - 2] = replace(stages[ranks - 2], outputs={"x": 2 * 1024 * kib})
                return replace(blocks, stages=tuple(stages))

            cut = fastest_cut(program, at, len(base), [even(blocks, program)])
            cut_head = simulate(program, at(cut), records=False).step_seconds[0]
            print(f"{name}, a head of {size} layers: {1 - cut_head / whole:+.1%}")


if __name__ == "__main__":
    near()
    hundred()
    heads()
