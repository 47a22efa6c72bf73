"""What a Scheduler does and when: its trace, its host work, the order of its transfers."""

from __future__ import annotations

import cProfile
import gc
import pstats
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from pipegrad import FlatBucket, GradientHandler, Hop, Scheduler, Stage, Topology, Work
from pipegrad.gradients import order
from pipegrad.schedules.program import Op
from pipegrad.testing import OrderChecker
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.gradients.cases import DATA, SHARED, Case, Replies, on, rank, replies

Tensor = torch.Tensor
WIDTH = 4
INTERLEAVED = "interleaved-1f1b"
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "hop-aware-1f1b", INTERLEAVED)

FOUR: list[Case] = []
TWO: list[Case] = []
four = replies(4, FOUR)
two = replies(2, TWO)


class Scale(nn.Module):
    """Two parameters, different in each stage; takes a skip too, if there is one."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.0 + stage / 8))
        self.bias = nn.Parameter(torch.full((WIDTH,), 1.0 + stage / 16))

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        out = x * self.weight + self.bias
        return out if skip is None else out + skip * self.bias


class Forks(Scale):
    """A stage that makes a value and a skip."""

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Any:
        return super().forward(x), 2 * x * self.bias


def plain(stage: int) -> Stage:
    return Stage(Scale(stage), stage)


def skips(stage: int) -> Stage:
    """All stages take the first one's skip: its gradients come from all ranks, and are summed."""
    if stage == 0:
        return Stage(Forks(stage), stage, ["x"], ["x", "skip"])
    return Stage(Scale(stage), stage, ["x", "skip"], ["x"])


def make(
    pipeline: int,
    schedule: str,
    make_stage: Callable[[int], Stage] = plain,
    *,
    microbatches: int = 4,
    **options: Any,
) -> Scheduler:
    """Returns a Scheduler, with as many stages a rank as the schedule wants."""
    topology = Topology.create(pipeline=pipeline)
    num_stages = pipeline * (1 + (schedule == INTERLEAVED))
    places = range(topology.coordinate("pp"), num_stages, pipeline)
    spec: Mapping[str, Any] = {"name": schedule}
    if schedule == "hop-aware-1f1b":
        spec = {**spec, "hop_seconds": [0.2] * (pipeline - 1), "compute_seconds": 1.0}
    return Scheduler(
        [make_stage(stage) for stage in places],
        topology,
        schedule=spec,
        num_microbatches=microbatches,
        loss_fn=lambda out, _: out.sum(),
        **options,
    )


def step(scheduler: Scheduler) -> float:
    """Takes a step; there are no gradients before."""
    x = torch.ones(scheduler.schedule.num_microbatches, WIDTH)
    for stage in scheduler._stages.values():
        stage.module.zero_grad()
    return float(scheduler.step(x, target=x).loss)


# The trace.

ACTION = re.compile(r"pipegrad (\d+[FB]\d+)")
TRACED = ("1f1b", "gpipe", INTERLEAVED)


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
        assert len(actions) == 4 * 2 * (1 + (schedule == INTERLEAVED))


@pytest.mark.parametrize("schedule", TRACED)
def test_a_trace_of_all_threads_has_the_actions_and_each_bucket_once(
    schedule: str, four: Replies
) -> None:
    """Lanes are threads with gloo, which a profiler leaves out unless told."""
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
    def launch(self, bucket: FlatBucket, reduction: Hop, group: dist.ProcessGroup) -> Work:
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
    options: dict[str, Any] = {"shared": [{0: "weight", 3: "weight"}], "handlers": [NotedTie]}
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

MICROBATCHES, MOST_CALLS = 64, 60
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
        total: int = pstats.Stats(profiler).total_calls  # type: ignore[attr-defined]
        found[schedule] = total / len(row), len(row)
        scheduler.close()
    return found


@pytest.mark.parametrize("schedule", LEAN)
def test_an_action_costs_few_calls_of_the_host(schedule: str, four: Replies) -> None:
    for reply in four:
        per_action, num_actions = reply["calls"][schedule]
        assert num_actions == 2 * MICROBATCHES * (1 + (schedule == INTERLEAVED))
        assert 10 < per_action <= MOST_CALLS


# Order.


def tied(num_stages: int) -> dict[str, Any]:
    shared = [{0: "weight", num_stages - 1: "weight"}]
    return {"shared": shared, "handlers": [SHARED, DATA], "bucket_bytes": 4 * WIDTH}


@dataclass(frozen=True)
class Seen:
    """What a checker saw of a few steps."""

    violations: list[str]
    num_transfers: int
    num_collectives: int


def check(kind: str, schedule: str, *, virtual_streams: bool, off: str | None = None) -> Seen:
    """Takes three steps and an evaluation under a checker."""
    pipeline = 2 if kind == "tied" else dist.get_world_size()
    num_stages = pipeline * (1 + (schedule == INTERLEAVED))
    options = tied(num_stages) if kind == "tied" else {"handlers": [DATA]}
    with OrderChecker(virtual_streams=virtual_streams, log=True) as checker:
        scheduler = make(pipeline, schedule, skips if kind == "skips" else plain, **options)
        if off is not None:
            order.sites[off].enabled = False
        try:
            for _ in range(3):
                step(scheduler)
        finally:
            if off is not None:
                order.sites[off].enabled = True
        x = torch.ones(4, WIDTH)
        scheduler.evaluate(x, target=x)
        scheduler.close()
    strands = [entry.strand for entry in checker.log]
    return Seen(
        list(map(str, checker.violations)),
        sum(strand.startswith("transfer") for strand in strands),
        sum(strand.startswith("collectives of pipegrad lane") for strand in strands),
    )


KINDS = ("plain", "tied", "skips")


def checks() -> dict[tuple[str, str, bool], Seen]:
    return {
        (kind, schedule, streams): check(kind, schedule, virtual_streams=streams)
        for kind in KINDS
        for schedule in SCHEDULES
        for streams in (True, False)
    }


@on(TWO)
def checks_of_two() -> Any:
    return checks()


@on(FOUR)
def checks_of_four() -> Any:
    return checks()


@on(TWO)
def unchecked() -> Any:
    """Nobody waits for what is let go of: a checker that saw no transfers would see no harm."""
    return check("plain", "1f1b", virtual_streams=True, off="transfer.sending")


@pytest.mark.parametrize("streams", [True, False], ids=["streams", "threads"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_access_is_left_to_luck(
    schedule: str,
    kind: str,
    streams: bool,
    two: Replies,
    four: Replies,
) -> None:
    for replies_, case in ((two, "checks_of_two"), (four, "checks_of_four")):
        for reply in replies_:
            seen: Seen = reply[case][kind, schedule, streams]
            assert seen.violations == []
            assert seen.num_transfers >= 3 * 4 * 2 + 4  # a value and a gradient, each step
            if kind == "tied" and streams:
                assert seen.num_collectives >= 3


def test_a_transfer_that_nobody_holds_is_seen(two: Replies) -> None:
    assert any(reply["unchecked"].violations for reply in two)


# What a rank asks of its transfers, in order.


class Recorder(order.Backend):
    """Notes sends, receives and waits."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self._works: dict[int, tuple[str, int, Work]] = {}

    def send(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, tag: int) -> Work:
        return self._note("send", tag, super().send(group, tensor, peer, tag))

    def receive(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, tag: int) -> Work:
        return self._note("receive", tag, super().receive(group, tensor, peer, tag))

    def wait_work(self, work: Work) -> None:
        kind, tag, _ = self._works[id(work)]
        self.calls.append((f"wait for {kind}", tag))
        super().wait_work(work)

    def _note(self, kind: str, tag: int, work: Work) -> Work:
        self._works[id(work)] = kind, tag, work
        self.calls.append((kind, tag))
        return work


ITEMS = {
    Op.SEND: "send",
    Op.POST_RECEIVE: "receive",
    Op.WAIT_RECEIVE: "wait for receive",
    Op.RELEASE: "wait for send",
}


@on(FOUR)
def recorded() -> Any:
    """Returns what a steady step of 8 microbatches asks, and what its Program says."""
    scheduler = make(4, "1f1b", skips, microbatches=8, handlers=["noop"], depth=3)
    step(scheduler)
    recorder = Recorder()
    with order.using(recorder):
        step(scheduler)
    program = scheduler.program
    wanted = [
        (ITEMS[op], microbatch * len(program.channels) + which)
        for op, which, microbatch in program.decoded(rank())
        if op in ITEMS
    ]
    scheduler.close()
    return recorder.calls, wanted


def most_ahead(calls: Sequence[tuple[str, int]]) -> int:
    """Returns how many receives there are at most between a receive and the wait for it."""
    ahead = most = 0
    for kind, _ in calls:
        ahead += (kind == "receive") - (kind == "wait for receive")
        most = max(most, ahead)
    return most


def test_a_rank_asks_for_transfers_as_its_program_says_receives_ahead(
    four: Replies,
) -> None:
    for reply in four:
        calls, wanted = reply["recorded"]
        assert calls == wanted
        assert {kind for kind, _ in calls} == set(ITEMS.values())
        assert most_ahead(calls) > 3
