"""Whole training steps on every schedule of torch: nothing about a gradient is left to luck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from pipegrad import Topology, attach, find_tied
from pipegrad.plugins.handler import HandlerSpec
from pipegrad.testing import OrderChecker
from pipegrad.testing.ordering.checker import Entry
from tests.support.gradients.cases import replicated
from tests.support.ordering.producers import Producers
from tests.support.ordering.programs import NUMBERS, OWNED, model, steps
from tests.support.pairwise import everything
from tests.support.pipeline.models import TOKENS, VOCAB, build
from tests.support.pipeline.pipelines import LOOPS, VEES, Case, loss_of, stage_module
from tests.support.pipeline.schedulers import digest
from tests.support.pipeline.training import Run, alone, truth
from tests.support.ranked import gathered

pytestmark = pytest.mark.ranks(4)
SCHEDULES = ("GPipe", "1F1B", *LOOPS[:3], *VEES)
FATES: dict[str, dict[str, Any]] = {
    "bucketed": {"options": (("bucket_bytes", 2**20), ("comm_streams", 3))},
    "oversized": {"options": (("bucket_bytes", 0), ("comm_streams", 2))},
    "zero-filled": {"model": "half-used"},
    "tied": {"model": "crossed", "options": (("bucket_bytes", 2048), ("comm_streams", 3))},
    "mixed dtypes": {"model": "mixed-dtypes", "options": (("bucket_bytes", 4096),)},
}
PRODUCERS = (2, 3)  # in each step; in the second one parameters leave one by one


@dataclass
class Watched:
    """What one rank saw of one case."""

    bits: dict[str, str]
    producers: set[str] = field(default_factory=set)
    collectives: list[int] = field(default_factory=list)  # a step
    waiting_backwards: int = 0  # operations of a backward that are behind a reduction of its step
    backwards: int = 0
    firsts: int = 0  # pairs of comm streams
    ordered_firsts: int = 0  # of which one's first collective waits for the other's


def is_collective(entry: Entry) -> bool:
    return entry.strand.startswith("collectives of pipegrad comm stream")


def watched(case: Case, *, virtual_streams: bool) -> Watched:
    """Trains a case under a checker, which must find nothing."""
    topology = Topology.create(pipeline=2)
    truth(alone(case), topology.size("dp"))  # computed once, unwatched
    starts: list[int] = []
    with OrderChecker(virtual_streams=virtual_streams, log=True) as checker:
        run = Run(case, topology)
        producers = Producers(checker, run.cut.parameters())
        for stage in run.cut.stages:
            around = producers.around(stage.backward_one_chunk)
            stage.backward_one_chunk = around  # type: ignore[method-assign]
            elsewhere = producers.elsewhere(stage.backward_weight_one_chunk)
            stage.backward_weight_one_chunk = elsewhere  # type: ignore[method-assign]
        run.schedule.step = counting(run.schedule.step, producers, checker, starts)  # type: ignore[method-assign]
        parameters = run.train().parameters
    assert checker.violations == []
    seen = Watched({name: digest(tensor) for name, tensor in parameters.items()})
    seen.producers = {e.strand for e in checker.log if e.strand.startswith("producer")}
    for start, end in zip(starts, [*starts[1:], len(checker.log)], strict=True):
        look_at_step(seen, checker.log[start:end])
    return seen


def counting(
    step: Callable[..., Any], producers: Producers, checker: OrderChecker, starts: list[int]
) -> Callable[..., Any]:
    """Returns `step`, with its own number of producers, and a mark where it starts."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        producers.number = PRODUCERS[len(starts) % len(PRODUCERS)]
        starts.append(len(checker.log))
        return step(*args, **kwargs)

    return counted


def look_at_step(seen: Watched, log: list[Entry]) -> None:
    collectives = [entry for entry in log if is_collective(entry)]
    backwards = [entry for entry in log if "in watched_backward" in entry.where]
    firsts: dict[str, Entry] = {}
    for entry in collectives:
        firsts.setdefault(entry.strand.partition(" in group")[0], entry)
    pairs = list(combinations(firsts.values(), 2))
    seen.collectives.append(len(collectives))
    seen.backwards += len(backwards)
    seen.waiting_backwards += sum(any(b.behind(c) for c in collectives) for b in backwards)
    seen.firsts += len(pairs)
    seen.ordered_firsts += sum(a.behind(b) or b.behind(a) for a, b in pairs)


def case_of(schedule: str, **changes: Any) -> Case:
    return Case(schedule, **{"steps": len(PRODUCERS), **changes})


# Every schedule with ties, and with one of the other fates.
OTHER_FATES = [fate for fate in FATES if fate != "tied"]
MATRIX = [
    (schedule, fate)
    for number, schedule in enumerate(SCHEDULES)
    for fate in FATES
    if everything() or fate in ("tied", OTHER_FATES[number % len(OTHER_FATES)])
]


@pytest.mark.parametrize(("schedule", "fate"), MATRIX)
def test_every_schedule(schedule: str, fate: str) -> None:
    """2 stages or 4, 2 replicas; 2 and 3 producers of gradients."""
    seen = watched(case_of(schedule, **FATES[fate]), virtual_streams=True)
    # It could have gone wrong: several streams wrote, and every step reduced.
    assert seen.producers == {"producer 0", "producer 1", "producer 2"}
    assert len(seen.collectives) == len(PRODUCERS)
    assert min(seen.collectives) > 0
    # No backward waits for a reduction of its step: between steps it does, by the buffers.
    assert seen.backwards > 0
    assert seen.waiting_backwards == 0
    # Comm streams do not wait for each other, of which ties have two or more.
    if fate == "tied":
        assert seen.firsts >= len(PRODUCERS)  # a pair of comm streams or more, each step
        assert seen.ordered_firsts == 0


NUM_BUCKETED = 3
OTHERS = [
    case_of("1F1B", options=(("comm_streams", 1), ("bucket_bytes", 2048))),
    case_of("1F1B", options=(("comm_streams", 2), ("bucket_bytes", 2048))),
    case_of("1F1B", options=(("comm_streams", 3), ("bucket_bytes", 2048))),
    # The others follow.
    case_of("1F1B", options=(("reduce_dtype", torch.float64),)),
    case_of("ZBVZeroBubble", options=(("reduce_dtype", torch.float64),)),
    case_of("1F1B", options=(("reduce_dtype", torch.bfloat16), ("sum_dtype", torch.float32))),
    case_of("1F1B", accumulate=2, clip=(0.5, 2.0)),
    case_of("1F1B", wrapper="compile"),
    *(case_of(schedule) for schedule in LOOPS[3:]),
]


either = pytest.mark.parametrize("streams", [True, False], ids=["streams", "threads"])
# All with streams, and by threads alone those that differ in what is copied or accumulated.
BY = [(n, True) for n in range(NUM_BUCKETED, len(OTHERS))] + [(NUM_BUCKETED, False), (6, False)]


@pytest.mark.parametrize(("number", "streams"), BY)
def test_copies_accumulation_clipping_and_compiled_stages(number: int, *, streams: bool) -> None:
    seen = watched(OTHERS[number], virtual_streams=streams)
    if "sum_dtype" not in dict(OTHERS[number].options):  # wide sums are messages, not collectives
        assert min(seen.collectives[1::2]) > 0


@either
def test_the_number_of_comm_streams_changes_no_bit(*, streams: bool) -> None:
    cases = OTHERS[:NUM_BUCKETED] if streams else OTHERS[: NUM_BUCKETED : NUM_BUCKETED - 1]
    found = [watched(case, virtual_streams=streams) for case in cases]
    assert all(min(seen.collectives[1::2]) > 0 for seen in found)
    one, *others = (seen.bits for seen in found)
    assert others == [one] * len(others)
    assert one


@either
def test_parameters_that_come_back_under_a_schedule_of_torch(streams: bool) -> None:
    """Its ties have an owner, and its rows are stepped."""
    with OrderChecker(virtual_streams=streams) as checker:
        topology, whole = Topology.create(pipeline=2), build("tied")
        here, share = topology.coordinate("pp"), topology.coordinate("dp")
        module, group = stage_module(whole, here, 2), topology.group_along("pp")
        stage = PipelineStage(module, here, 2, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(stage, 4, loss_fn=loss_of)
        handlers: list[HandlerSpec] = [OWNED, "sharded"]
        shared = find_tied(whole)
        sync = attach(schedule, topology=topology, tied=shared, handlers=handlers, comm_streams=2)
        optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=0.05)
        for step in range(3):
            tokens = torch.arange(4 * TOKENS).reshape(4, TOKENS).add(step + share) % VOCAB
            schedule.step(*([tokens] if here == 0 else []), target=tokens if here else None)
            optimizer.step()
            sync.publish()
            optimizer.zero_grad()
        sync.check_replicas()
        sync.close()
    assert checker.violations == []


@pytest.mark.ranks(2)
def test_a_rank_that_lacks_gradients_issues_the_same_collectives() -> None:
    with OrderChecker(log=True) as checker:
        module = model()  # which not all ranks use
        steps(checker, replicated(module, bucket_bytes=256, comm_streams=1), module, NUMBERS)
    found = [(e.strand.partition(" in group")[0], e) for e in checker.log if is_collective(e)]
    sent = [(name, access.spans[-1][1]) for name, e in found for access in e.accesses]
    assert gathered(sent) == [sent] * 2
    assert len(sent) > len(NUMBERS)
