"""What a Scheduler does and when: its trace, its host work."""

from __future__ import annotations

import cProfile
import gc
import re
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from pipegrad import FlatBucket, GradientHandler, ReductionStep, Scheduler, Stage, Work
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.gradients.cases import DATA, Case, Replies, on, rank, replies
from tests.support.pipeline.chains import INTERLEAVED, WIDTH, Scale, make, step

Tensor = torch.Tensor

FOUR: list[Case] = []
TWO: list[Case] = []
four = replies(4, FOUR)
two = replies(2, TWO)


# The trace.

ACTION = re.compile(r"pipegrad (\d+[FBIW]\d+)")
TRACED = ("1f1b", "gpipe", INTERLEAVED, "zb-h1")


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


@on(FOUR)
def ranges() -> Any:
    """Two copies of two stages, or of four where ranks hold two."""
    found = {}
    for schedule in TRACED:
        scheduler = make(2, schedule, handlers=[DATA])
        actions = scheduler.schedule.actions[scheduler.topology.coordinate("pp")]
        own, _ = trace(scheduler, all_threads=False)
        everything = trace(scheduler, all_threads=True)
        planned = [f"pipegrad bucket {x.bucket} " for x in scheduler.sync.plan.launches]
        scheduler.close()
        found[schedule] = list(map(str, actions)), own, everything, planned
    return found


@pytest.mark.parametrize("schedule", TRACED)
def test_a_trace_has_each_action_once_in_the_schedules_order(schedule: str, four: Replies) -> None:
    for reply in four:
        actions, own, _, _ = reply["ranges"][schedule]
        assert own == actions
        kinds, num_stages = 2 + (schedule == "zb-h1"), 1 + (schedule == INTERLEAVED)
        assert len(actions) == 4 * kinds * num_stages


@pytest.mark.parametrize("schedule", TRACED)
def test_a_trace_of_all_threads_has_the_actions_and_each_bucket_once(
    schedule: str, four: Replies
) -> None:
    """Comm streams are threads with gloo, which a profiler leaves out unless told."""
    for reply in four:
        actions, _, (computes, buckets), planned = reply["ranges"][schedule]
        assert [b[: len(p)] for b, p in zip(buckets, planned, strict=True)] == planned
        assert all(bucket.endswith(" replicate-mean(dp)") for bucket in buckets)
        assert len(planned) == 1 + (schedule == INTERLEAVED)
        assert computes == actions


# When buckets leave, on the clock that all ranks of a machine share.

COMPUTE_SECONDS = 0.06  # far longer than a busy machine keeps a thread waiting


@dataclass(frozen=True)
class Moments:
    """Nanoseconds: when a rank's backwards began and ended, its buckets left and were reduced."""

    backwards: list[tuple[int, int]]
    launches: list[tuple[int, int]]


now = Moments([], [])  # of this process


class Slow(torch.autograd.Function):
    """Takes its time, on the way back too, ahead of the gradients of the stage's parameters."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        time.sleep(COMPUTE_SECONDS)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        began = time.monotonic_ns()
        time.sleep(COMPUTE_SECONDS)
        now.backwards.append((began, time.monotonic_ns()))
        return grad


class Slowly(Scale):
    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        slow: Tensor = Slow.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return slow


def slowly(stage: int) -> Stage:
    return Stage(Slowly(stage), stage)


class Noted:
    """Work that notes when it ends."""

    def __init__(self, work: Work, began: int) -> None:
        self.work = work
        self.began = began

    def wait(self) -> None:
        self.work.wait()
        now.launches.append((self.began, time.monotonic_ns()))


class Notes(GradientHandler):
    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        began = time.monotonic_ns()
        return Noted(super().launch(bucket, reduction, group), began)


class NotedCopies(Notes, DataParallel):
    pass


class NotedTie(Notes, PipelineShared):
    pass


TIMED = ("1f1b", "eager-1f1b")


def moments(scheduler: Scheduler) -> Moments:
    """Returns those of the second step."""
    step(scheduler)
    now.backwards.clear()
    now.launches.clear()
    dist.barrier()
    step(scheduler)
    scheduler.close()
    return Moments(list(now.backwards), list(now.launches))


@on(FOUR)
def copies() -> Any:
    return {s: moments(make(2, s, slowly, handlers=[NotedCopies])) for s in TIMED}


@on(FOUR)
def tie() -> Any:
    options: dict[str, Any] = {"tied": [{0: "weight", 3: "weight"}], "handlers": [NotedTie]}
    return {s: moments(make(4, s, slowly, **options)) for s in TIMED}


@pytest.mark.parametrize("schedule", TIMED)
def test_a_bucket_leaves_at_its_stages_last_backward_before_the_pipeline_has_drained(
    schedule: str, four: Replies
) -> None:
    ranks: list[Moments] = [reply["copies"][schedule] for reply in four]
    assert [(len(r.backwards), len(r.launches)) for r in ranks] == [(4, 1)] * 4
    for place, moments in enumerate(ranks):
        last_began, _ = moments.backwards[-1]
        launched, _ = moments.launches[0]
        first_stage = ranks[place % 2]  # of the same pipeline
        assert last_began < launched
        assert place < 2 or launched < first_stage.backwards[-1][1]


@pytest.mark.parametrize("schedule", TIMED)
def test_a_tie_is_summed_when_both_its_stages_have_ended_each_launching_at_its_own_end(
    schedule: str, four: Replies
) -> None:
    first, *others, last = (reply["tie"][schedule] for reply in four)
    assert [len(moments.launches) for moments in (first, *others, last)] == [1, 0, 0, 1]
    drained = first.backwards[-1][1]
    assert last.backwards[-1][0] < last.launches[0][0] < drained  # without waiting for the first
    assert first.backwards[-1][0] < first.launches[0][0]
    for moments in (first, last):
        assert first.launches[0][0] < moments.launches[0][1]  # a sum needs both
        assert drained < moments.launches[0][1]


# Host work.

# Eight more than it was: who else holds a received buffer or an output is asked for each.
MICROBATCHES, MOST_CALLS = 64, 68
LEAN = ("1f1b", "gpipe", INTERLEAVED)


def linear(stage: int) -> Stage:
    torch.manual_seed(stage)  # else all stages would begin alike
    return Stage(nn.Linear(WIDTH, WIDTH, bias=False), stage)


@on(FOUR)
def calls() -> Any:
    """Returns how many functions are called for each action, on average, in the third step."""
    found = {}
    for schedule in LEAN:
        scheduler = make(4, schedule, linear, microbatches=MICROBATCHES, handlers=[DATA])
        x = torch.ones(MICROBATCHES, WIDTH)
        profiler = cProfile.Profile()
        for number in range(3):
            for stage in scheduler._stages.values():
                stage.module.zero_grad()
            gc.disable()
            if number == 2:
                profiler.enable()
            scheduler.step(x, target=x)
            profiler.disable()
            gc.enable()
        row = scheduler.schedule.actions[rank()]
        # Not by pstats, which counts one of all generated functions that begin on one line.
        total = sum(entry.callcount for entry in profiler.getstats())
        found[schedule] = total / len(row), len(row)
        scheduler.close()
    return found


@pytest.mark.parametrize("schedule", LEAN)
def test_an_action_costs_few_calls_of_the_host(schedule: str, four: Replies) -> None:
    for reply in four:
        per_action, num_actions = reply["calls"][schedule]
        assert num_actions == 2 * MICROBATCHES * (1 + (schedule == INTERLEAVED))
        assert 10 < per_action <= MOST_CALLS
