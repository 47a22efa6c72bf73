"""choose: the fastest schedule within the limits, and the reasons against all others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipegrad import schedules
from pipegrad.errors import ScheduleError
from pipegrad.schedules import Schedule, ScheduleGenerator
from pipegrad.schedules.builtin.eager import EagerOneForwardOneBackward
from pipegrad.simulation.choose import Candidate, Choice, choose, merged_stages
from pipegrad.simulation.costs import Costs, Network, StageCosts
from tests.support.distributions import write_distribution

MIB = 2**20
STAGE = StageCosts(
    forward_seconds=0.01,
    backward_seconds=0.02,
    outputs={"x": MIB},
    activation_bytes=4 * MIB,
    parameter_bytes=16 * MIB,
)
SPLIT = replace(STAGE, weight_seconds=0.01, factor_bytes=2 * MIB)
FAST, SLOW = Network(nic_bytes_per_second=125e8), Network(nic_bytes_per_second=125e6)


def chosen(
    stage: StageCosts = STAGE, network: Network = FAST, num_stages: int = 4, **options: Any
) -> Choice:
    costs = Costs((stage,) * num_stages, network)
    return choose(**{"num_ranks": 4, "num_microbatches": 16, "costs": costs, **options})


def named(choice: Choice) -> dict[str, Candidate]:
    return {candidate.name: candidate for candidate in choice.candidates}


def test_where_the_network_costs_nothing_the_leanest_is_taken() -> None:
    choice = chosen(network=Network())
    assert choice.best.name == "1f1b"
    assert choice.schedule == schedules.build("1f1b", num_ranks=4, num_microbatches=16)
    # gpipe takes as long, and holds four times as much.
    assert named(choice)["gpipe"].step_seconds == pytest.approx(choice.best.step_seconds)
    for specs in (["gpipe", "eager-1f1b", "1f1b"], ["1f1b", "eager-1f1b", "gpipe"]):
        assert chosen(network=Network(), schedules=specs).best.name == "1f1b"
    some = chosen(schedules=["gpipe", {"name": "interleaved-1f1b", "stages_per_rank": 1}])
    assert [c.name for c in some.candidates] == ["interleaved-1f1b, stages_per_rank 1", "gpipe"]
    choice = chosen(num_stages=1, num_ranks=1, num_microbatches=1)
    assert choice.best.live_activations == (1,)
    # Of chunks of time the bubble and what a rank holds are shares of those of whole sequences.
    wanted: list[Any] = [{"name": "chunked-1f1b", "chunks": 4}, "1f1b"]
    chunked = chosen(network=Network(), schedules=wanted, max_live_activations=4).best
    assert chunked.name == "chunked-1f1b, chunks 4"
    assert chunked.bubble == pytest.approx(3 / 67)
    assert chunked.live_activations == (2, 2, 2, 1)
    nothing = choose(num_ranks=2, num_microbatches=1, costs=Costs((StageCosts(),) * 2))
    assert "chosen" in str(nothing)


def test_where_the_network_is_slow_transfers_are_hidden_and_where_weights_can_wait_split() -> None:
    choice = chosen(network=SLOW)
    assert choice.best.name == "eager-1f1b"
    assert choice.best.step_seconds < 0.8 * named(choice)["1f1b"].step_seconds
    choice = chosen(network=SLOW, max_live_activations=6)
    assert max(choice.best.live_activations) <= 6
    assert named(choice)["gpipe"].refused == "rank 0 holds 16 microbatches, the limit is 6"
    choice = chosen(SPLIT)
    assert choice.best.name == "zb-h1"
    assert choice.best.bubble < named(choice)["1f1b"].bubble


def test_where_weights_can_wait_and_the_network_is_slow_both_are_hidden() -> None:
    """Of four hosts of 1 Gbit/s, with activations of 1 MiB."""
    choice = chosen(SPLIT, SLOW)
    assert choice == chosen(SPLIT, SLOW)
    assert choice.best.name.startswith("hop-aware-zb-h1")
    assert choice.best.live_activations == (7, 7, 7, 7)
    others = named(choice)
    assert choice.best.step_seconds < 0.9 * others["eager-1f1b"].step_seconds
    assert choice.best.step_seconds < 0.85 * others["zb-h1"].step_seconds


@pytest.mark.parametrize("limit", [4, 5, 6, 7])
def test_within_a_limit_hops_get_what_is_left(limit: int) -> None:
    choice = chosen(SPLIT, SLOW, max_live_activations=limit, schedules=["hop-aware-zb-h1"])
    assert {max(c.live_activations) for c in choice.candidates} == {limit}
    plain = chosen(SPLIT, SLOW, schedules=["zb-h1"]).best.step_seconds
    assert (choice.best.step_seconds < plain) == (limit > 4)


def test_costs_of_more_stages_than_ranks_are_merged_and_virtual_stages_tried() -> None:
    halves = replace(STAGE, forward_seconds=0.005, backward_seconds=0.01, activation_bytes=2 * MIB)
    choice = chosen(halves, num_stages=8)
    assert choice.best.name == "interleaved-1f1b, stages_per_rank 2"
    whole = named(chosen(replace(STAGE, parameter_bytes=32 * MIB)))["1f1b"]
    assert named(choice)["1f1b"] == replace(whole, boundaries=(2, 4, 6))


def test_layers_are_cut_where_the_step_is_shortest_within_the_memory() -> None:
    """An embedding, nine blocks and a head that takes as long as three of them, over four ranks."""
    each = tuple(
        replace(STAGE, forward_seconds=0.01 * f, backward_seconds=0.02 * f, parameter_bytes=0)
        for f in (0.5, *[1.0] * 9, 3.0)
    )
    costs = Costs(each, Network())
    sizes: dict[str, Any] = {"num_ranks": 4, "num_microbatches": 8, "schedules": ["1f1b"]}
    choice = choose(costs=costs, **sizes)
    assert choice.best.boundaries == (4, 7, 10)
    assert choice.to_json()[0]["boundaries"] == [4, 7, 10]
    assert str(choice).splitlines()[2].split()[-4:] == ["4,", "7,", "10", "chosen"]
    # A rank holds 4 MiB a layer and microbatch: four of them on rank 0 are 64 MiB.
    tight = choose(costs=costs, memory_limit_bytes=56 * MIB, **sizes).best
    assert tight.boundaries == (3, 6, 10)
    assert tight.peak_bytes <= 56 * MIB < choice.best.peak_bytes
    # Values of several names are one.
    mixed = tuple(replace(own, outputs={f"h{i}": MIB}) for i, own in enumerate(each))
    renamed = choose(costs=Costs(mixed, Network()), **sizes).best
    assert renamed == choice.best


def test_a_merged_stage_is_the_sum_of_its_parts_and_hands_on_what_the_last_does() -> None:
    last = replace(STAGE, outputs={"y": 3}, weight_seconds=0.005)
    assert merged_stages([STAGE, last]) == StageCosts(
        forward_seconds=0.02,
        backward_seconds=0.04,
        weight_seconds=0.005,
        activation_bytes=8 * MIB,
        parameter_bytes=32 * MIB,
        outputs={"y": 3},
    )


def test_a_memory_limit_refuses_what_holds_more() -> None:
    unlimited = chosen(network=SLOW)
    limit = unlimited.best.peak_bytes - 1
    choice = chosen(network=SLOW, memory_limit_bytes=limit)
    assert choice.best.name == "1f1b"
    assert choice.best.peak_bytes <= limit
    assert "rank 1 holds" in named(choice)["eager-1f1b"].refused
    assert f"the limit is {limit / MIB:.1f} MiB" in named(choice)["eager-1f1b"].refused


@pytest.mark.parametrize(
    ("limit", "name", "held"), [(4, "zbv", 8), (3, "v-half", 6), (2, "v-min", 4)]
)
def test_the_less_memory_there_is_the_less_a_v_holds(limit: int, name: str, held: int) -> None:
    """Of half stages, twice as many; each limit has a schedule, and 1f1b would hold 4."""
    half = StageCosts(
        forward_seconds=0.005,
        backward_seconds=0.01,
        weight_seconds=0.005,
        outputs={"x": 1024},
        activation_bytes=20 * MIB,
    )
    most = chosen(half, num_stages=8, max_live_activations=limit)
    assert (most.best.name, most.best.live_activations) == (name, (held,) * 4)
    in_bytes = chosen(half, num_stages=8, memory_limit_bytes=most.best.peak_bytes)
    assert in_bytes.best == most.best


def test_every_candidate_that_is_refused_says_why() -> None:
    refused = {c.name: c.refused for c in chosen(num_microbatches=15).candidates if c.refused}
    assert refused == {
        "interleaved-1f1b, stages_per_rank 1": "interleaved-1f1b takes a multiple of 4 "
        "microbatches over 4 ranks, found 15; the nearest is 16",
        **dict.fromkeys(
            ["zb-h1", "hop-aware-zb-h1, threshold 0.0"],
            "it splits backwards: weight_seconds of the costs are 0",
        ),
        **dict.fromkeys(
            ["zbv", "v-half", "v-min"],
            "it has 8 stages, and costs are of 4: give costs of as many, or of more",
        ),
    }


class Theirs(EagerOneForwardOneBackward):
    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        made = super().generate(num_ranks=num_ranks, num_microbatches=num_microbatches)
        return replace(made, name="theirs")


class Needy(ScheduleGenerator):
    def __init__(self, *, depth: int) -> None: ...

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        raise NotImplementedError


def test_plug_ins_are_candidates_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"a-theirs": f"{__name__}:Theirs", "needy": f"{__name__}:Needy"}
    write_distribution(tmp_path, "theirs", entry_points=points, group=schedules.registry.group)
    monkeypatch.syspath_prepend(tmp_path)
    choice = chosen(network=SLOW)
    # It is eager-1f1b, under a name that comes first.
    assert choice.best.name == "a-theirs"
    assert choice.schedule.name == "theirs"
    assert "needs the option 'depth'" in named(choice)["needy"].refused


def test_the_table_shows_the_chosen_one_first_and_reasons_for_the_rest() -> None:
    choice = chosen(network=SLOW)
    head, _, first, *rest = str(choice).splitlines()
    assert head.split() == ["schedule", "step", "bubble", "peak", "MiB", "activations", "why"]
    assert first.split()[0] == "eager-1f1b"
    assert first.endswith("chosen")
    assert len(rest) == len(choice.candidates) - 1
    assert sum("chosen" in line for line in rest) == 0
    assert [entry["name"] for entry in choice.to_json()] == [c.name for c in choice.candidates]


def test_if_nothing_fits_the_reasons_are_told() -> None:
    with pytest.raises(ScheduleError, match="max_live_activations is 2, and zb-h1 itself holds 3"):
        chosen(SPLIT, SLOW, num_microbatches=3, max_live_activations=2.5)
    with pytest.raises(ScheduleError, match=r"no schedule fits:\n  1f1b: rank 1 holds .* MiB, "):
        chosen(memory_limit_bytes=MIB, schedules=["1f1b"])


@pytest.mark.parametrize(
    ("num_stages", "options"),
    [(3, {}), (0, {}), (4, {"num_ranks": 0}), (4, {"num_microbatches": 0})],
)
def test_costs_of_other_stages_are_refused(num_stages: int, options: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError, match=f"there are costs of {num_stages} stages, for"):
        chosen(num_stages=num_stages, **options)
