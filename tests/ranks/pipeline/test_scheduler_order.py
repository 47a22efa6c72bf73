"""Order of a Scheduler's steps: no access is left to luck, transfers are asked for as planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipegrad import Stage, Work
from pipegrad.comm import sync_points
from pipegrad.pipeline.compute import Compute
from pipegrad.pipeline.split_backward.weights import WeightGradients
from pipegrad.schedules.program.program import Op
from pipegrad.testing import OrderChecker
from tests.support.gradients.cases import DATA, SHARED, Case, Replies, on, rank, replies
from tests.support.ordering.programs import OWNED, off
from tests.support.pipeline.chains import (
    HEAD_FIRST,
    INTERLEAVED,
    SCHEDULES,
    SPLIT,
    WIDTH,
    far_skips,
    make,
    matrices,
    matrices_and_skips,
    plain,
    skips,
    step,
)

Tensor = torch.Tensor

FOUR: list[Case] = []
TWO: list[Case] = []
four = replies(4, FOUR)
two = replies(2, TWO)


# Order.

TWO_EACH = (INTERLEAVED, "zbv", "zbv head_w_first")  # stages a rank
KINDS = ("plain", "tied", "placed", "skips")
TIED = ("tied", "placed")
CHECKED = [
    *((kind, schedule) for schedule in (*SCHEDULES, *SPLIT) for kind in KINDS),
    *(("tied", schedule) for schedule in HEAD_FIRST),
    *(("far", schedule) for schedule in (INTERLEAVED, "zbv")),
]


def stages(kind: str, schedule: str) -> Callable[[int], Stage]:
    """Returns what makes them: where backward is split they have something that waits."""
    if kind == "far":
        return far_skips
    if schedule.startswith(SPLIT):
        return matrices_and_skips if kind == "skips" else matrices
    return skips if kind == "skips" else plain


def tied(kind: str, schedule: str) -> dict[str, Any]:
    """Two ranks a pipeline; zbv has the first stage and the last on one of them."""
    handlers = [OWNED, "sharded"] if kind == "placed" else [SHARED, DATA]
    shared: list[dict[int, str]] = [{0: "weight", 1 + 2 * (schedule in TWO_EACH): "weight"}]
    if schedule.startswith("zbv"):
        shared += [{0: "last", 2: "last"}]
    return {"tied": shared, "handlers": handlers, "bucket_bytes": 4 * WIDTH}


@dataclass(frozen=True)
class Seen:
    """What a checker saw of a few steps."""

    violations: list[str]
    num_transfers: int
    num_collectives: int
    num_messages: int


def check(kind: str, schedule: str, *, virtual_streams: bool, mutant: str | None = None) -> Seen:
    """Takes three steps and an evaluation under a checker; parameters go back under forwards."""
    pipeline = 2 if kind in TIED else dist.get_world_size()
    options = tied(kind, schedule) if kind in TIED else {"handlers": [DATA]}
    with OrderChecker(virtual_streams=virtual_streams, log=True) as checker:
        scheduler = make(pipeline, schedule, stages(kind, schedule), **options)
        optimizer = torch.optim.SGD(scheduler.sync.optimizer_parameters(), lr=2**-9)
        with nullcontext() if mutant is None else off(mutant):
            for _ in range(3):
                step(scheduler)
                optimizer.step()
                scheduler.sync.publish()
                optimizer.zero_grad()
        x = torch.ones(4, WIDTH)
        scheduler.evaluate(x, target=x)
        scheduler.close()
    strands = [entry.strand for entry in checker.log]
    return Seen(
        list(map(str, checker.violations)),
        sum(strand.startswith("transfer") for strand in strands),
        sum(strand.startswith("collectives of pipegrad comm stream") for strand in strands),
        sum(strand.startswith("message") for strand in strands),
    )


def checks() -> dict[tuple[str, str, bool], Seen]:
    return {
        (kind, schedule, streams): check(kind, schedule, virtual_streams=streams)
        for kind, schedule in CHECKED
        for streams in (True, False)
    }


@on(TWO)
def checks_of_two() -> Any:
    return checks()


@on(FOUR)
def checks_of_four() -> Any:
    return checks()


UNCHECKED = {  # what nobody waits for would be no harm to a checker that did not see it -> where
    "transfer.sending": "plain",
    "parameter-sync.updated": "placed",
    "comm-stream.result in Reducer.wait_for": "placed",
}


@on(TWO)
def unchecked() -> Any:
    return {
        mutant: check(kind, "1f1b", virtual_streams=True, mutant=mutant).violations
        for mutant, kind in UNCHECKED.items()
    }


@pytest.mark.parametrize("streams", [True, False], ids=["streams", "threads"])
@pytest.mark.parametrize(("kind", "schedule"), CHECKED)
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
            if kind == "placed":
                assert seen.num_messages >= 3 * 2  # a gradient and a parameter, each step


@pytest.mark.parametrize("mutant", UNCHECKED)
def test_what_nobody_holds_or_waits_for_is_seen(mutant: str, two: Replies) -> None:
    assert any(reply["unchecked"][mutant] for reply in two)


# What split backward keeps of a microbatch until its weights' gradients are computed.


def keeps_no_copy() -> AbstractContextManager[object]:
    """What is received as a gradient is kept where it lies, and given back."""
    backward: Any = WeightGradients.backward

    def lent_nothing(self: WeightGradients, *arguments: Any) -> Any:
        return backward(self, *arguments[:-1], {})

    return mock.patch.object(WeightGradients, "backward", lent_nothing)


def keeps_no_value() -> AbstractContextManager[object]:
    """What is received as a value is given back before the weight's gradient is computed."""
    inputs = Compute._backward_inputs

    def early(self: Compute, stage: int, microbatch: int) -> None:
        inputs(self, stage, microbatch)
        self._values.release(stage, microbatch)

    def late(self: Compute, stage: int, microbatch: int) -> None:
        self._weights.compute(stage, microbatch)

    return mock.patch.multiple(Compute, _backward_inputs=early, _backward_weights=late)


KEEPS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "all": nullcontext,
    "no copy": keeps_no_copy,
    "no value": keeps_no_value,
}


@on(FOUR)
def keeping() -> dict[str, list[str]]:
    """Returns for each way to keep things what a checker finds wrong."""
    found = {}
    for name, keep in KEEPS.items():
        with OrderChecker() as checker, keep():
            scheduler = make(4, "zb-h1", matrices, microbatches=8, handlers=["noop"])
            for _ in range(3):
                step(scheduler)
            scheduler.close()
        found[name] = list(map(str, checker.violations))
    return found


def test_what_split_backward_does_not_keep_is_seen(four: Replies) -> None:
    assert [reply["keeping"]["all"] for reply in four] == [[]] * 4
    assert any(reply["keeping"]["no copy"] for reply in four)


def test_a_buffer_that_somebody_holds_is_not_written_again(four: Replies) -> None:
    """Issue 16, point 10 (runtime 6): what was given back was received into, whoever held it."""
    assert [reply["keeping"]["no value"] for reply in four] == [[]] * 4


# What a rank asks of its transfers, in order.


class Recorder(sync_points.Backend):
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


RECORDED = ("1f1b", "zb-h1", "zbv")


@on(FOUR)
def recorded() -> Any:
    return {schedule: record(schedule) for schedule in RECORDED}


def record(schedule: str) -> Any:
    """Returns what a steady step of 8 microbatches asks, and what its Program says."""
    made = stages("skips", schedule)
    scheduler = make(4, schedule, made, microbatches=8, handlers=["noop"], depth=3)
    step(scheduler)
    recorder = Recorder()
    with sync_points.using(recorder):
        step(scheduler)
    program = scheduler.program
    wanted = [
        (ITEMS[op], 2 * (microbatch * len(program.channels) + which))
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


@pytest.mark.parametrize("schedule", RECORDED)
def test_a_rank_asks_for_transfers_as_its_program_says_receives_ahead(
    schedule: str, four: Replies
) -> None:
    for reply in four:
        calls, wanted = reply["recorded"][schedule]
        assert calls == wanted
        assert {kind for kind, _ in calls} == set(ITEMS.values())
        assert most_ahead(calls) > 3
