"""Schedules that change between steps: alike on all ranks, exact, and never a hang."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad import Topology, Work
from pipegrad.comm import sync_points
from pipegrad.comm.agreement import agree_keeping
from pipegrad.comm.store import store
from pipegrad.observe.links import measure_hops
from pipegrad.pipeline.programs import StepTimes
from pipegrad.schedules import Schedule, registry
from pipegrad.schedules.measured import MeasuredGenerator, Times
from tests.support.gradients.cases import outcome, rank
from tests.support.pipeline.layers import WIDTH, Pipeline
from tests.support.ranked import gathered

pytestmark = pytest.mark.ranks(3)

RANKS, ROWS, OWN = 3, 8, 8
FAST, SLOW = (0.0, 0.0), (0.0, 1.5)
BEGIN, LATER = [3, 2, 1], [4, 3, 1]  # warm-ups, where hops are fast and where the last one is slow


def script(hops: Sequence[float]) -> Times:
    """Returns times where a forward and a backward take 3 together."""
    return Times((1.0,) * RANKS, (2.0,) * RANKS, tuple(hops))


@contextmanager
def told(*hops: Sequence[float]) -> Iterator[None]:
    """Lets the steps that are read inside have these times."""
    with mock.patch.object(StepTimes, "times", side_effect=[script(each) for each in hops]):
        yield


class Adapting(Pipeline):
    """A pipeline of three ranks that may fail, and tells its warm-ups."""

    def __init__(self, schedule: Any = "adaptive-1f1b", **options: Any) -> None:
        super().__init__(RANKS, schedule=schedule, num_microbatches=OWN, **options)
        self.error: Exception | None = None
        self.late_error: Exception | None = None  # of the last backward
        self.tells = False  # whether this rank tells others when it has ended a step
        self.forwards = 0
        self.own.register_forward_pre_hook(self._before)
        self.own.register_forward_hook(self._after)

    def _before(self, _module: nn.Module, _inputs: object) -> None:
        if self.error is not None:
            raise self.error

    def _after(self, _module: nn.Module, _inputs: object, out: Tensor) -> None:
        self.forwards += 1
        error = self.late_error
        if error is not None and self.forwards == OWN:
            out.register_hook(lambda _: fail_behind_others(error))

    def step(self, rows: int = ROWS, **options: Any) -> str:
        self.forwards = 0
        return super().step(rows, **options)

    def _train(self, x: Tensor, **options: Any) -> None:
        self.own.zero_grad()
        result = self.scheduler.step(x, **options)
        if self.tells:
            store().set(f"ended {rank()}", "")
        float(result.loss)

    def warm_ups(self) -> list[int]:
        return warm_ups_of(self.scheduler.schedule)


def warm_ups_of(schedule: Schedule) -> list[int]:
    """Returns for each rank how many forwards come before its first backward."""
    return [[action.kind in "BI" for action in row].index(True) for row in schedule.actions]


def fail_behind_others(error: Exception) -> None:
    """Raises when all other ranks have returned from the step."""
    store().wait([f"ended {number}" for number in range(1, RANKS)], timedelta(seconds=60))
    raise error


def test_the_warm_up_follows_and_gradients_stay_those_of_one_process() -> None:
    """Fast, slow and fast again; the ranks meet only where the schedule changes."""
    pipeline, seen, numbers = Adapting(), set[int](), StepTimes.numbers

    def counted(times: StepTimes) -> list[float]:
        seen.update(map(len, times._computes.values()))
        return numbers(times)

    wanted = [BEGIN, BEGIN, BEGIN, BEGIN, LATER, LATER, BEGIN, BEGIN]
    with (
        told(FAST, FAST, SLOW, SLOW, FAST, FAST),
        mock.patch.object(StepTimes, "numbers", counted),
        mock.patch("pipegrad.pipeline.programs.agree_keeping", wraps=agree_keeping) as met,
    ):
        for seed, warm_ups in enumerate(wanted):
            assert pipeline.step(seed=seed) == "True"
            assert met.call_count == seed // 2  # the first times make the first plan
            proof = pipeline.scheduler.proof
            assert pipeline.warm_ups() == list(proof.live_activations) == warm_ups
    assert seen == {OWN}  # computes of one step alone
    pipeline.close()


def test_other_numbers_go_on_and_a_failure_ends_its_step_alone() -> None:
    """Before and after a change."""
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    with closing(Adapting()) as pipeline:
        with told(FAST, SLOW, SLOW, SLOW):
            for options in ({}, {"num_microbatches": 4}) * 2 + ({},):
                assert pipeline.step(**options) == "True"
                assert float(pipeline.scheduler.evaluate(x, target=x).loss) > 0
        others = pipeline.scheduler.steps._kinds[False, 4, 1].program.schedule
        assert pipeline.warm_ups() == warm_ups_of(others) == LATER
    # A failure in the step of a change ends that step alone. A stage fails in the step of a change,
    # and in a step whose times are to be read.
    with closing(Adapting()) as pipeline:
        step = pipeline.step
        assert step() == step() == "True"
        with told(SLOW, SLOW):
            pipeline.error = OSError("no more") if rank() == 1 else None
            said = step()
            assert "no more" in said
            assert said.startswith("OSError" if rank() == 1 else "StepError")
            pipeline.error = None
            assert step() == "True"
            assert pipeline.warm_ups() == LATER
            assert step() == "True"
        with told(SLOW):
            # The other ranks have ended the step when the first one fails in its last backward.
            pipeline.late_error = OSError("too late") if rank() == 0 else None
            pipeline.tells = True
            assert "too late" in step()
        pipeline.late_error = None
        assert step() == "True"
        assert pipeline.scheduler.times == script(SLOW)


@pytest.mark.parametrize(
    ("own", "others", "seconds", "words"),
    [
        # One rank alone comes to a meeting; then all come.
        (SLOW, FAST, 1.0, "another schedule: nothing heard from ranks [0, 2]"),
        ((1.5, 0.0), SLOW, 60.0, "ranks disagree on the schedule"),
    ],
)
def test_ranks_that_disagree_all_raise_and_go_on(
    own: tuple[float, float], others: tuple[float, float], seconds: float, words: str
) -> None:
    """Ranks that read other times than the rest: a bug, or memory that has changed."""
    with closing(Adapting()) as pipeline:
        assert pipeline.step() == pipeline.step() == "True"
        with told(FAST):
            assert pipeline.step() == "True"
        pipeline.scheduler._programs._timeout_seconds = seconds
        with told(own if rank() == 1 else others):
            assert words in pipeline.step()
        with told(FAST):
            assert pipeline.step() == "True"


class SlowHop(sync_points.Backend):
    """A network whose last hop takes long, both ways."""

    def __init__(self, seconds: float = 0.02) -> None:
        self.seconds = seconds

    def send(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, tag: int) -> Work:
        is_forward = dist.get_process_group_ranks(group)[-1] == 2
        if rank() == 2 or (rank() == 1 and is_forward):
            time.sleep(self.seconds)
        return super().send(group, tensor, peer, tag)


@pytest.mark.parametrize("name", ["hop-aware-1f1b", "hop-aware-zb-h1", "auto", "adaptive-1f1b"])
def test_by_name_alone_hops_are_measured_in_the_second_step(name: str) -> None:
    """Over a network whose last hop is slow."""
    with sync_points.using(network := SlowHop()), closing(Adapting(name)) as pipeline:
        scheduler = pipeline.scheduler
        assert pipeline.step() == pipeline.step() == "True"
        assert (scheduler.times, pipeline.warm_ups(), scheduler.choice) == (None, BEGIN, None)
        assert pipeline.step() == pipeline.step() == "True"
        times, warm_ups, choice = scheduler.times, pipeline.warm_ups(), scheduler.choice
    assert times is not None
    # What is measured depends on the machine. What is made of it is the same everywhere. The
    # adaptive schedule has changed twice by then, and only the last times are kept.
    if name != "adaptive-1f1b":
        planned = registry.resolve(name).plugin
        assert isinstance(planned, MeasuredGenerator)
        made = planned.planned(times).generate(num_ranks=RANKS, num_microbatches=OWN)
        assert warm_ups == warm_ups_of(made)
    assert times.hop_seconds[1] >= network.seconds
    assert all(seconds > 0 for seconds in times.compute_seconds)
    splits = name == "hop-aware-zb-h1"
    assert [seconds > 0 for seconds in times.weight_seconds] == [splits] * RANKS
    assert bool(choice) is (name == "auto")
    # The numbers of all ranks are equal, to the last bit.
    found = warm_ups, times, choice and choice.to_json()
    assert gathered(found) == [found] * RANKS


def test_options_that_differ_are_refused_and_with_costs_nothing_is_measured() -> None:
    """Ranks that were given other options, which only later schedules would show."""
    spec = {"name": "adaptive-1f1b", "max_live_activations": 4 + rank() // 2}
    said = outcome(lambda: Adapting(spec))
    assert said.startswith("AgreementError: ranks disagree on the schedule")
    assert "'max_live_activations': '5'" in said
    # With costs nothing is measured.
    costs = {"hop_seconds": [0.0, 1.5], "compute_seconds": 3.0}
    with (
        mock.patch("pipegrad.pipeline.steps.StepTimes") as watched,
        closing(Adapting({"name": "hop-aware-1f1b", **costs})) as pipeline,
    ):
        assert [pipeline.step() for _ in range(3)] == ["True"] * 3
        assert pipeline.warm_ups() == LATER
        assert pipeline.scheduler.times is None
        watched.assert_not_called()


# measure_hops: each hop's own time, the same on all ranks.


@pytest.mark.ranks(3)
def test_each_hop_is_measured_by_itself_and_told_to_all() -> None:
    slow_seconds = 0.2
    with sync_points.using(SlowHop(slow_seconds)):
        found = measure_hops(Topology.create(pipeline=3), num_bytes=2**16, repeats=3)
    assert gathered(found) == [found] * 3
    fast, slow = found
    assert 0 < fast < slow_seconds <= slow


@pytest.mark.ranks(2)
def test_a_pipeline_of_one_rank_has_no_hops() -> None:
    assert measure_hops(Topology.create(pipeline=1), num_bytes=4) == ()
