"""The cut of the shortest simulated step: compared with all cuts, and where it must lie."""

from __future__ import annotations

import random
from functools import partial
from itertools import combinations

import pytest

from pipegrad.schedules import build, lower
from pipegrad.schedules.program.program import Program
from pipegrad.simulation import fastest_cut as searched
from pipegrad.simulation.choose import chain_of, cut_at
from pipegrad.simulation.costs import CollectiveCosts, Costs, LinkCosts, Network, StageCosts
from pipegrad.simulation.fastest_cut import EQUAL, Begins, balanced_seconds, fastest_cut
from pipegrad.simulation.simulator import simulate

MIB = 2**20
FAST = Network()


def layers(*factors: float, kib: int = 0) -> tuple[StageCosts, ...]:
    """Returns layers that take as many times 30 ms, and each sends as much."""
    return tuple(
        StageCosts(0.01 * f, 0.02 * f, 0.01 * f, activation_bytes=MIB, outputs={"x": kib * 2**10})
        for f in factors
    )


def program_of(name: str, num_ranks: int, number: int = 8, **options: int) -> Program:
    return lower(build(name, num_ranks=num_ranks, num_microbatches=number, **options))


def even(costs: Costs, num_stages: int) -> Begins:
    seconds = (own.forward_seconds + own.backward_seconds for own in costs.stages)
    return balanced_seconds(seconds, num_stages)


def found(name: str, num_ranks: int, costs: Costs, limit: float | None = None) -> Begins:
    program = program_of(name, num_ranks)
    begin = even(costs, len(program.schedule.stage_to_rank))
    number = len(costs.stages)
    at = partial(cut_at, costs)
    return fastest_cut(program, at, number, [begin], memory_limit_bytes=limit)


def random_case(seed: int, most: int) -> tuple[Program, Costs]:
    """Returns a schedule, layers of random times and sizes, and links of random rates."""
    draw = random.Random(seed)
    num_ranks = draw.choice([2, 3, 4])
    name = draw.choice(["gpipe", "1f1b", "eager-1f1b", "zb-h1", "interleaved-1f1b", "zbv"])
    program = program_of(name, num_ranks, 9 if num_ranks == 3 else 8)
    if seed > 5:
        program = program_of(("chunked-1f1b", "chunked-zb-h1")[seed % 2], num_ranks, 3, chunks=4)
    each = tuple(
        StageCosts(
            (forward := 0.001 * draw.randint(1, 9)),
            2 * forward,
            0.9 * forward,
            optimizer_seconds=0.001 * draw.randint(0, 3),
            activation_bytes=draw.randint(1, 4) * MIB,
            outputs={"x": 2**18 * draw.randint(1, 8)},
        )
        for _ in range(draw.randint(max(8, len(program.schedule.stage_to_rank)), most))
    )
    rate = draw.choice([6e7, 125e6, 5e8])
    return program, Costs(each, Network(rate, links=(LinkCosts(0, 1, 0.002, rate / 2),)))


def seconds_of(program: Program, costs: Costs, cut: Begins) -> float:
    return simulate(program, cut_at(costs, cut), records=False).step_seconds[0]


def all_seconds(program: Program, costs: Costs) -> dict[Begins, float]:
    num_begins = len(program.schedule.stage_to_rank) - 1
    cuts = combinations(range(1, len(costs.stages)), num_begins)
    return {cut: seconds_of(program, costs, cut) for cut in cuts}


@pytest.mark.parametrize("seed", range(8))
def test_of_few_cuts_it_is_the_best_and_no_step_is_below_its_floor(seed: int) -> None:
    program, costs = random_case(seed, 12)
    seconds, at = all_seconds(program, costs), partial(cut_at, costs)
    begin = even(costs, len(program.schedule.stage_to_rank))

    cut = fastest_cut(program, at, len(costs.stages), [begin])

    assert seconds[cut] <= min(seconds.values()) * (1 + EQUAL)
    own = costs.of_chunks(program.schedule.chunks)
    floors = searched._Floor(program, 1).seconds([cut_at(own, begins) for begins in seconds])
    for floor, taken in zip(floors, seconds.values(), strict=True):
        assert floor <= taken * (1 + 1e-9)


def test_of_many_cuts_it_is_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [random_case(seed, 12) for seed in range(6)]
    off = list[float]()
    monkeypatch.setattr(searched, "_ALL_TRIED", 0)
    for program, costs in cases:
        begin = even(costs, len(program.schedule.stage_to_rank))
        cut = fastest_cut(program, partial(cut_at, costs), len(costs.stages), [begin])
        off.append(seconds_of(program, costs, cut) / min(all_seconds(program, costs).values()) - 1)
    assert max(off) <= 0.02


def test_where_links_take_no_time_equal_layers_stay_even() -> None:
    costs = Costs(layers(*[1.0] * 12), FAST)
    for name in ("1f1b", "zb-h1", "gpipe"):
        assert found(name, 4, costs) == (3, 6, 9)


def test_a_memory_limit_moves_layers_to_where_fewer_microbatches_are_held() -> None:
    """Of 1f1b rank 0 holds four microbatches, rank 3 one."""
    costs = Costs(layers(*[1.0] * 8), FAST)
    assert found("1f1b", 4, costs) == (2, 4, 6)
    cut = found("1f1b", 4, costs, limit=6 * MIB)
    peaks = simulate(program_of("1f1b", 4), cut_at(costs, cut)).peak_bytes
    assert max(peaks) <= 6 * MIB
    assert cut == (1, 3, 6)
    # If nothing fits, it is what holds least.
    assert (
        max(simulate(program_of("1f1b", 4), cut_at(costs, found("1f1b", 4, costs, 1))).peak_bytes)
        == 4 * MIB
    )


def test_a_tie_that_is_reduced_at_the_end_counts() -> None:
    """The reduction starts with the last backward of the first stage, however it is cut."""
    costs = Costs(
        layers(*[1.0] * 8), FAST, {"tied": CollectiveCosts(1, seconds=0.1, stages=(0, 3))}
    )
    schedule = build("zb-h1", num_ranks=4, num_microbatches=8)
    program = lower(schedule, links=chain_of(cut_at(costs, (2, 4, 6))))
    cut = fastest_cut(program, partial(cut_at, costs), 8, [(2, 4, 6)])
    every = all_seconds(program, costs)
    assert every[cut] <= min(every.values()) * (1 + EQUAL)


def test_rounding_decides_nothing() -> None:
    """Sums of 0.1 differ in their last digits, whichever layers are added."""
    assert balanced_seconds([0.1] * 9, 3) == (3, 6)
    assert balanced_seconds([0.1, 0.2, 0.3] * 4, 4) == (3, 6, 9)
    costs = Costs(tuple(StageCosts(0.1, 0.2) for _ in range(9)), FAST)
    assert found("1f1b", 3, costs) == (3, 6)


def test_a_hundred_layers_over_sixteen_ranks() -> None:
    draw = random.Random(0)
    each = layers(*(draw.choice([1.0, 1.2, 2.0]) for _ in range(100)), kib=1024)
    costs = Costs(each, Network(6e7))
    program = program_of("1f1b", 16, 32)
    begin = even(costs, 16)
    cut = fastest_cut(program, partial(cut_at, costs), 100, [begin])
    assert seconds_of(program, costs, cut) < 0.99 * seconds_of(program, costs, begin)
