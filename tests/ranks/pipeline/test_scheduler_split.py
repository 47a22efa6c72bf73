"""Split backward in a Scheduler: what is final when, and what leaves early.

Mixtures of whole and split backwards: tests/fuzz/test_wirings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from pipegrad import GradientSync, Scheduler, Stage, find_tied
from pipegrad.comm.comm_stream import CommStream
from pipegrad.pipeline import split_backward
from tests.support.gradients.cases import DATA, SHARED, rank
from tests.support.pipeline.chains import make as make_chain
from tests.support.pipeline.chains import watched
from tests.support.pipeline.models import build
from tests.support.pipeline.pipelines import loss_of
from tests.support.pipeline.schedulers import batch, cut, named, share, topology

pytestmark = pytest.mark.ranks(4)
MICROBATCHES = 6
Event = tuple[str, Any]


@contextmanager
def noted(events: list[Event]) -> Iterator[None]:
    """Notes computes, products that waited, what is said to be final, and buckets that leave."""
    final, submit = GradientSync.parameters_final, CommStream.submit
    accumulate = split_backward.accumulate

    def say_final(self: GradientSync, stage: int, parameters: Any) -> None:
        events.append(("final", {id(p) for p in parameters}))
        final(self, stage, parameters)

    def say_products(found: Any) -> None:
        accumulate(found)
        events.append(("products", {id(uses[0].parameter) for uses in found}))

    def say_leaves(self: CommStream, task: Any, after: Any) -> Any:
        if isinstance(task, partial):  # and no meeting of all ranks
            events.append(("leaves", task.args[0].launch.bucket))
        return submit(self, task, after)

    with (
        mock.patch.object(GradientSync, "parameters_final", say_final),
        mock.patch("pipegrad.pipeline.weight_gradients.accumulate", say_products),
        mock.patch.object(CommStream, "submit", say_leaves),
        watched(lambda when, action: events.append((when, action))),
    ):
        yield


def events_of(schedule: str, pipeline: int, handlers: Sequence[str]) -> tuple[list[Event], Any]:
    """Returns those of a second step of the tied model, by names, and the buckets in order."""
    at, model, events = topology(pipeline), build("tied"), list[Event]()
    name, *flags = schedule.split()
    with noted(events):
        scheduler = Scheduler(
            stages := cut(model, (*range(pipeline),), at),
            at,
            schedule={"name": name, **dict.fromkeys(flags, True)},
            num_microbatches=MICROBATCHES,
            loss_fn=loss_of,
            tied=find_tied(model),
            handlers=handlers,
        )
        for step in range(2):
            events.clear()
            tokens, target = batch(step, MICROBATCHES * at.size("dp"))
            scheduler.step(share(tokens, at), target=share(target, at))
            for parameter in named(stages).values():
                parameter.grad = None
        names = {id(parameter): name for name, parameter in named(stages).items()}
    buckets = {bucket.index: bucket.names for bucket in scheduler.sync.plan.buckets}
    launches = [(launch.ready, buckets[launch.bucket]) for launch in scheduler.sync.plan.launches]
    scheduler.close()
    told: list[Event] = []
    for kind, what in events:
        parameters = kind in ("final", "products")
        found = buckets[what] if kind == "leaves" else what
        told.append((kind, {names[p] for p in what} if parameters else found))
    return told, launches


HEAD_FIRST = "zb-h1 head_w_first"


@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("schedule", ["zb-h1", HEAD_FIRST])
def test_each_parameter_is_final_once_nothing_of_it_waits(schedule: str, pipeline: int) -> None:
    stage = rank() * pipeline // 4
    events, launches = events_of(schedule, pipeline, [SHARED, DATA])
    last_inputs = events.index(("end", f"{stage}I{MICROBATCHES - 1}"))
    finals = [place for place, (kind, _) in enumerate(events) if kind == "final"]
    computed = [place for place, (kind, _) in enumerate(events) if kind == "products"]
    matrices = set().union(*(events[place][1] for place in computed))
    assert {name[1:] for name in matrices} <= {".weight", ".linear.weight"}
    assert finals[0] == last_inputs + 1
    names = [name for place in finals for name in events[place][1]]
    assert len(names) == len(set(names))
    first = events[finals[0]][1]
    assert first == set(names) - matrices
    assert ("0.weight" in first) == (stage == 0)
    assert {name[1:] for name in first} >= {".norm.weight", ".norm.bias", ".linear.bias"}
    for name in matrices:
        uses = [place for place in computed if name in events[place][1]]
        assert len(uses) == MICROBATCHES
        assert name in events[uses[-1] + 1][1]
        assert uses[-1] + 1 in finals
    assert all(events[place][1] <= events[place - 1][1] for place in finals[1:])
    if stage == pipeline - 1:
        assert_head_leaves_in_time(schedule, pipeline, events, launches)


def assert_head_leaves_in_time(
    schedule: str, pipeline: int, events: list[Event], launches: Any
) -> None:
    """A tied head leaves before the other weights are computed, if asked."""
    (tie,) = {bucket for _, bucket in launches if "0.weight" in str(bucket)}
    left = events.index(("leaves", tie))
    last_inputs = events.index(("end", f"{pipeline - 1}I{MICROBATCHES - 1}"))
    waiting = [
        place
        for place, (kind, what) in enumerate(events)
        if place > last_inputs and kind == "start" and what[1] == "W"
    ]
    assert len(waiting) == pipeline  # as many as the last rank is late, and its last one
    if schedule == HEAD_FIRST:
        assert last_inputs < left < waiting[0]
    else:
        assert left > waiting[-1]


def test_a_tied_head_that_comes_first_is_planned_before_all_others() -> None:
    late, early = (events_of(s, 2, [SHARED, DATA])[1] for s in ("zb-h1", HEAD_FIRST))
    assert len(late) == len(early) == 3  # of the tie, over replicas and over stages; of others
    assert "0.weight" in str(early[0])
    assert early[0][0] < min(ready for ready, _ in late)
    assert "0.weight" not in str(late[0]) or rank() > 0


@pytest.mark.parametrize("schedule", ["zbv", "zbv head_w_first"])
def test_a_tie_of_the_first_and_the_last_stage_of_zbv_costs_no_collective(schedule: str) -> None:
    def stage(index: int) -> Stage:
        torch.manual_seed(index)  # else all stages would begin alike
        return Stage(nn.Linear(4, 4), index)

    with closing(make_chain(4, schedule, stage, tied=[{0: "weight", 7: "weight"}])) as scheduler:
        assert scheduler.sync.plan.launches == ()
