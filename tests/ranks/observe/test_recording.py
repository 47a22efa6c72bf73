"""Recorded steps of real ranks: each action once, the right waits, 100 %, the same gradients."""

from __future__ import annotations

import time
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

import pipegrad
from pipegrad import Scheduler, Stage
from pipegrad.errors import ScheduleError
from pipegrad.schedules import Program
from pipegrad.simulation.explain.explanation import explain
from pipegrad.simulation.timeline import COMPUTE, Timeline
from tests.support.gradients.cases import DATA
from tests.support.pipeline.chains import WIDTH, Matrices, make, step
from tests.support.ranked import gathered

pytestmark = pytest.mark.ranks(4)
SLOW_SECONDS = 0.02
NUM_STEPS = 2
CASES = pytest.mark.parametrize("case", ["1f1b", "zbv"])


class Moody(Matrices):
    """The first stage is slow. The second one can be made to fail."""

    fails = False

    def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> torch.Tensor:
        if self.stage == 0:
            time.sleep(SLOW_SECONDS)
        if self.fails:
            raise RuntimeError("moody")
        out: torch.Tensor = super().forward(x, skip)
        return out


def pipeline(schedule: str = "1f1b", handlers: Any = (DATA,)) -> Scheduler:
    """Two copies of two ranks' pipelines; the second step learns nothing new."""
    scheduler = make(2, schedule, lambda i: Stage(Moody(i), i), handlers=list(handlers))
    step(scheduler)
    return scheduler


def train(scheduler: Scheduler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    step(scheduler)
    modules = [stage.module for stage in scheduler.steps.pipeline.stages]
    found = [p.grad.clone() for m in modules for p in m.parameters() if p.grad is not None]
    scheduler.sync.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return found


@cache  # the tests of a file run in the same processes
def of(schedule: str) -> tuple[Timeline, Program]:
    """Records steps; gradients have the bits of steps that are not recorded."""
    plain, scheduler = pipeline(schedule), pipeline(schedule)
    optimizers = [s.optimizer(torch.optim.SGD, lr=0.1) for s in (plain, scheduler)]
    expected = [train(plain, optimizers[0]) for _ in range(NUM_STEPS + 1)]
    with pipegrad.record(scheduler, steps=NUM_STEPS) as recording:
        found = [train(scheduler, optimizers[1]) for _ in range(NUM_STEPS + 1)]
    timeline = recording.timeline()
    for each in (plain, scheduler):
        each.close()
    assert scheduler.sync.tape.recorder is None
    for one, other in zip(expected, found, strict=True):
        assert one
        assert len(one) == len(other)
        assert all(map(torch.equal, one, other))
    return timeline, scheduler.program


@cache
def sharded() -> Timeline:
    """Parameters come back from their shards, so ranks wait for them at first use."""
    scheduler = make(2, "1f1b", lambda i: Stage(Moody(i), i), handlers=["sharded"])
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.1)
    with pipegrad.record(scheduler) as recording:
        for _ in range(3):
            step(scheduler)
            optimizer.step()
            optimizer.zero_grad()
    timeline = recording.timeline()
    scheduler.close()
    return timeline


def actions(timeline: Timeline, number: int) -> list[str]:
    return [s.action for s in timeline.spans if s.kind in COMPUTE and s.step == number]


@CASES
def test_actions_waits_and_transfers_are_recorded_where_they_were(case: str) -> None:
    timeline, program = of(case)
    rows = [[str(a) for a in row] for row in program.schedule.actions]
    for number in range(NUM_STEPS):
        assert sorted(actions(timeline, number)) == sorted(a for row in rows for a in row)
    for own in range(2):
        spans = [s for s in timeline.on_rank(own) if s.kind in COMPUTE and s.step == 0]
        assert [s.action for s in spans] == rows[own]
    # Waits and transfers name their peer and channel.
    timeline, program = of(case)
    named = ("wait for receive", "wait for send", "transfer")
    spans = [s for s in timeline.spans if s.kind in named]
    for span in spans:
        assert span.label == program.transfer(span.which, span.microbatch)
        link, _, source, target = program.channels[span.which]
        here, there = (target, source) if span.kind == "wait for receive" else (source, target)
        assert (span.rank, span.peer) == (here, there)
        assert span.stage == program.links[link].producer
    channels = len(program.channels) * program.schedule.num_microbatches
    assert sum(s.kind == "transfer" for s in spans) == NUM_STEPS * channels


@pytest.mark.parametrize("case", ["1f1b", "zbv", "sharded"])
def test_the_spans_of_a_rank_cover_its_steps_and_do_not_overlap(case: str) -> None:
    timeline = sharded() if case == "sharded" else of(case)[0]
    for own in range(2):
        assert all(a.end == b.begin for a, b in pairwise(timeline.on_rank(own)))
        for number in range(len(timeline.step_ends)):
            part = timeline.of_step(number)
            covered = sum(span.seconds for span in part.on_rank(own))
            assert covered == pytest.approx(part.seconds, rel=0.01)


def test_waits_reductions_and_parameter_syncs_are_recorded_alike() -> None:
    timeline, _ = of("1f1b")
    waits = [s for s in timeline.spans if s.kind == "wait for receive" and s.step == 1]
    (first,) = [s for s in waits if s.rank == 1 and s.label == "x of 0F0"]
    (slow,) = [s for s in timeline.spans if s.step == 1 and s.kind == "F" and s.action == "0F0"]
    assert slow.seconds >= SLOW_SECONDS
    assert (first.peer, first.begin < slow.end <= first.end) == (0, True)
    # Reductions the optimizer and waits for all ranks are recorded.
    reductions = [s for s in timeline.spans if s.kind == "reduction"]
    assert sorted((s.rank, s.step, s.which) for s in reductions) == sorted(
        (r, number, i)
        for number in range(NUM_STEPS)
        for i, c in enumerate(timeline.collectives)
        for r in c.ranks
    )
    assert all(s.label == timeline.collectives[s.which].name for s in reductions)
    for number in range(NUM_STEPS):
        for own in range(2):
            spans = [s for s in timeline.on_rank(own) if s.step == number]
            assert sum(s.kind == "optimizer" for s in spans) == 1
            assert sum(s.kind == "wait for reduction" for s in spans) == 1
            labels = {s.label for s in spans if s.kind == "wait for ranks"}
            assert {"the norm of the gradients", "the loss of all ranks"} <= labels
    # Parameter syncs and the waits for them are recorded.
    syncs = [s for s in sharded().spans if s.kind == "parameter sync"]
    # That of the last step may still be on its way when the recording ends.
    assert {sum(s.rank == r for s in syncs) for r in range(2)} <= {2, 3}
    assert all(s.which >= 0 and s.label.startswith("bucket ") for s in syncs)
    # All ranks of a pipeline get the same timeline.
    timelines = gathered(of("1f1b")[0])
    assert sorted(sum(a == b for b in timelines) for a in timelines) == [2, 2, 2, 2]


def test_steps_that_fail_or_have_other_microbatches_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = pipeline()
    pipeline_rank = scheduler.topology.coordinate("pp")
    with pipegrad.record(scheduler) as recording:
        for number in range(3):
            for stage in scheduler.steps.pipeline.stages:
                stage.module.fails = number == 1 and pipeline_rank == 1  # type: ignore[assignment]
            if number == 1:
                with pytest.raises(Exception, match="moody"):
                    step(scheduler)
            else:
                step(scheduler)
    timeline = recording.timeline()
    scheduler.close()
    first, failed, last = (sorted(actions(timeline, number)) for number in range(3))
    assert first == last
    assert len(first) == 16
    assert set(failed) < set(first)
    assert "0F0" in failed
    assert not [s for s in timeline.spans if s.step == 1 and s.action == "1F0"]
    # A timeline has the microbatches of its steps. A recorded step has another number of
    # microbatches than the Scheduler's steps.
    scheduler = pipeline()
    number = 2 * scheduler.schedule.num_microbatches
    for stage in scheduler.steps.pipeline.stages:
        stage.module.zero_grad()
    x = torch.ones(number, WIDTH)
    with pipegrad.record(scheduler) as recording:
        scheduler.step(x, target=x, num_microbatches=number)
    monkeypatch.delattr("os.sched_getaffinity", raising=False)  # as on macOS
    timeline = recording.timeline()
    scheduler.close()
    assert max(s.microbatch for s in timeline.spans) == number - 1
    assert not any("no advice" in note for note in explain(timeline).notes)
    assert timeline.noted("busy_cores") > 0
    assert len(timeline.layers) in (0, len(timeline.stage_to_rank))
    assert timeline.num_microbatches == number
    # What cannot be recorded is refused on all ranks.
    scheduler = pipeline()
    for steps in (0, True, "3"):
        with (
            pytest.raises(ScheduleError, match="at least 1"),
            pipegrad.record(scheduler, steps=steps),  # type: ignore[arg-type]
        ):
            pass
    with pipegrad.record(scheduler) as recording:
        with (
            pytest.raises(ScheduleError, match="is being recorded"),
            pipegrad.record(scheduler, steps=1),
        ):
            pass
        with pytest.raises(ScheduleError, match="no training step was recorded"):
            recording.timeline()
        step(scheduler)
        assert len(recording.timeline().step_ends) == 1
    scheduler.close()
    assert len(recording.timeline().step_ends) == 1  # what was recorded is not lost
