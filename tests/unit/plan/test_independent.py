"""Along which dimensions replicas train alone, and what is refused before anything is sent."""

from __future__ import annotations

import dataclasses

import pytest

from pipegrad import GradientHandler, Topology, make_plan
from pipegrad.errors import PlanError
from pipegrad.plan.plan import Plan
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.diloco import DiLoCo
from pipegrad_handlers.pipeline_shared import PipelineShared
from pipegrad_handlers.sharded import Sharded
from tests.support.gradients.plans import manifest

MODEL = manifest(("emb", "a"), ("b", "head"))  # each of two elements; emb and head are one
TIES = ("pipeline-shared", PipelineShared())
ALONE = ("diloco", DiLoCo(every=4))
FLAT = Topology.build(axes=(("pp", 2), ("dp", 2)))
NESTED = Topology.build(axes=(("pp", 2), ("dp", 2), ("out", 2)), data=("dp", "out"))
OUT = ("diloco", DiLoCo(every=4, axis="out"))


def plan_of(topology: Topology, rank: int, *handlers: tuple[str, GradientHandler]) -> Plan:
    return make_plan(MODEL, topology.at(rank), handlers)


def test_gradients_go_nowhere_else_and_one_communicator_more_joins_replicas() -> None:
    for rank in FLAT.ranks:
        without, plan = plan_of(FLAT, rank, TIES), plan_of(FLAT, rank, TIES, ALONE)
        assert plan.groups == tuple(sorted({*without.groups, ((0, 1), 0), ((2, 3), 0)}))
        assert "replicas along dp train alone, joined by diloco" in str(plan)
        assert (
            dataclasses.replace(
                plan,
                independent_axes=(),
                independent_by="",
                groups=without.groups,
                digest=without.digest,
            )
            == without
        )


def test_dimensions_of_one_rank_do_not_count() -> None:
    inner = ("data-parallel", DataParallel(axis="dp"))
    plan = plan_of(NESTED, 1, TIES, inner, OUT)
    assert (plan.independent_axes, plan.independent_by) == (("out",), "diloco")
    one = Topology.build(axes=(("pp", 2), ("dp", 1)))
    plan = plan_of(one, 0, TIES, ALONE)
    assert (plan.independent_axes, plan.independent_by) == ((), "")
    assert plan.digest == plan_of(one, 0, TIES).digest


@pytest.mark.parametrize(
    ("topology", "handlers", "says"),
    [
        (
            FLAT,
            [TIES, ALONE, ("data-parallel", DataParallel())],
            "by replicate-mean(dp) over ranks",
        ),
        (FLAT, [TIES, ALONE, ("sharded", Sharded())], "'sharded' reduces gradients by shard-mean"),
        (NESTED, [TIES, ALONE, OUT], "'dp+out' by handler 'diloco' and along 'out' by handler"),
        (
            NESTED,
            [TIES, OUT, ("data-parallel", DataParallel())],
            "of replicas that train alone along 'out' and are joined by handler 'diloco'",
        ),
        (FLAT, [TIES, ("diloco", DiLoCo(every=2, axis="pp"))], "dimensions of ['dp'], along which"),
        (FLAT, [TIES, OUT], "'diloco': independent_axes() failed: the mesh has no dimension 'out'"),
    ],
)
def test_what_contradicts_independent_replicas_is_refused(
    topology: Topology, handlers: list[tuple[str, GradientHandler]], says: str
) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(MODEL, topology, handlers)
    assert says in str(caught.value)


def test_replicas_that_number_their_ranks_otherwise_are_refused() -> None:
    """The owner of the tie is on stage 0 in one replica, and on stage 1 in the other."""
    topology = Topology.build(axes=(("pp", 2), ("dp", 2)), ranks=(0, 3, 2, 1))
    with pytest.raises(PlanError, match="train alone, step different parts of it: number the"):
        make_plan(MODEL, topology, [TIES, ALONE])
