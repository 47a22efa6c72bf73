"""Recorded steps of real ranks: each action once, the right waits, 100 %, the same gradients."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch

import pipegrad
from pipegrad import Scheduler, Stage
from pipegrad.errors import ScheduleError
from pipegrad.simulation.explain.explanation import explain
from pipegrad.simulation.timeline import COMPUTE, Timeline
from tests.support.gradients.cases import DATA, Case, Replies, on, replies
from tests.support.pipeline.chains import WIDTH, Matrices, make, step

FOUR: list[Case] = []
four = replies(4, FOUR)
SLOW_SECONDS = 0.02
NUM_STEPS = 2


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


def moody(stage: int) -> Stage:
    return Stage(Moody(stage), stage)


def pipeline(schedule: str = "1f1b", **options: Any) -> Scheduler:
    """Two copies of two ranks' pipelines; the second step learns nothing new."""
    scheduler = make(2, schedule, moody, handlers=[DATA], **options)
    step(scheduler)
    return scheduler


def gradients(scheduler: Scheduler) -> list[torch.Tensor]:
    return [
        p.grad.clone()
        for stage in scheduler._stages.values()
        for p in stage.module.parameters()
        if p.grad is not None
    ]


def train(scheduler: Scheduler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    step(scheduler)
    found = gradients(scheduler)
    scheduler.sync.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return found


def of(schedule: str) -> Any:
    plain, scheduler = pipeline(schedule), pipeline(schedule)
    optimizers = [s.optimizer(torch.optim.SGD, lr=0.1) for s in (plain, scheduler)]
    expected = [train(plain, optimizers[0]) for _ in range(NUM_STEPS + 1)]
    with pipegrad.record(scheduler, steps=NUM_STEPS) as recording:
        found = [train(scheduler, optimizers[1]) for _ in range(NUM_STEPS + 1)]
    timeline, program = recording.timeline(), scheduler.program
    for each in (plain, scheduler):
        each.close()
    steps = zip(expected, found, strict=True)
    equal = [torch.equal(a, b) for pair in steps for a, b in zip(*pair, strict=True)]
    return timeline, program, equal, scheduler.sync.tape.recorder


@on(FOUR)
def whole() -> Any:
    return of("1f1b")


@on(FOUR)
def split() -> Any:
    return of("zbv")


@on(FOUR)
def sharded() -> Any:
    """Parameters come back from their shards, so ranks wait for them at first use."""
    scheduler = make(2, "1f1b", moody, handlers=["sharded"])
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.1)
    with pipegrad.record(scheduler) as recording:
        for _ in range(3):
            step(scheduler)
            optimizer.step()
            optimizer.zero_grad()
    timeline = recording.timeline()
    scheduler.close()
    return timeline


@on(FOUR)
def failing() -> Any:
    """A good step, one that fails on the second stage, and a good one."""
    scheduler = pipeline()
    errors, pipeline_rank = [], scheduler.topology.coordinate("pp")
    with pipegrad.record(scheduler) as recording:
        for number in range(3):
            for stage in scheduler._stages.values():
                stage.module.fails = number == 1 and pipeline_rank == 1  # type: ignore[assignment]
            try:
                step(scheduler)
            except Exception as error:  # noqa: BLE001 - its words are compared
                errors.append(str(error))
    timeline, own = recording.timeline(), recording.own_timeline()
    scheduler.close()
    return timeline, own, errors


@on(FOUR)
def refusals() -> list[str]:
    scheduler = pipeline()
    messages = list[str]()

    def refused(steps: Any) -> None:
        with pytest.raises(ScheduleError) as caught, pipegrad.record(scheduler, steps=steps):
            pass
        messages.append(str(caught.value))

    for steps in (0, True, "3"):
        refused(steps)
    with pipegrad.record(scheduler) as recording:
        refused(1)
        with pytest.raises(ScheduleError) as caught:
            recording.timeline()
        messages.append(str(caught.value))
        step(scheduler)
        inside = recording.timeline()
    assert len(inside.step_ends) == 1
    scheduler.close()
    assert len(recording.timeline().step_ends) == 1  # what was recorded is not lost
    return messages


@on(FOUR)
def other_microbatches() -> int:
    """A recorded step has another number of microbatches than the Scheduler's steps."""
    scheduler = pipeline()
    number = 2 * scheduler.schedule.num_microbatches
    for stage in scheduler._stages.values():
        stage.module.zero_grad()
    with pipegrad.record(scheduler) as recording:
        scheduler.step(torch.ones(number, WIDTH), target=torch.ones(number, WIDTH),
                       num_microbatches=number)  # fmt: skip
    timeline = recording.timeline()
    scheduler.close()
    assert max(s.microbatch for s in timeline.spans) == number - 1
    assert not any("no advice" in note for note in explain(timeline).notes)
    return timeline.num_microbatches // scheduler.schedule.num_microbatches


def actions(timeline: Timeline, number: int) -> list[str]:
    return [s.action for s in timeline.spans if s.kind in COMPUTE and s.step == number]


@pytest.mark.parametrize("case", ["whole", "split"])
def test_each_action_is_recorded_once_in_each_step_on_its_rank(case: str, four: Replies) -> None:
    for reply in four:
        timeline, program, *_ = reply[case]
        schedule = program.schedule
        expected = [str(a) for row in schedule.actions for a in row]
        for number in range(NUM_STEPS):
            assert sorted(actions(timeline, number)) == sorted(expected)
        for own in range(2):
            spans = [s for s in timeline.on_rank(own) if s.kind in COMPUTE and s.step == 0]
            assert [s.action for s in spans] == [str(a) for a in schedule.actions[own]]


@pytest.mark.parametrize("case", ["whole", "split", "sharded"])
def test_the_spans_of_a_rank_cover_its_steps_and_do_not_overlap(case: str, four: Replies) -> None:
    for reply in four:
        timeline = reply[case][0] if case != "sharded" else reply[case]
        for own in range(2):
            spans = timeline.on_rank(own)
            assert all(a.end == b.begin for a, b in pairwise(spans))
            for number in range(len(timeline.step_ends)):
                part = timeline.of_step(number)
                covered = sum(span.seconds for span in part.on_rank(own))
                assert covered == pytest.approx(part.seconds, rel=0.01)


@pytest.mark.parametrize("case", ["whole", "split"])
def test_waits_and_transfers_name_their_peer_and_channel(case: str, four: Replies) -> None:
    for reply in four:
        timeline, program, *_ = reply[case]
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


def test_a_rank_waits_for_the_first_value_of_a_slow_stage(four: Replies) -> None:
    timeline, *_ = four[0]["whole"]
    waits = [s for s in timeline.spans if s.kind == "wait for receive" and s.step == 1]
    (first,) = [s for s in waits if s.rank == 1 and s.label == "x of 0F0"]
    (slow,) = [s for s in timeline.spans if s.step == 1 and s.kind == "F" and s.action == "0F0"]
    assert slow.seconds >= SLOW_SECONDS
    assert (first.peer, first.begin < slow.end <= first.end) == (0, True)


def test_reductions_the_optimizer_and_waits_for_all_ranks_are_recorded(four: Replies) -> None:
    for reply in four:
        timeline, program, *_ = reply["whole"]
        names = {i: c.name for i, c in enumerate(program.collectives)}
        reductions = [s for s in timeline.spans if s.kind == "reduction"]
        found = sorted((s.rank, s.step, s.which) for s in reductions)
        expected = sorted(
            (r, number, i)
            for number in range(NUM_STEPS)
            for i, c in enumerate(program.collectives)
            for r in c.ranks
        )
        assert found == expected
        assert all(s.label == names[s.which] for s in reductions)
        for number in range(NUM_STEPS):
            for own in range(2):
                kinds = [s for s in timeline.on_rank(own) if s.step == number]
                assert sum(s.kind == "optimizer" for s in kinds) == 1
                exposed = [s for s in kinds if s.kind == "wait for reduction"]
                assert len(exposed) == 1
                labels = {s.label for s in kinds if s.kind == "wait for ranks"}
                assert {"the norm of the gradients", "the loss of all ranks"} <= labels


def test_parameter_syncs_and_the_waits_for_them_are_recorded(four: Replies) -> None:
    for reply in four:
        timeline: Timeline = reply["sharded"]
        syncs = [s for s in timeline.spans if s.kind == "parameter sync"]
        # That of the last step may still be on its way when the recording ends.
        assert {Counter(s.rank for s in syncs)[r] for r in range(2)} <= {2, 3}
        assert all(s.which >= 0 and s.label.startswith("bucket ") for s in syncs)


def test_gradients_are_the_same_bits_as_without_recording(four: Replies) -> None:
    for reply in four:
        for case in ("whole", "split"):
            *_, equal, recorder = reply[case]
            assert equal
            assert all(equal)
            assert recorder is None


def test_all_ranks_of_a_pipeline_get_the_same_timeline(four: Replies) -> None:
    timelines = [reply["whole"][0] for reply in four]
    same = [[a == b for b in timelines] for a in timelines]
    pairs = {frozenset(j for j in range(4) if same[i][j]) for i in range(4)}
    assert sorted(map(len, pairs)) == [2, 2]


def test_a_step_that_fails_is_recorded_as_far_as_it_went_and_the_next_one_whole(
    four: Replies,
) -> None:
    for reply in four:
        timeline, own, errors = reply["failing"]
        assert len(errors) == 1
        assert "moody" in errors[0]
        first, failed, last = (sorted(actions(timeline, number)) for number in range(3))
        assert first == last
        assert len(first) == 16
        assert set(failed) < set(first)
        assert "0F0" in failed
        assert not [s for s in timeline.spans if s.step == 1 and s.action == "1F0"]
        assert {s.rank for s in own.spans} == {reply["failing"][1].spans[0].rank}


def test_own_timelines_have_the_actions_of_one_rank(four: Replies) -> None:
    for number, reply in enumerate(four):
        _, own, _ = reply["failing"]
        assert {s.rank for s in own.spans} == {number // 2}
        stages = {s.stage for s in own.spans if s.kind in COMPUTE}
        assert stages == {number // 2}


def test_a_timeline_has_the_microbatches_of_its_steps(four: Replies) -> None:
    assert [reply["other_microbatches"] for reply in four] == [2] * 4


def test_what_cannot_be_recorded_is_refused_on_all_ranks(four: Replies) -> None:
    for reply in four:
        *numbers, twice, empty = reply["refusals"]
        assert all("at least 1" in message for message in numbers)
        assert "is being recorded" in twice
        assert "no training step was recorded" in empty
