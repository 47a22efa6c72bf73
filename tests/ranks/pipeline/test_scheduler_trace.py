"""What a Scheduler does and when: its trace, its host work."""

from __future__ import annotations

import cProfile
import gc
import re
import time
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from pipegrad import FlatBucket, GradientHandler, ReductionStep, Scheduler, Stage, Work
from pipegrad.comm.activity import Details, activities
from pipegrad.comm.agreement import store
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.gradients.cases import DATA, rank
from tests.support.pipeline.chains import INTERLEAVED, WIDTH, Scale, make, step
from tests.support.ranked import gathered

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


# When buckets leave, on the clock that all ranks of a machine share.


@dataclass
class Moments:
    """Nanoseconds: when a rank's backwards began and ended, its buckets left and were reduced.

    Attributes:
        key: What this rank notes in the store when a bucket leaves.
        awaited: What its last backward waits for.
    """

    backwards: list[tuple[int, int]] = field(default_factory=list)
    launches: list[tuple[int, int]] = field(default_factory=list)
    key: str = ""
    awaited: str = ""


now = Moments()  # of this process


class Slow(torch.autograd.Function):
    """Is slow ahead of the gradients of the stage's parameters."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        began = time.monotonic_ns()
        if now.awaited and len(now.backwards) == 3:
            store().wait([now.awaited], timedelta(seconds=60))
        now.backwards.append((began, time.monotonic_ns()))
        return grad


class Slowly(Scale):
    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        slow: Tensor = Slow.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return slow


class Noted:
    """Work that notes when it ends."""

    def __init__(self, work: Work, began: int) -> None:
        self.work = work
        self.began = began

    def wait(self) -> None:
        self.work.wait()
        now.launches.append((self.began, time.monotonic_ns()))


class Notes(GradientHandler):
    def launch(self, bucket: FlatBucket, reduction: ReductionStep, group: Any) -> Work:
        began = time.monotonic_ns()
        if now.key:
            store().set(now.key, "")
        return Noted(super().launch(bucket, reduction, group), began)


class NotedCopies(Notes, DataParallel):
    pass


class NotedTie(Notes, PipelineShared):
    pass


def moments(pipeline: int, schedule: str, **options: Any) -> list[Moments]:
    """Returns those of the second step, of all ranks.

    The first stage ends its last backward when a bucket of the last stage has left.
    """
    global now  # noqa: PLW0603 - of this process
    now, num_copies = Moments(), 4 // pipeline
    with closing(make(pipeline, schedule, lambda s: Stage(Slowly(s), s), **options)) as scheduler:
        step(scheduler)
        now = Moments(key=f"{pipeline} {schedule} {rank()}")
        if rank() < num_copies:
            now.awaited = f"{pipeline} {schedule} {rank() + 4 - num_copies}"
        dist.barrier()
        step(scheduler)
    return gathered(now)


TIMED = pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b"])


@TIMED
def test_buckets_leave_at_the_last_backward_before_the_pipeline_has_drained(schedule: str) -> None:
    ranks = moments(2, schedule, handlers=[NotedCopies])
    assert [(len(r.backwards), len(r.launches)) for r in ranks] == [(4, 1)] * 4
    for place, found in enumerate(ranks):
        last_began, _ = found.backwards[-1]
        launched, _ = found.launches[0]
        first_stage = ranks[place % 2]  # of the same pipeline
        assert last_began < launched
        assert place < 2 or launched < first_stage.backwards[-1][1]
    # A tie is summed when both its stages have ended each launching at its own end.
    ranks = moments(4, schedule, tied=[{0: "weight", 3: "weight"}], handlers=[NotedTie])
    assert [len(found.launches) for found in ranks] == [1, 0, 0, 1]
    first, *_, last = ranks
    drained = first.backwards[-1][1]
    assert last.backwards[-1][0] < last.launches[0][0] < drained  # without waiting for the first
    assert first.backwards[-1][0] < first.launches[0][0]
    for found in (first, last):
        assert first.launches[0][0] < found.launches[0][1]  # a sum needs both
        assert drained < found.launches[0][1]


# Those of Python and of C, of torch's module and of autograd too.
MICROBATCHES, MOST_CALLS = 64, 69


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
            for stage in scheduler._stages.values():
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
