"""Order of a Scheduler's steps: no access is left to luck, transfers are asked for as planned."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from itertools import takewhile
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipegrad import Stage, Work
from pipegrad.comm import sync_points
from pipegrad.comm.collectives import TRANSFERS
from pipegrad.pipeline import edges
from pipegrad.schedules.program.program import Op
from pipegrad.testing import OrderChecker
from pipegrad.testing.ordering.checker import Entry
from pipegrad.testing.ordering.trace import Operation
from tests.support.gradients.cases import DATA, SHARED, rank
from tests.support.ordering.programs import OWNED
from tests.support.pairwise import pairwise
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
from tests.support.ranked import gathered

# Order. That of each schedule's Program is proven by `verify`, in tests/unit.

TWO_EACH = (INTERLEAVED, "zbv", "zbv head_w_first")  # stages a rank
TIED = ("tied", "placed")
RANKS = 2, 4
# The gate has each wait of the program's (tests/mutation): here are the ways a step takes.
CHECKED = [
    ("1f1b", "tied", 2, True),
    ("eager-1f1b", "skips", 4, False),
    (INTERLEAVED, "far", 2, True),
    ("zb-h1", "placed", 4, True),
    ("zb-h1 head_w_first", "tied", 4, False),
    ("zbv", "skips", 4, True),
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


class Logged(OrderChecker):
    """Keeps the strand of every operation."""

    def __init__(self, *, virtual_streams: bool) -> None:
        super().__init__(virtual_streams=virtual_streams)
        self.strands: list[str] = []

    def after(self, operation: Operation) -> Entry:
        entry = super().after(operation)
        self.strands.append(entry.strand)
        return entry


def check(kind: str, schedule: str, *, streams: bool) -> Logged:
    """Takes three steps and an evaluation under a checker; parameters go back under forwards."""
    pipeline = 2 if kind in TIED else dist.get_world_size()
    options = tied(kind, schedule) if kind in TIED else {"handlers": [DATA]}
    with Logged(virtual_streams=streams) as checker:
        scheduler = make(pipeline, schedule, stages(kind, schedule), **options)
        optimizer = torch.optim.SGD(scheduler.sync.optimizer_parameters(), lr=2**-9)
        for _ in range(3):
            step(scheduler)
            optimizer.step()
            scheduler.sync.publish()
            optimizer.zero_grad()
        x = torch.ones(4, WIDTH)
        scheduler.evaluate(x, target=x)
        scheduler.close()
    return checker


@pytest.mark.parametrize(
    ("schedule", "kind", "streams"),
    [
        pytest.param(*row, streams, marks=pytest.mark.ranks(num_ranks))
        for *row, num_ranks, streams in CHECKED
    ],
)
def test_no_access_is_left_to_luck(schedule: str, kind: str, streams: bool) -> None:
    checker = check(kind, schedule, streams=streams)
    assert checker.violations == []

    def num(start: str) -> int:
        return sum(strand.startswith(start) for strand in checker.strands)

    assert num("transfer") >= 3 * 4 * 2 + 4  # a value and a gradient, each step
    if kind == "tied" and streams:
        assert num("collectives of pipegrad comm stream") >= 3
    if kind == "placed":
        assert num("message") >= 3 * 2  # a gradient and a parameter, each step


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        pytest.param(schedule, kind, marks=pytest.mark.ranks(num_ranks))
        for schedule, kind, num_ranks in pairwise((*SCHEDULES, *SPLIT, *HEAD_FIRST), TIED, RANKS)
    ],
)
def test_collectives_leave_as_the_plan_says(schedule: str, kind: str) -> None:
    """In its order, on each comm stream, and at the latest when their stages are final."""
    options = {**tied(kind, schedule), "comm_streams": 2}
    scheduler = make(2, schedule, stages(kind, schedule), **options)
    optimizer = torch.optim.SGD(scheduler.sync.optimizer_parameters(), lr=2**-9)
    reducer, plan = scheduler.sync._reducer, scheduler.sync.plan
    left: dict[int, list[str]] = {0: [], 1: []}
    late = list[str]()
    names = {b.index: b for b in plan.buckets}
    # Of each comm stream: names, and the stages of this rank that each of them waits for.
    planned: dict[int, list[str]] = {0: [], 1: []}
    waits: dict[int, list[set[int]]] = {0: [], 1: []}
    unfinished = set(scheduler.topology.local_stages)
    for launch in plan.launches:
        bucket = names[launch.bucket]
        planned[launch.comm_stream].append(bucket.name_of(launch.step))
        waits[launch.comm_stream].append(unfinished.intersection(bucket.holders))
    stage_final = scheduler.sync.stage_final

    def submitted(comm_stream: int, submit: Callable[..., Any], task: Any, after: Any) -> Any:
        if getattr(task, "func", None) == reducer._reduce:
            (flat,) = task.args
            left[comm_stream].append(names[flat.index].name_of(flat.launch.step))
        return submit(task, after)

    def final(stage: int) -> None:
        stage_final(stage)
        unfinished.remove(stage)
        for stream, stages_of in waits.items():
            ready = list(takewhile(unfinished.isdisjoint, stages_of))
            late.extend(planned[stream][len(left[stream]) : len(ready)])

    with (
        closing(scheduler),
        mock.patch.object(scheduler.sync, "stage_final", final),
        ExitStack() as patches,
    ):
        for number, stream in enumerate(reducer.comm_streams):
            submit = partial(submitted, number, stream.submit)
            patches.enter_context(mock.patch.object(stream, "submit", submit))
        for _ in range(2):  # a first step, and another
            step(scheduler)
            optimizer.zero_grad()
            assert left == planned
            assert late == []
            assert sum(map(len, left.values())) > 0
            left.update({0: [], 1: []})
            unfinished.update(scheduler.topology.local_stages)


class Noted(sync_points.Backend):
    """Notes what is sent or received on each edge, in order: which message, and how many bytes."""

    def __init__(self) -> None:
        self.edges: dict[str, list[tuple[int, int]]] = {}

    def note(self, group: dist.ProcessGroup, tensor: Tensor, tag: int) -> None:
        if "edge" in group.group_desc:
            self.edges.setdefault(group.group_name, []).append((tag, tensor.nbytes))

    def send(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, tag: int) -> Work:
        self.note(group, tensor, tag)
        return super().send(group, tensor, peer, tag)

    def receive(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, tag: int) -> Work:
        self.note(group, tensor, tag)
        return super().receive(group, tensor, peer, tag)


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        pytest.param(schedule, kind, marks=pytest.mark.ranks(num_ranks))
        for schedule, kind, num_ranks in (
            *pairwise((*SCHEDULES, *SPLIT, *HEAD_FIRST), ("plain", "skips"), RANKS),
            (INTERLEAVED, "far", 2),
            ("zbv", "far", 2),
        )
    ],
)
def test_devices_receive_in_the_order_of_the_sends(schedule: str, kind: str) -> None:
    """NCCL has no tags: it takes the first receive for the first send, whatever they are."""
    noted = Noted()
    with mock.patch.object(edges, "has_tags", return_value=False), sync_points.using(noted):
        scheduler = make(dist.get_world_size(), schedule, stages(kind, schedule), handlers=[DATA])
        for _ in range(2):  # a first step, and another
            step(scheduler)
        for _ in range(2):
            scheduler.evaluate(x := torch.ones(4, WIDTH), target=x)
        scheduler.close()
    ends: dict[str, list[Any]] = {}
    for of_rank in gathered(noted.edges):
        for edge, messages in of_rank.items():
            ends.setdefault(edge, []).append(messages)
    # A skip that would hold up what the next stage takes has a connection of its own.
    assert len(ends) == 2 if kind == "far" else ends
    assert [edge for edge, (one, other) in ends.items() if one != other] == []


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


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_a_rank_asks_for_transfers_as_its_program_says_receives_ahead(schedule: str) -> None:
    """In a steady step of 8 microbatches."""
    options: dict[str, Any] = {"microbatches": 8, "handlers": ["noop"], "depth": 3}
    with closing(make(4, schedule, stages("skips", schedule), **options)) as scheduler:
        for _ in range(2):  # the second one reserves headers for what is ahead
            step(scheduler)
        recorder = Recorder()
        with sync_points.using(recorder):
            step(scheduler)
        program = scheduler.program
    assert recorder.calls == [
        (ITEMS[op], TRANSFERS + microbatch * len(program.channels) + which)
        for op, which, microbatch in program.decoded(rank())
        if op in ITEMS
    ]
    assert {kind for kind, _ in recorder.calls} == set(ITEMS.values())
    ahead = most = 0
    for kind, _ in recorder.calls:
        ahead += (kind == "receive") - (kind == "wait for receive")
        most = max(most, ahead)
    assert most > 3
