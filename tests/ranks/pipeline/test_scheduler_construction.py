"""What does not fit together is refused by the constructor, on all ranks alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipegrad import Scheduler, Stage, Topology
from pipegrad.schedules import Schedule
from tests.support.gradients.cases import Case, Replies, on, outcome, rank, replies
from tests.support.pipeline.scales import NUM_MICROBATCHES, NUM_STAGES, SECONDS, Scale, chain, told
from tests.support.schedules.programs import rows

PIPELINE: list[Case] = []
pipeline = replies(4, PIPELINE)


def schedule(*texts: str, num_microbatches: int = 1) -> Schedule:
    return rows(*texts, stages=(0, 1, 2, 3), num_microbatches=num_microbatches)


CYCLE = schedule(
    "0F0 0B0 0F1 0B1",
    "1F0 1F1 1B0 1B1",
    "2F0 2F1 2B0 2B1",
    "3F0 3F1 3B0 3B1",
    num_microbatches=2,
)
WRONG: dict[str, tuple[Schedule, list[str], list[str]]] = {  # what is said, what is marked
    "cycle": (
        CYCLE,
        ["cannot go on: ranks and the actions whose inputs never come"],
        [">0B0<", ">1F1<"],
    ),
    "missing backward": (
        schedule("0F0 0B0", "1F0 1B0", "2F0", "3F0 3B0"),
        ["is not complete", "stage 2 microbatch 0 has ['F']"],
        [">2F0<"],
    ),
    "doubled": (
        schedule("0F0 0B0", "1F0 1B0 1B0", "2F0 2B0", "3F0 3B0"),
        ["is not complete", "1B0 2 times"],
        [">1B0<"],
    ),
    "backward first": (
        schedule("0F0 0B0", "1F0 1B0", "2F0 2B0", "3B0 3F0"),
        ["cannot go on: ranks and the actions whose inputs never come", "3: '3B0'"],
        [">3B0<"],
    ),
    "elsewhere": (
        schedule("0F0 0B0 1F0", "1B0", "2F0 2B0", "3F0 3B0"),
        ["is not complete", "1F0 on rank 0"],
        [">1F0<"],
    ),
}


class Wrapped(DistributedDataParallel):
    """Makes no groups, and runs nothing."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


class Refusals:
    """Constructs what is refused; counts process groups that were made for it."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def __call__(self, *stages: Stage, **options: Any) -> tuple[str, int, bool]:
        own = self.topology.coordinate("pp")
        given = list(stages) or [Stage(Scale(own), own)]
        options = {"schedule": "1f1b", "handlers": ["noop"], **options}
        if not isinstance(options["schedule"], Schedule):
            options = {"num_microbatches": NUM_MICROBATCHES, **options}
        began = time.monotonic()
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
            said = outcome(partial(Scheduler, given, self.topology, **options))
        return said, made.call_count, time.monotonic() - began < SECONDS


@on(PIPELINE)
def constructions() -> Any:
    here = rank()
    refused = Refusals(Topology.create(pipeline=NUM_STAGES))

    def stage(inputs: Sequence[str] = ("x",), outputs: Sequence[str] = ("x",)) -> Stage:
        return Stage(Scale(here), here, inputs, outputs)

    def special(at: int, special: Stage) -> tuple[Stage, ...]:
        return (special,) if here == at else ()

    other_stage = (here + 1) % NUM_STAGES
    found = {
        "misplaced": refused(Stage(Scale(other_stage), other_stage)),
        "one misplaced": refused(*special(1, Stage(Scale(2), 2))),
        "doubled stage": refused(stage(), stage()),
        "schedules": refused(schedule="1f1b" if here else "gpipe"),
        "num_microbatches": refused(num_microbatches=4 + (here == 2)),
        "no num_microbatches": refused(num_microbatches=None),
        "depth": refused(depth=2 + (here == 3)),
        "unknown schedule": refused(schedule="2f2b"),
        "other size": refused(schedule=rows("0F0 0B0", "1F0 1B0")),
        "no edge": refused(stage(["xyyx"[here]], ["xyxx"[here]])),
        "doubled input": refused(*special(2, stage(["x", "x"]))),
        "doubled output": refused(*special(1, stage(["x"], ["x", "x"]))),
        "no input": refused(*special(1, stage([]))),
        "wrapped": refused(*special(1, Stage(Wrapped(Scale(1)), 1))),
        "wrapped inside": refused(*special(2, Stage(nn.Sequential(Wrapped(Scale(2))), 2))),
        "wasted": refused(*special(1, stage(["x"], ["x", "side"]))),
        **{name: refused(schedule=wrong) for name, (wrong, _, _) in WRONG.items()},
    }
    return found, chain().is_right()


REFUSED = {
    "misplaced": ["rank 1: TopologyError: schedule '1f1b' places stages [1] on this rank", "[2]"],
    "one misplaced": ["rank 1: TopologyError: schedule '1f1b' places stages [1] on this rank"],
    "doubled stage": ["TopologyError: schedule '1f1b' places stages [0]", "which has [0, 0]"],
    "schedules": ["AgreementError: ranks disagree on the schedule", "ranks [0]", "ranks [1, 2, 3]"],
    "num_microbatches": ["AgreementError: ranks disagree on the schedule", "ranks [2]"],
    "no num_microbatches": ["ScheduleError: num_microbatches is missing"],
    "depth": ["AgreementError: ranks disagree on the schedule", "depth 2", "depth 3"],
    "unknown schedule": ["PluginNotFoundError: ", "'2f2b'", "1f1b"],
    "other size": ["ScheduleError: schedule 'mine' is of 2 ranks", "asked for are 4"],
    "no edge": ["ScheduleError: stage 0 makes ['x'], which no later stage takes"],
    "doubled input": ["ScheduleError: stage 2 has the inputs ['x', 'x']"],
    "doubled output": ["ScheduleError: stage 1 has the outputs ['x', 'x']"],
    "no input": ["ScheduleError: stage 1 has the inputs []"],
    "wrapped": ["rank 1: TopologyError: stage 1 has a Wrapped, which wants a backward"],
    "wrapped inside": ["rank 2: TopologyError: stage 2 has a Wrapped, which wants a backward"],
    "wasted": ["ScheduleError: stage 1 makes ['side'], which no later stage takes"],
    **{name: ["ScheduleError: schedule 'mine'", *said] for name, (_, said, _) in WRONG.items()},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_on_all_ranks_alike_before_any_group_is_made(
    name: str, pipeline: Replies
) -> None:
    answers = [found[name] for found, _ in told(pipeline, "constructions")]
    said, num_groups, in_time = answers[0]
    assert answers == [answers[0]] * 4
    assert [part for part in REFUSED[name] if part not in said] == []
    assert num_groups == 0
    assert in_time
    if name in WRONG:
        grid = said[said.index("\nrank 0  ") :]
        assert len(grid.strip().splitlines()) >= NUM_STAGES
        assert [cell for cell in WRONG[name][2] if cell not in grid] == []


def test_ranks_that_were_refused_can_construct_a_good_one(pipeline: Replies) -> None:
    assert [right for _, right in told(pipeline, "constructions")] == [True] * 4


@on(PIPELINE)
def names_differ() -> Any:
    """Two copies of two stages: ranks 2 and 3 have stage 1."""
    refused = Refusals(Topology.create(pipeline=2))
    stage = refused.topology.coordinate("pp")
    named = [("x",), ("x",), ("x",), ("x", "side")][rank()]
    return refused(Stage(Scale(stage), stage, named))


def test_copies_of_a_stage_take_the_same(pipeline: Replies) -> None:
    answers = told(pipeline, "names_differ")
    assert answers == [answers[0]] * 4
    said, num_groups, in_time = answers[0]
    assert said.startswith(
        "AgreementError: ranks disagree on inputs, outputs and losses of stage 1"
    )
    assert (num_groups, in_time) == (0, True)
