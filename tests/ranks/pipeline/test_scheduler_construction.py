"""What does not fit together is refused by the constructor, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipegrad import Scheduler, Stage, Topology
from pipegrad.schedules import Schedule
from tests.support.gradients.cases import outcome, rank
from tests.support.pipeline.scales import NUM_MICROBATCHES, NUM_STAGES, Scale, chain
from tests.support.ranked import gathered
from tests.support.schedules.programs import rows

pytestmark = pytest.mark.ranks(NUM_STAGES, seconds=50)  # less than ranks wait for each other
Given = tuple[list[Stage], dict[str, Any]]


class Wrapped(DistributedDataParallel):
    """Makes no groups, and runs nothing."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def refusal(stages: Sequence[Stage], *, pipeline: int = NUM_STAGES, **options: Any) -> str:
    """Constructs what is refused; returns what all ranks say, and asserts that no group is made."""
    topology = Topology.create(pipeline=pipeline)
    options = {"schedule": "1f1b", "handlers": ["noop"], **options}
    if not isinstance(options["schedule"], Schedule):
        options = {"num_microbatches": NUM_MICROBATCHES, **options}
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        said = outcome(partial(Scheduler, stages, topology, **options))
    assert made.call_count == 0
    assert gathered(said) == [said] * NUM_STAGES
    return said


def stage(inputs: Sequence[str] = ("x",), outputs: Sequence[str] = ("x",)) -> Stage:
    return Stage(Scale(rank()), rank(), inputs, outputs)


def with_options(**options: Any) -> Given:
    return [stage()], options


def with_stages(*stages: Stage) -> Given:
    return [*stages], {}


def at(place: int, make_stage: Callable[[], Stage]) -> Given:
    """Returns what is given if one rank has another stage."""
    return with_stages(make_stage() if rank() == place else stage())


def placed(number: int) -> Stage:
    return Stage(Scale(number), number)


CASES: dict[str, tuple[Callable[[], Given], list[str]]] = {
    "misplaced": (
        lambda: with_stages(placed((rank() + 1) % NUM_STAGES)),
        ["rank 1: TopologyError: schedule '1f1b' places stages [1] on this rank", "[2]"],
    ),
    "one misplaced": (
        lambda: at(1, lambda: placed(2)),
        ["rank 1: TopologyError: schedule '1f1b' places stages [1] on this rank"],
    ),
    "doubled stage": (
        lambda: with_stages(stage(), stage()),
        ["TopologyError: schedule '1f1b' places stages [0]", "which has [0, 0]"],
    ),
    "schedules": (
        lambda: with_options(schedule="1f1b" if rank() else "gpipe"),
        ["AgreementError: ranks disagree on the schedule", "ranks [0]", "ranks [1, 2, 3]"],
    ),
    "num_microbatches": (
        lambda: with_options(num_microbatches=4 + (rank() == 2)),
        ["AgreementError: ranks disagree on the schedule", "ranks [2]"],
    ),
    "no num_microbatches": (
        lambda: with_options(num_microbatches=None),
        ["ScheduleError: num_microbatches is missing"],
    ),
    "depth": (
        lambda: with_options(depth=2 + (rank() == 3)),
        ["AgreementError: ranks disagree on the schedule", "depth 2", "depth 3"],
    ),
    "unknown schedule": (
        lambda: with_options(schedule="2f2b"),
        ["PluginNotFoundError: ", "'2f2b'", "1f1b"],
    ),
    "other size": (
        lambda: with_options(schedule=rows("0F0 0B0", "1F0 1B0")),
        ["ScheduleError: schedule 'mine' is of 2 ranks", "asked for are 4"],
    ),
    "no edge": (
        lambda: with_stages(stage(["xyyx"[rank()]], ["xyxx"[rank()]])),
        ["ScheduleError: stage 0 makes ['x'], which no later stage takes"],
    ),
    "doubled input": (
        lambda: at(2, lambda: stage(["x", "x"])),
        ["ScheduleError: stage 2 has the inputs ['x', 'x']"],
    ),
    "doubled output": (
        lambda: at(1, lambda: stage(["x"], ["x", "x"])),
        ["ScheduleError: stage 1 has the outputs ['x', 'x']"],
    ),
    "no input": (
        lambda: at(1, lambda: stage([])),
        ["ScheduleError: stage 1 has the inputs []"],
    ),
    "wrapped": (
        lambda: at(1, lambda: Stage(Wrapped(Scale(1)), 1)),
        ["rank 1: TopologyError: stage 1 has a Wrapped, which wants a backward"],
    ),
    "wrapped inside": (
        lambda: at(2, lambda: Stage(nn.Sequential(Wrapped(Scale(2))), 2)),
        ["rank 2: TopologyError: stage 2 has a Wrapped, which wants a backward"],
    ),
    "wasted": (
        lambda: at(1, lambda: stage(["x"], ["x", "side"])),
        ["ScheduleError: stage 1 makes ['side'], which no later stage takes"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_refused_on_all_ranks_alike_before_any_group_is_made(
    case: str,
) -> None:
    given, wanted = CASES[case]
    stages, options = given()
    said = refusal(stages, **options)
    assert [part for part in wanted if part not in said] == []


@pytest.mark.parametrize(
    ("texts", "num_microbatches", "wanted", "marked"),
    [
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1", "3F0 3F1 3B0 3B1"),
            2,
            ["cannot go on: ranks and the actions whose inputs never come"],
            [">0B0<", ">1F1<"],
        ),
        (
            ("0F0 0B0", "1F0 1B0", "2F0", "3F0 3B0"),
            1,
            ["is not complete", "stage 2 microbatch 0 has ['F']"],
            [">2F0<"],
        ),
        (
            ("0F0 0B0", "1F0 1B0 1B0", "2F0 2B0", "3F0 3B0"),
            1,
            ["is not complete", "1B0 2 times"],
            [">1B0<"],
        ),
        (
            ("0F0 0B0", "1F0 1B0", "2F0 2B0", "3B0 3F0"),
            1,
            ["cannot go on: ranks and the actions whose inputs never come", "3: '3B0'"],
            [">3B0<"],
        ),
        (
            ("0F0 0B0 1F0", "1B0", "2F0 2B0", "3F0 3B0"),
            1,
            ["is not complete", "1F0 on rank 0"],
            [">1F0<"],
        ),
    ],
    ids=["cycle", "missing backward", "doubled", "backward first", "elsewhere"],
)
def test_a_schedule_that_cannot_run_is_refused_with_its_grid(
    texts: tuple[str, ...], num_microbatches: int, wanted: list[str], marked: list[str]
) -> None:
    wrong = rows(*texts, stages=(0, 1, 2, 3), num_microbatches=num_microbatches)
    said = refusal([stage()], schedule=wrong)
    assert [p for p in ("ScheduleError: schedule 'mine'", *wanted) if p not in said] == []
    grid = said[said.index("\nrank 0  ") :]
    assert len(grid.strip().splitlines()) >= NUM_STAGES
    assert [cell for cell in marked if cell not in grid] == []
    assert chain().is_right()  # ranks that were refused can construct a good one


def test_copies_of_a_stage_take_the_same() -> None:
    """Two copies of two stages: ranks 2 and 3 have stage 1."""
    names = ("x", "side") if rank() == 3 else ("x",)
    own = rank() // 2
    said = refusal([Stage(Scale(own), own, names)], pipeline=2)
    assert said.startswith(
        "AgreementError: ranks disagree on inputs, outputs and losses of stage 1"
    )
