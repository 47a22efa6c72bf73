"""Every gradient's reductions in order, where replicas train alone, and what contradicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from pipegrad import GradientHandler, ParameterRecord, Placement, Reduction, Topology, make_plan
from pipegrad.errors import PlanError
from pipegrad.model.dtensor import Layout, Shard
from pipegrad.model.manifest import Manifest, ParameterEntry
from pipegrad.plan.check import check_routes
from pipegrad.plan.plan import Plan
from pipegrad.plan.routes import Routes, make_routes, shared_routes, steps_taken
from pipegrad.plugins.handler import ReductionStep
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.diloco import DiLoCo
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.gradients.plans import Reductions, Say, entry, manifest, say

OWNER, WHOLE = Placement.OWNER, Placement.WHOLE
SHARD, REPLICATE = Placement.SHARD, Placement.REPLICATE
GRID = Topology.build(axes=(("pp", 4), ("dp", 2)))  # ranks 2p and 2p + 1 hold stage p
SHARED, DATA = ("pipeline-shared", PipelineShared()), ("data-parallel", DataParallel())


TIED = manifest(["emb", "a"], ["b"], ["c"], ["head"])


def routes(
    *handlers: tuple[str, GradientHandler],
    model: Manifest = TIED,
    topology: Topology = GRID,
    allow_unsynced: Sequence[str] = (),
) -> Routes:
    found, *_ = make_routes(model, topology, handlers)
    check_routes(model, topology, found, allow_unsynced)
    return found


def reduction_step(
    axes: str, ranks: tuple[int, ...], op: str, handler: str, placement: Placement = REPLICATE
) -> ReductionStep:
    return ReductionStep(axes, ranks, op, placement, handler)  # type: ignore[arg-type]


# --- what comes out


def test_routes_of_all_ranks() -> None:
    found = routes(SHARED, DATA)
    mean = {p: reduction_step("dp", (2 * p, 2 * p + 1), "mean", "data-parallel") for p in range(4)}
    tie = {d: reduction_step("pp[0,3]", (d, 6 + d), "sum", "pipeline-shared") for d in range(2)}
    assert found == {
        0: {"0.emb": (mean[0], tie[0]), "0.a": (mean[0],)},
        1: {"0.emb": (mean[0], tie[1]), "0.a": (mean[0],)},
        2: {"1.b": (mean[1],)},
        3: {"1.b": (mean[1],)},
        4: {"2.c": (mean[2],)},
        5: {"2.c": (mean[2],)},
        6: {"0.emb": (mean[3], tie[0])},
        7: {"0.emb": (mean[3], tie[1])},
    }
    assert list(found) == list(range(8))
    assert found == routes(DATA, SHARED)
    assert list(map(str, found[0]["0.emb"])) == ["replicate-mean(dp)", "replicate-sum(pp[0,3])"]
    lowest = shared_routes(found)
    assert {key: lowest[key] for key in ("0.emb", "2.c")} == {
        "0.emb": (mean[0], tie[0]),
        "2.c": (mean[2],),
    }


def over(axis: str, placement: Placement = REPLICATE) -> Reductions:
    def reductions(parameters: Sequence[ParameterRecord], topology: Topology) -> list[Reduction]:
        ranks = topology.ranks_along(axis)
        return [Reduction(p, ranks, "sum", placement) for p in parameters]

    return reductions


def test_routes_are_ordered_by_placement_and_across_stages_last() -> None:
    cube = Topology.build(axes=(("pp", 2), ("dp", 2), ("tp", 2), ("cp", 2)))
    model = manifest(["emb"], ["head"])
    handlers = [
        ("a", Say(over("tp"))),
        ("b", Say(over("cp", OWNER))),
        ("c", Say(over("dp", SHARD))),
        ("shared", PipelineShared()),
    ]
    for order in (handlers, handlers[::-1]):
        found = routes(*order, model=model, topology=cube)
        assert [str(h) for h in found[5]["0.emb"]] == [
            "owner-sum(cp)", "shard-sum(dp)", "replicate-sum(tp)", "replicate-sum(pp)",
        ]  # fmt: skip
    late = [("shared", Say(over("pp", OWNER))), ("own", Say(over("dp", OWNER)))]
    found = routes(*late, model=model, topology=cube)
    assert [h.axes for h in found[0]["0.emb"]] == ["dp", "pp"]


def test_an_axis_whose_name_is_part_of_another_is_another_axis() -> None:
    """The dimension "p" is not in the reduction over "replicas", though the letter is."""
    axes = (("p", 2), ("replicas", 2))
    mesh = Topology.build(axes=axes, pipeline="p", data="replicas")
    found = routes(SHARED, DATA, model=manifest(["emb"], ["head"]), topology=mesh)
    assert [str(h) for h in found[0]["0.emb"]] == ["replicate-mean(replicas)", "replicate-sum(p)"]
    mesh = Topology.build(axes=(("pp", 2), ("p", 2)), data="p")
    wrapped = manifest(["emb"], ["head"], wrappers=((0, "DistributedDataParallel"),))
    assert list(routes(SHARED, model=wrapped, topology=mesh)[0]) == ["0.emb"]
    assert reduction_step("pp[0,3]+dp", (0, 1, 6, 7), "sum", "x").spans("pp")
    assert not reduction_step("ranks[0, 3]", (0, 3), "sum", "x").spans("dp")


def test_reductions_over_one_rank_are_dropped() -> None:
    line = Topology.build(axes=(("pp", 4), ("dp", 1)))
    found = routes(SHARED, DATA, topology=line)
    assert [list(found[rank]) for rank in range(4)] == [["0.emb"], [], [], ["0.emb"]]
    v = GRID.with_stages((0, 1, 2, 3, 3, 2, 1, 0))
    model = manifest(["emb"], [], [], [], [], [], [], ["head"])
    local = routes(SHARED, DATA, model=model, topology=v)
    assert [str(h) for h in local[0]["0.emb"]] == ["replicate-mean(dp)"]


def test_after_an_owner_the_later_hops_are_the_owners_alone() -> None:
    mean = reduction_step("dp", (0, 1), "sum", "x", OWNER)
    tie = reduction_step("pp", (0, 2), "sum", "y")
    assert [steps_taken((mean, tie), rank) for rank in (0, 1)] == [2, 1]
    assert [steps_taken((tie, mean), rank) for rank in (0, 1)] == [2, 2]
    shard = reduction_step("dp", (0, 1), "sum", "x", SHARD)
    assert [steps_taken((shard, tie), rank) for rank in (0, 1)] == [2, 2]
    assert steps_taken((), 0) == 0


# --- a handler's mistakes


def asymmetric(parameters: Sequence[ParameterRecord], t: Topology) -> list[Reduction]:
    return [Reduction(p, t.ranks_along("dp")) for p in parameters if t.rank != 3]


def other_op(parameters: Sequence[ParameterRecord], t: Topology) -> list[Reduction]:
    op = "mean" if t.rank == 1 else "sum"
    return [Reduction(p, t.ranks_along("dp"), op) for p in parameters]  # type: ignore[arg-type]


def other_copies(parameters: Sequence[ParameterRecord], t: Topology) -> list[Reduction]:
    pair = t.ranks_of((0, 3))
    return [Reduction(p, pair) for p in parameters if p.shared and t.coordinate("dp") == 1]


def someone_elses(parameters: Sequence[ParameterRecord], t: Topology) -> list[Reduction]:
    del parameters
    return [Reduction(TIED.records(t.at(0))[1], t.ranks_along("dp"))]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (
            lambda ps, t: [Reduction(p, (0, 1)) for p in ps],
            "'1.b' over ranks [0, 1]: expected each rank once, and rank 2 among them",
        ),
        (
            lambda ps, t: [Reduction(p, (t.rank, 9)) for p in ps],
            "'0.emb' over ranks [0, 9]",
        ),
        (
            lambda ps, t: [Reduction(p, t.ranks_along("dp"), "max") for p in ps],  # type: ignore[arg-type]
            "'0.emb' over ranks [0, 1] by 'max': expected 'sum' or 'mean'",
        ),
        (someone_elses, "'0.a' over ranks [2, 3] on rank 2, which does not hold it"),
        (
            lambda ps, t: [Reduction(p, t.ranks_along("dp")) for p in (*ps, *ps)],
            "'0.emb' is reduced twice over ranks [0, 1], by handlers ['mine', 'mine']: drop one",
        ),
        (
            lambda ps, t: [Reduction(p, r) for p in ps for r in (t.ranks_along("dp"), t.ranks)],
            "'0.emb' is reduced twice over ranks [0, 1], by handlers ['mine', 'mine']: drop one",
        ),
        (asymmetric, "over ranks [2, 3], but rank 3 has no reduction of it"),
        (other_op, "replicate-mean(dp)"),
        (other_copies, "['replicate-sum(pp[0,3])'] on"),
    ],
    ids=[
        "without self", "unknown rank", "unknown op", "not held", "reduced twice", "overlap",
        "asymmetric", "other op", "copies differ",
    ],
)  # fmt: skip
def test_a_handlers_mistake_names_handler_key_and_ranks(mistake: Reductions, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        routes(say(mistake), allow_unsynced=["*"])
    assert "'mine'" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("axis", "way_out"),
    [
        ("dp", "drop the handler, ['pipeline-shared'] is enough"),
        ("tp", "leave it out of the parameters that the handler is given"),
    ],
)
def test_a_dtensor_is_not_reduced_over_its_own_ranks_again(axis: str, way_out: str) -> None:
    """FSDP2's ranks need no handler there; of a tensor-parallel one other parameters may be."""
    mesh = Topology.build(axes=(("pp", 1), ("dp", 2), ("tp", 2)))
    layout = Layout((4,), ((axis, 2),), ("Shard(dim=0)",), (False,))
    cut = dataclasses.replace(entry("cut", 2), layout=layout)
    shards = {
        r: {(0, "cut"): Shard((2,), (v.coordinate(axis),), v.ranks_along(axis))}
        for r, v in ((r, mesh.at(r)) for r in mesh.ranks)
    }
    model = Manifest(((cut,),), (), shards=shards)
    with pytest.raises(PlanError) as caught:
        routes(say(over(axis)), model=model, topology=mesh)
    assert str(caught.value).endswith(f"it would be reduced twice; {way_out}")
    other = {"dp": "tp", "tp": "dp"}[axis]
    assert routes(say(over(other)), model=model, topology=mesh)


# --- ties that nobody reduces


def test_a_tie_without_a_handler_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        routes(DATA)
    assert str(caught.value) == (
        "'emb' on stage 0 and 'head' on stage 3 are one parameter, but no handler reduces its "
        "gradient over ranks [0, 6]: add 'pipeline-shared' to the handlers, or name it in "
        "allow_unsynced to let the copies drift apart"
    )


@pytest.mark.parametrize("pattern", ["0.emb", "emb", "head", "he?d", "*"])
def test_a_tie_may_be_left_alone_by_key_or_by_any_of_its_names(pattern: str) -> None:
    found = routes(DATA, allow_unsynced=["nothing", pattern])
    assert [str(h) for h in found[0]["0.emb"]] == ["replicate-mean(dp)"]
    with pytest.raises(PlanError, match="are one parameter"):  # they name something else
        routes(DATA, allow_unsynced=["a", "3.head", "EMB"])


def test_a_handler_that_forgets_one_of_three_holders_does_not_cover_the_tie() -> None:
    model = manifest(["emb"], [], ["third"], ["head"])
    partial = say(lambda ps, t: [Reduction(p, t.ranks_of((0, 3))) for p in ps if p.stage != 2])
    with pytest.raises(PlanError, match=r"'0\.emb' .*\[\] on rank 4.*'mine'"):
        routes(partial, model=model)
    apart = say(lambda ps, t: [Reduction(p, t.ranks_along("dp")) for p in ps if p.shared])
    with pytest.raises(PlanError, match=r"'third' on stage 2.*no handler reduces.*\[0, 4, 6\]"):
        routes(apart, model=model)
    whole = routes(SHARED, model=model)
    assert [h.ranks for h in whole[5]["0.emb"]] == [(1, 5, 7)]


def test_a_frozen_tie_must_be_covered_too() -> None:
    """It is not reduced, but its copies are kept equal along the same route."""
    frozen = ParameterEntry("emb", (), (2,), (1,), torch.float32, torch.float32, False)
    model = Manifest(((frozen,), (frozen,)), (((0, "emb"), (1, "emb")),))
    line = Topology.build(axes=(("pp", 2), ("dp", 1)))
    assert list(routes(SHARED, model=model, topology=line)[1]) == ["0.emb"]


# --- stages that reduce by themselves


def test_a_wrapped_stage_is_not_reduced_again() -> None:
    def wrapped(stage: int, wrapper: str = "DistributedDataParallel") -> Manifest:
        return manifest(["emb", "a"], ["b"], ["c"], ["head"], wrappers=((stage, wrapper),))

    with pytest.raises(PlanError, match=r"stage 1 .*DistributedDataP.*'data-parallel'.*twice"):
        routes(SHARED, DATA, model=wrapped(1))
    assert "1.b" not in routes(SHARED, model=wrapped(1))[2]
    # A tie into a stage of DDP is reduced across stages alone.
    with pytest.raises(PlanError, match=r"reduces '0\.emb' over dp too"):
        routes(SHARED, DATA, model=wrapped(3))
    with pytest.raises(PlanError, match=r"stage 2 .*FullyShardedDataParallel.*fully_shard"):
        routes(SHARED, model=wrapped(2, "FullyShardedDataParallel"))


# Along which dimensions replicas train alone, and what is refused of them.

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
