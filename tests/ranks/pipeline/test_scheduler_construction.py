"""What does not fit together is refused by the constructor, on all ranks alike."""

from __future__ import annotations

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
from tests.support.gradients.cases import outcome, rank
from tests.support.pipeline.scales import NUM_MICROBATCHES, NUM_STAGES, Scale, chain
from tests.support.ranked import gathered
from tests.support.schedules.programs import rows

pytestmark = pytest.mark.ranks(NUM_STAGES, seconds=50)  # less than ranks wait for each other
DISAGREE = "AgreementError: ranks disagree on the schedule"


class Wrapped(DistributedDataParallel):
    """Makes no groups, and runs nothing."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def stage(inputs: Sequence[str] = ("x",), outputs: Sequence[str] = ("x",)) -> Stage:
    return Stage(Scale(rank()), rank(), inputs, outputs)


def placed(number: int) -> Stage:
    return Stage(Scale(number), number)


def refusal(*words: str, stages: Any = (), pipeline: int = NUM_STAGES, **options: Any) -> str:
    """Constructs what is refused before any group is made; returns what all ranks say.

    Args:
        *words: They are in it.
        stages: Of this rank; None for what is right.
        pipeline: Number of stages.
        **options: Of the Scheduler.
    """
    topology = Topology.create(pipeline=pipeline)
    options = {"schedule": "1f1b", "handlers": ["noop"], **options}
    if not isinstance(options["schedule"], Schedule):
        options = {"num_microbatches": NUM_MICROBATCHES, **options}
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        said = outcome(partial(Scheduler, stages or [stage()], topology, **options))
    assert made.call_count == 0
    assert gathered(said) == [said] * NUM_STAGES
    assert [part for part in words if part not in said] == []
    return said


def test_stages_and_options_that_do_not_fit_are_refused() -> None:
    here = rank()
    misplaced = "rank 1: TopologyError: schedule '1f1b' places stages [1] on this rank"
    refusal(misplaced, "[2]", stages=[placed((here + 1) % NUM_STAGES)])
    refusal(misplaced, stages=[placed(2 if here == 1 else here)])
    doubled = "TopologyError: schedule '1f1b' places stages [0]"
    refusal(doubled, "which has [0, 0]", stages=[stage(), stage()])
    assert chain().is_right()  # ranks that were refused can construct a good one
    # Options that differ or do not fit are refused.
    here = rank()
    words = "gpipe on rank 0, 1f1b on ranks [1, 2, 3]"
    refusal(f"{DISAGREE}: {words};", schedule="1f1b" if here else "gpipe")
    words = "4 microbatches on ranks [0, 1, 3], 5 microbatches on rank 2"
    refusal(f"{DISAGREE}: {words}; make them the same", num_microbatches=4 + (here == 2))
    refusal(f"{DISAGREE}: depth 2 on ranks [0, 1, 2], depth 3 on rank 3;", depth=2 + (here == 3))
    refusal("ScheduleError: num_microbatches is missing", num_microbatches=None)
    unknown = "ScheduleError: Scheduler has no option 'check_evry'; allowed, closest first: "
    refusal(f"{unknown}check_every, ", check_evry=4)
    refusal("PluginNotFoundError: ", "'2f2b'", "1f1b", schedule="2f2b")
    of_two = rows("0F0 0B0", "1F0 1B0")
    refusal("ScheduleError: schedule 'mine' is of 2 ranks", "asked for are 4", schedule=of_two)
    wrong = rows("0F0 0B0", "1F0 1B0", "2F0", "3F0 3B0", stages=(0, 1, 2, 3))
    said = refusal("ScheduleError: schedule 'mine' is not complete", schedule=wrong)
    assert ">2F0<" in said[said.index("\nrank 0  ") :]
    # Stages that are not connected are refused.
    words = "ScheduleError: stage 0 makes ['x'], which no later stage takes"
    refusal(words, stages=[stage(["xyyx"[rank()]], ["xyxx"[rank()]])])
    # Stages in a wrapper that wants a backward are refused.
    for at, module in ((1, Wrapped(Scale(1))), (2, nn.Sequential(Wrapped(Scale(2))))):
        words = f"rank {at}: TopologyError: stage {at} has a Wrapped, which wants a backward"
        refusal(words, stages=[Stage(module, at)] if rank() == at else ())
    # Copies of a stage take the same. Two copies of two stages: ranks 2 and 3 have stage 1.
    own = rank() // 2
    uneven = Stage(Scale(own), own, ("x", "side") if rank() == 3 else ("x",))
    said = refusal(stages=[uneven], pipeline=2)
    words = "AgreementError: ranks disagree on inputs, outputs and losses of stage 1"
    assert said.startswith(words)


@pytest.mark.parametrize(
    ("at", "names", "words"),
    [
        (2, (["x", "x"],), "stage 2 has the inputs ['x', 'x']"),
        (1, (["x"], ["x", "x"]), "stage 1 has the outputs ['x', 'x']"),
        (1, ([],), "stage 1 has the inputs []"),
        (1, (["x"], ["x", "side"]), "stage 1 makes ['side'], which no later stage takes"),
    ],
)
def test_names_that_do_not_fit_are_refused(at: int, names: Any, words: str) -> None:
    refusal(f"ScheduleError: {words}", stages=[stage(*(names if rank() == at else ()))])
