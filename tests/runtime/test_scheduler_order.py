"""Order of a Scheduler's steps: no access is left to luck, transfers are asked for as planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipegrad import Work
from pipegrad.gradients import order
from pipegrad.schedules.program import Op
from pipegrad.testing import OrderChecker
from tests.gradients.cases import DATA, SHARED, Case, Replies, on, rank, replies
from tests.runtime.chains import INTERLEAVED, SCHEDULES, WIDTH, make, plain, skips, step

Tensor = torch.Tensor

FOUR: list[Case] = []
TWO: list[Case] = []
four = replies(4, FOUR)
two = replies(2, TWO)


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
