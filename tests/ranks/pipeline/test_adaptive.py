"""Schedules that change between steps: alike on all ranks, exact, and never a hang."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology, Work
from pipegrad.comm import sync_points
from pipegrad.comm.agreement import agree, store
from pipegrad.pipeline.step_times import Layout, StepTimes
from pipegrad.schedules import Schedule, registry
from pipegrad.schedules.measured import MeasuredGenerator, Times
from tests.support.gradients.cases import Case, Replies, on, outcome, rank, replies
from tests.support.rounding import rounding

TRIO: list[Case] = []
trio = replies(3, TRIO)

RANKS, WIDTH, ROWS, OWN = 3, 4, 8, 8
MOST = rounding(RANKS * WIDTH * ROWS)
SOON = 30.0  # far more than any step takes, and less than a time-out
FAST, SLOW = (0.0, 0.0), (0.0, 1.5)


def script(hops: Sequence[float]) -> Times:
    """Returns times where a forward and a backward take 3 together."""
    return Times((1.0,) * RANKS, (2.0,) * RANKS, tuple(hops))


@contextmanager
def told(*hops: Sequence[float]) -> Iterator[None]:
    """Lets the steps that are read inside have these times."""
    with mock.patch.object(Layout, "times", side_effect=[script(each) for each in hops]):
        yield


class Pipeline:
    """One layer a rank, and the same layers in one process."""

    def __init__(self, schedule: Any = "adaptive-1f1b", **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(RANKS)]
        torch.manual_seed(0)
        self.true = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(RANKS)]
        self.own = layers[rank()]
        self.error: Exception | None = None
        self.late_error: Exception | None = None  # of the last backward
        self.tells = False  # whether this rank tells others when it has ended a step
        self.own.register_forward_pre_hook(self._before)
        self.own.register_forward_hook(self._after)
        self.forwards = 0
        self.scheduler = Scheduler(
            [Stage(self.own, rank())],
            Topology.create(pipeline=RANKS),
            schedule=schedule,
            num_microbatches=OWN,
            loss_fn=lambda out, target: (out - target).square().mean(),
            **{"agree_seconds": 5.0, **options},
        )

    def _before(self, _module: nn.Module, _inputs: object) -> None:
        if self.error is not None:
            raise self.error

    def _after(self, _module: nn.Module, _inputs: object, out: Tensor) -> None:
        self.forwards += 1
        error = self.late_error
        if error is not None and self.forwards == OWN:
            out.register_hook(lambda _: fail_behind_others(error))

    def step(self, seed: int = 0, **options: Any) -> str:
        """Takes a step; returns what it raised, or whether gradients are right."""
        began = time.monotonic()
        said = outcome(lambda: self._distance(seed, **options) <= MOST or "wrong")
        return said if time.monotonic() - began < SOON else f"too late: {said}"

    def _distance(self, seed: int, **options: Any) -> float:
        torch.manual_seed(seed)
        x, y = torch.randn(2, ROWS, WIDTH).unbind()
        self.own.zero_grad()
        self.forwards = 0
        result = self.scheduler.step(x, target=y, **options)
        if self.tells:
            store().set(f"ended {rank()}", "")
        float(result.loss)
        for module in self.true:
            module.zero_grad()
        nn.Sequential(*self.true)(x).sub(y).square().mean().backward()
        pairs = zip(self.own.parameters(), self.true[rank()].parameters(), strict=True)
        return max(_error(p.grad, q.grad) for p, q in pairs)

    def warm_ups(self) -> list[int]:
        return warm_ups_of(self.scheduler.schedule)


def warm_ups_of(schedule: Schedule) -> list[int]:
    """Returns for each rank how many forwards come before its first backward."""
    return [[action.kind in "BI" for action in row].index(True) for row in schedule.actions]


def fail_behind_others(error: Exception) -> None:
    """Raises when all other ranks have returned from the step."""
    store().wait([f"ended {number}" for number in range(1, RANKS)], timedelta(seconds=SOON))
    raise error


def _error(found: Tensor | None, true: Tensor | None) -> float:
    assert found is not None
    assert true is not None
    return float((found - true).abs().max() / true.abs().max())


@on(TRIO)
def follows() -> Any:
    """Fast, slow and fast again; the ranks meet only where the schedule changes."""
    pipeline = Pipeline()
    found, proven, seen = [], 0, set[int]()
    numbers = StepTimes.numbers

    def counted(times: StepTimes) -> list[float]:
        seen.update(map(len, times._computes.values()))
        return numbers(times)

    with (
        told(FAST, FAST, SLOW, SLOW, FAST, FAST),
        mock.patch.object(StepTimes, "numbers", counted),
        mock.patch("pipegrad.pipeline.adapting.agree", wraps=agree) as met,
    ):
        for seed in range(8):
            said, meetings = pipeline.step(seed), met.call_count
            proof = pipeline.scheduler.proof
            proven = max(proven, proof.receive_buffers[rank()])
            found.append((said, pipeline.warm_ups(), list(proof.live_activations), meetings))
    made = pipeline.scheduler.receive_buffers
    pipeline.scheduler.close()
    return found, made <= proven, seen


def test_the_warm_up_follows_and_gradients_stay_those_of_one_process(trio: Replies) -> None:
    begin, slow = [3, 2, 1], [4, 3, 1]
    warm_ups = [begin, begin, begin, begin, slow, slow, begin, begin]
    meetings = [0, 0, 1, 1, 2, 2, 3, 3]  # the first times make the first plan
    for reply in trio:
        found, buffers_are_proven, seen = reply["follows"]
        assert [said for said, *_ in found] == ["True"] * 8
        assert [(w, p) for _, w, p, _ in found] == [(w, w) for w in warm_ups]
        assert [m for *_, m in found] == meetings
        assert buffers_are_proven
        assert seen == {OWN}  # computes of one step alone


@on(TRIO)
def beside_others() -> Any:
    """Evaluations and steps of other numbers, before and after a change."""
    pipeline = Pipeline()
    x = torch.ones(ROWS, WIDTH)
    found = []
    with told(FAST, SLOW, SLOW, SLOW):
        for number in (None, 4, None, 4, None):
            options = {} if number is None else {"num_microbatches": number}
            found.append(pipeline.step(**options))
            found.append(outcome(lambda: float(pipeline.scheduler.evaluate(x, target=x).loss) > 0))
    found.append(str(pipeline.warm_ups()))
    others = pipeline.scheduler._kinds[False, 4].program.schedule
    found.append(str([[a.kind for a in actions].index("B") for actions in others.actions]))
    pipeline.scheduler.close()
    return found


def test_evaluations_and_other_numbers_of_microbatches_go_on(trio: Replies) -> None:
    for reply in trio:
        assert reply["beside_others"] == [*["True"] * 10, "[4, 3, 1]", "[4, 3, 1]"]


@on(TRIO)
def failures() -> Any:
    """A stage fails in the step of a change, and in a step whose times are to be read."""
    pipeline = Pipeline()
    found = [pipeline.step(), pipeline.step()]
    with told(SLOW, SLOW):
        pipeline.error = OSError("no more") if rank() == 1 else None
        found.append(pipeline.step())
        pipeline.error = None
        found += [pipeline.step(), str(pipeline.warm_ups()), pipeline.step()]
    with told(SLOW):
        # The other ranks have ended the step when the first one fails in its last backward.
        pipeline.late_error = OSError("too late") if rank() == 0 else None
        pipeline.tells = True
        found.append(pipeline.step())
    pipeline.late_error = None
    found += [pipeline.step(), str(pipeline.scheduler.times == script(SLOW))]
    pipeline.scheduler.close()
    return found


def test_a_failure_in_the_step_of_a_change_ends_that_step_alone(trio: Replies) -> None:
    for number, reply in enumerate(trio):
        first, second, failed, third, warm_ups, fourth, late, *rest = reply["failures"]
        assert (first, second, third, fourth, *rest) == ("True",) * 6
        assert "too late" in late
        assert "no more" in failed
        assert failed.startswith("OSError" if number == 1 else "StepError")
        assert warm_ups == "[4, 3, 1]"


@on(TRIO)
def disagreements() -> Any:
    """Ranks that read other times than the rest: a bug, or memory that has changed."""
    pipeline = Pipeline(agree_seconds=1.0)
    found = [pipeline.step(), pipeline.step()]
    with told(FAST):
        found.append(pipeline.step())
    for own, others in ((SLOW, FAST), ((1.5, 0.0), SLOW)):
        with told(own if rank() == 1 else others):
            found.append(pipeline.step())
        with told(FAST):
            found.append(pipeline.step())
    pipeline.scheduler.close()
    return found


def test_ranks_that_disagree_all_raise_and_go_on(trio: Replies) -> None:
    for reply in trio:
        *good, alone, after_alone, differ, after_differ = reply["disagreements"]
        assert good == ["True"] * 3
        assert "another schedule: nothing heard from ranks [0, 2]" in alone
        assert "ranks disagree on the schedule" in differ
        assert (after_alone, after_differ) == ("True", "True")


class SlowHop(sync_points.Backend):
    """A network whose last hop takes long, both ways."""

    def send(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, tag: int) -> Work:
        if dist.get_rank() == 2 or (dist.get_rank() == 1 and self.is_forward(group)):
            time.sleep(SLOW_SECONDS)
        return super().send(group, tensor, peer, tag)

    @staticmethod
    def is_forward(group: dist.ProcessGroup) -> bool:
        return dist.get_process_group_ranks(group)[-1] == 2


SLOW_SECONDS = 0.02


@on(TRIO)
def measured() -> Any:
    """Schedules by name alone, over a network whose last hop is slow."""
    found = {}
    for name in ("hop-aware-1f1b", "hop-aware-zb-h1", "auto", "adaptive-1f1b"):
        with sync_points.using(SlowHop()):
            pipeline = Pipeline(name)
            said = [pipeline.step(), pipeline.step()]
            before = pipeline.scheduler.times, pipeline.warm_ups(), pipeline.scheduler.choice
            said += [pipeline.step(), pipeline.step()]
            choice = pipeline.scheduler.choice
            found[name] = (
                said,
                before,
                pipeline.warm_ups(),
                pipeline.scheduler.times,
                choice and choice.to_json(),
            )
            pipeline.scheduler.close()
    return found


def test_by_name_alone_hops_are_measured_in_the_second_step(trio: Replies) -> None:
    first = trio[0]["measured"]
    for name, (said, before, warm_ups, times, choice) in first.items():
        assert said == ["True"] * 4
        assert before == (None, [3, 2, 1], None)
        # What is measured depends on the machine. What is made of it is the same everywhere. The
        # adaptive schedule has changed twice by then, and only the last times are kept.
        if name != "adaptive-1f1b":
            planned = registry.resolve(name).plugin
            assert isinstance(planned, MeasuredGenerator)
            made = planned.planned(times).generate(num_ranks=RANKS, num_microbatches=OWN)
            assert warm_ups == warm_ups_of(made)
        assert times.hop_seconds[1] >= SLOW_SECONDS
        assert all(seconds > 0 for seconds in times.compute_seconds)
        splits = name == "hop-aware-zb-h1"
        assert [seconds > 0 for seconds in times.weight_seconds] == [splits] * RANKS
        assert bool(choice) is (name == "auto")
    # The numbers of all ranks are equal, to the last bit.
    assert [reply["measured"] for reply in trio[1:]] == [first] * 2


@on(TRIO)
def other_limits() -> Any:
    """Ranks that were given other options, which only later schedules would show."""
    spec = {"name": "adaptive-1f1b", "max_live_activations": 4 + rank() // 2}
    return outcome(lambda: Pipeline(spec))


def test_options_that_differ_are_refused_before_the_first_step(trio: Replies) -> None:
    for reply in trio:
        assert reply["other_limits"].startswith("AgreementError: ranks disagree on the schedule")
        assert "'max_live_activations': '5'" in reply["other_limits"]


@on(TRIO)
def static() -> Any:
    """A schedule that is given its costs measures nothing."""
    costs = {"hop_seconds": [0.0, 1.5], "compute_seconds": 3.0}
    pipeline = Pipeline({"name": "hop-aware-1f1b", **costs})
    with mock.patch("pipegrad.pipeline.step.StepTimes") as watched:
        said = [pipeline.step() for _ in range(3)]
    found = said, watched.call_count, pipeline.warm_ups(), pipeline.scheduler.times
    pipeline.scheduler.close()
    return found


def test_with_costs_nothing_is_measured(trio: Replies) -> None:
    assert [reply["static"] for reply in trio] == [(["True"] * 3, 0, [4, 3, 1], None)] * 3
