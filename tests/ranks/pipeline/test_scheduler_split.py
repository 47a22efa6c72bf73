"""Split backward in a Scheduler: what is final when, and mixtures; see also test_scheduler_step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pipegrad import GradientSync, Scheduler, Stage, find_tied
from pipegrad.comm.comm_stream import CommStream
from pipegrad.pipeline import split_backward
from pipegrad.schedules import Action, Kind, Schedule
from tests.support.gradients.cases import DATA, SHARED, rank
from tests.support.pairwise import everything
from tests.support.pipeline import scales
from tests.support.pipeline.chains import make as make_chain
from tests.support.pipeline.chains import watched
from tests.support.pipeline.layers import blamed
from tests.support.pipeline.models import build
from tests.support.pipeline.pipelines import loss_of
from tests.support.pipeline.schedulers import batch, cut, named, share, topology
from tests.support.pipeline.trained import Twins

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

    def say_products(found: Any, claim: Any) -> None:
        accumulate(found, claim)
        events.append(("products", {id(uses[0].parameter) for uses in found}))

    def say_leaves(self: CommStream, task: Any, after: Any) -> Any:
        if isinstance(task, partial):  # and no meeting of all ranks
            events.append(("leaves", task.args[0].bucket))
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


def mixed(backwards: str, microbatches: int = 4) -> Schedule:
    """Returns a schedule of two stages: all forwards, then ``B0 I1 W1`` and so on."""
    actions = [(word[0], int(word[1:])) for word in backwards.split()]
    numbers = range(microbatches)
    rows = tuple(
        (
            *(Action(stage, "F", m) for m in numbers),
            *(Action(stage, kind, m) for kind, m in actions),  # type: ignore[arg-type]
        )
        for stage in range(2)
    )
    return Schedule("mixed", microbatches, (0, 1), rows)


def drawn(seed: int) -> str:
    """Returns backwards of four microbatches, some of them split, in an order of chance."""
    chance = random.Random(seed)
    kinds: list[Kind] = [chance.choice(["B", "I", "I"]) for _ in range(4)]
    words = [f"{kind}{m}" for m, kind in enumerate(kinds)]
    for m, kind in enumerate(kinds):
        if kind == "I":
            words.insert(chance.randint(words.index(f"I{m}") + 1, len(words)), f"W{m}")
    return " ".join(words)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "backwards",
    [
        "I0 I1 I2 B3 W0 W1 W2",
        "I0 W0 I1 W1 I2 W2 B3",
        "B0 I1 B2 W1 I3 W3",
        "I0 I1 B2 W1 I3 W3 W0",
        *(drawn(seed) for seed in range(8 if everything() else 4)),
    ],
)
def test_backward_may_be_split_for_some_microbatches(backwards: str) -> None:
    twins = Twins(schedule=mixed(backwards))
    for step in range(3):
        twins.step(step)
    twins.close()


# Split backward that fails: all ranks tell where, and nobody hangs.


class Diagonal(scales.Scale):
    """Multiplies by a matrix, so that the weight's gradient waits; tricks may be on the weight."""

    on_weight = False
    operand: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        trick, microbatch = self.trick, self.calls % scales.NUM_MICROBATCHES
        self.calls += 1
        weight, operand = self.weight, x.clone()
        plays = trick is not None and trick[0] == microbatch
        if plays and self.on_weight:
            weight = trick[1](weight)  # type: ignore[index,assignment]
        out = operand @ torch.diag(weight)
        if plays and not self.on_weight:
            out = trick[1](out)  # type: ignore[index]
        self.operand = operand.detach()
        return out


class Training(scales.Training):
    """One rank of a pipeline of `Diagonal`s."""

    def __init__(self, **options: Any) -> None:
        with mock.patch.object(scales, "Scale", Diagonal):
            super().__init__(topology(4), **{"schedule": "zb-h1", **options})

    @property
    def diagonal(self) -> Diagonal:
        assert isinstance(self.module, Diagonal)
        return self.module

    def fails(
        self, stage: int, microbatch: int, trick: Any = scales.fails_in_backward, *, on_weight: bool
    ) -> str:
        self.diagonal.on_weight = on_weight
        return self.trick(stage, microbatch, trick)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_split_backward_raises_all_tell_with_rank_and_action(is_first: bool) -> None:
    training = Training()
    if not is_first:
        scales.warm(training)
    for stage in (0, 1, 3):
        for kind in "IW":
            for microbatch in (0, 2):
                said = training.fails(stage, microbatch, on_weight=kind == "W")
                where = f"{stage}{kind}{microbatch} on pipeline rank {stage}."
                if said.startswith(scales.TOO_LATE):  # it had ended its step
                    assert not is_first
                    assert rank() != stage
                else:
                    assert said == blamed(stage, f"OSError: no space left In {where}")
                assert is_first or training.is_right()


def test_an_operand_that_is_changed_before_its_product_is_refused() -> None:
    """On rank 3 a forward changes what the weight was multiplied with in the one before it."""
    training = Training()
    assert training.is_right()

    def change(out: Tensor) -> Tensor:
        assert training.diagonal.operand is not None
        training.diagonal.operand.add_(1)
        return out

    said = training.fails(3, 1, change, on_weight=False)
    why = "StepError: what a weight of shape (2,) was multiplied with, of shape (2, 2)"
    if rank() == 3:
        assert said.startswith(why)
        assert "changed in place" in said
        assert said.endswith(" In 3W0 on pipeline rank 3.")
    else:
        assert said.startswith((scales.TOO_LATE, blamed(3, why)))
    assert training.is_right()


def test_a_tied_head_that_fails_ahead_of_its_turn_says_where() -> None:
    """Its products are computed ahead of their turn."""
    schedule = {"name": "zb-h1", "head_w_first": True}
    tie = [{0: "weight", 3: "weight"}]
    said = Training(schedule=schedule, tied=tie, handlers=[SHARED]).fails(3, 3, on_weight=True)
    assert "OSError: no space left" in said
    assert "on pipeline rank 3." in said
