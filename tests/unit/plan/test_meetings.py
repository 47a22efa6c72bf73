"""Which parameters meet, on which ranks, and what is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from pipegrad import (
    GradientHandler,
    OuterStep,
    ParameterRecord,
    Placement,
    Reduction,
    Topology,
    make_plan,
)
from pipegrad.errors import PlanError
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import Plan
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.diloco import DiLoCo
from pipegrad_handlers.pipeline_shared import PipelineShared
from pipegrad_handlers.sharded import Sharded
from tests.support.plan.manifests import manifest

MODEL = manifest(("emb", "a"), ("b", "head"))  # each of two elements; emb and head are one
TIES = ("pipeline-shared", PipelineShared())
MEET = ("diloco", DiLoCo(every=4))
FLAT = Topology.build(axes=(("pp", 2), ("dp", 2)))
NESTED = Topology.build(axes=(("pp", 2), ("dp", 2), ("out", 2)), data=("dp", "out"))
OUT = ("diloco", DiLoCo(every=4, axis="out"))


def plan_of(
    topology: Topology, rank: int, *handlers: tuple[str, GradientHandler], **options: Any
) -> Plan:
    return make_plan(MODEL, topology.at(rank), handlers, GradientOptions(**options))


def met(plan: Plan) -> list[tuple[tuple[str, ...], tuple[int, ...], bool, int]]:
    return [(m.keys, m.step.ranks, m.averages, m.nbytes) for m in plan.meetings]


def test_a_tie_meets_once() -> None:
    assert met(plan_of(FLAT, 0, TIES, MEET)) == [
        (("0.a",), (0, 1), True, 8),
        (("0.emb",), (0, 1), True, 8),
    ]
    assert met(plan_of(FLAT, 3, TIES, MEET)) == [
        (("1.b",), (2, 3), True, 8),
        (("0.emb",), (2, 3), False, 0),
    ]
    spread = plan_of(FLAT, 3, TIES, MEET).meetings[1].spread
    assert [step.ranks for step in spread] == [(1, 3)]
    text = str(plan_of(FLAT, 0, TIES, MEET))
    assert "meet-mean(dp) over ranks [0, 1]: 0.emb" in text
    alone = plan_of(Topology.build(axes=(("pp", 2), ("dp", 1))), 0, TIES, MEET)
    assert (alone.meetings, alone.meets, alone.replica) == ((), False, ())


def test_gradients_go_nowhere_else_than_before() -> None:
    for rank in FLAT.ranks:
        alone, meets = plan_of(FLAT, rank, TIES), plan_of(FLAT, rank, TIES, MEET)
        assert meets.launches == alone.launches
        assert meets.reduced_bytes == alone.reduced_bytes
        assert [b.slots for b in meets.buckets] == [b.slots for b in alone.buckets]
        assert meets.main_ranges == alone.main_ranges


def test_the_ranks_of_a_replica() -> None:
    assert [plan_of(FLAT, rank, TIES, MEET).replica for rank in FLAT.ranks] == [
        (0, 2), (1, 3), (0, 2), (1, 3),
    ]  # fmt: skip
    inner = ("data-parallel", DataParallel(axis="dp"))
    assert plan_of(NESTED, 1, TIES, inner, OUT).replica == (1, 3, 5, 7)
    assert plan_of(FLAT, 0, TIES, ("data-parallel", DataParallel())).replica == ()


@pytest.mark.parametrize("inner", [DataParallel(axis="dp"), Sharded(axis="dp")])
def test_a_cluster_sends_each_element_once(inner: GradientHandler) -> None:
    plans = [plan_of(NESTED, rank, TIES, ("inner", inner), OUT) for rank in NESTED.ranks]
    for replica in ((0, 2, 4, 6), (1, 3, 5, 7)):
        assert sum(plans[rank].met_bytes for rank in replica) == 3 * 2 * 4


@pytest.mark.parametrize(
    ("dtype", "expected"), [(None, torch.float32), (torch.float64, torch.float64)]
)
def test_parameters_meet_in_32_bits_at_least(
    dtype: torch.dtype | None, expected: torch.dtype
) -> None:
    plan = plan_of(FLAT, 0, TIES, MEET, master_dtype=dtype)
    assert {meeting.dtype for meeting in plan.meetings} == {expected}


class Meets(GradientHandler):
    """Lets parameters meet in whatever way a test wants."""

    def __init__(self, axis: str = "dp", *, has_outer: bool = True, **fields: Any) -> None:
        self._axis, self._fields = axis, {"op": "mean", "placement": Placement.MEET, **fields}
        self.outer = OuterStep(every=2) if has_outer else None

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        return [Reduction(p, topology.ranks_along(self._axis), **self._fields) for p in parameters]


@pytest.mark.parametrize(
    ("topology", "handlers", "says"),
    [
        (FLAT, [TIES, MEET, ("data-parallel", DataParallel())], "is reduced twice over ranks"),
        (FLAT, [TIES, MEET, ("sharded", Sharded())], "is reduced twice over ranks"),
        (FLAT, [TIES, ("mine", Meets(op="sum"))], "expected meet-mean, all-reduce, divisor 1"),
        (FLAT, [TIES, ("mine", Meets(divisor=2.0))], "expected meet-mean, all-reduce, divisor 1"),
        (
            FLAT,
            [TIES, ("mine", Meets(placement=Placement.REPLICATE))],
            "has an outer step, for parameters that meet, and reduces '0.emb' by replicate-mean",
        ),
        (FLAT, [TIES, ("mine", Meets(has_outer=False))], "the handler has no outer step: set"),
        (NESTED, [TIES, MEET, OUT], "expected one handler, and one or several whole dimensions"),
        (
            NESTED,
            [TIES, OUT, ("data-parallel", DataParallel())],
            "of replicas that train alone along 'out' and meet by handler 'diloco'",
        ),
        (
            Topology.build(axes=(("pp", 1), ("dp", 1), ("tp", 2))),
            [("mine", Meets("tp"))],
            "of ['dp'], along which ranks see different data",
        ),
    ],
)
def test_what_contradicts_a_meeting_is_refused(
    topology: Topology, handlers: list[tuple[str, GradientHandler]], says: str
) -> None:
    model = MODEL if topology.size("pp") == 2 else manifest(("a",))
    with pytest.raises(PlanError) as caught:
        make_plan(model, topology, handlers)
    assert says in str(caught.value)


def test_replicas_that_number_their_ranks_otherwise_are_refused() -> None:
    """The owner of the tie is on stage 0 in one replica, and on stage 1 in the other."""
    topology = Topology.build(axes=(("pp", 2), ("dp", 2)), ranks=(0, 3, 2, 1))
    with pytest.raises(PlanError, match="meet with different parts of it"):
        make_plan(MODEL, topology, [TIES, MEET])
