"""What a Scheduler does and when: its trace, its host work."""

from __future__ import annotations

import cProfile
import gc
import re
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from pipegrad import Scheduler, Stage
from pipegrad.comm.activity import Details, activities
from tests.support.gradients.cases import DATA, rank
from tests.support.pipeline.chains import INTERLEAVED, WIDTH, make, step

pytestmark = pytest.mark.ranks(4)


ACTION = re.compile(r"pipegrad (\d+[FBIW]\d+)")


def trace(scheduler: Scheduler, *, all_threads: bool) -> tuple[list[str], list[str]]:
    """Returns the ranges of a step's actions and buckets, in the order in which they begin."""
    step(scheduler)
    config = _ExperimentalConfig(profile_all_threads=all_threads)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as traced:
        step(scheduler)
    events = sorted(traced.events(), key=lambda event: event.time_range.start)
    names = [event.name for event in events if event.name.startswith("pipegrad ")]
    actions = [found[1] for name in names if (found := ACTION.fullmatch(name))]
    return actions, [name for name in names if name.startswith("pipegrad bucket ")]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", INTERLEAVED, "zb-h1"])
def test_a_trace_has_each_action_and_each_bucket_once_in_the_schedules_order(schedule: str) -> None:
    """Comm streams are threads with gloo, which a profiler leaves out unless told."""
    # Two copies of two stages, or of four where ranks hold two.
    with closing(make(2, schedule, handlers=[DATA])) as scheduler:
        actions = [*map(str, scheduler.schedule.actions[scheduler.topology.coordinate("pp")])]
        kinds, num_stages = 2 + (schedule == "zb-h1"), 1 + (schedule == INTERLEAVED)
        assert len(actions) == 4 * kinds * num_stages
        own, _ = trace(scheduler, all_threads=False)
        computes, buckets = trace(scheduler, all_threads=True)
        planned = [f"pipegrad bucket {x.bucket} " for x in scheduler.sync.plan.launches]
    assert own == computes == actions
    assert [b[: len(p)] for b, p in zip(buckets, planned, strict=True)] == planned
    assert all(bucket.endswith(" replicate-mean(dp)") for bucket in buckets)
    assert len(planned) == num_stages


# Those of Python and of C, of torch's module and of autograd too.
MICROBATCHES, MOST_CALLS = 64, 72  # three of them are waits that Python can end


def linear(stage: int) -> Stage:
    torch.manual_seed(stage)  # else all stages would begin alike
    return Stage(nn.Linear(WIDTH, WIDTH, bias=False), stage)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", INTERLEAVED])
def test_an_action_costs_few_calls_of_the_host(schedule: str) -> None:
    """On average, in the third step."""
    x, profiler = torch.ones(MICROBATCHES, WIDTH), cProfile.Profile()
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "handlers": [DATA]}
    with closing(make(4, schedule, linear, **options)) as scheduler:
        for number in range(3):
            for stage in scheduler.steps.pipeline.stages:
                stage.module.zero_grad()
            gc.disable()
            if number == 2:
                profiler.enable()
            scheduler.step(x, target=x)
            profiler.disable()
            gc.enable()
        num_actions = len(scheduler.schedule.actions[rank()])
    assert num_actions == 2 * MICROBATCHES * (1 + (schedule == INTERLEAVED))
    # Not by pstats, which counts one of all generated functions that begin on one line.
    num_calls = sum(entry.callcount for entry in profiler.getstats())
    assert 10 < num_calls / num_actions <= MOST_CALLS


@pytest.mark.ranks(1)
def test_a_rank_is_at_the_item_that_runs_and_its_grid_at_the_action() -> None:
    """Of one rank alone no item stands between two actions."""
    seen = list[Details]()

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            stacks = activities().values()
            seen.extend(one.details() for stack in stacks for one in stack if one.details)
            return x.clone()

    with closing(make(1, "gpipe", lambda s: Stage(Looks(), s), handlers=[DATA])) as scheduler:
        scheduler.evaluate(torch.ones(4, WIDTH))
    found = [(details.item, details.mark) for details in seen]
    assert found == [(f"compute 0F{number}", f"0F{number}") for number in range(4)]
