"""The handlers of pipegrad keep the contract; and what each asks for, by rank and parameter."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from pipegrad import (
    GradientHandler,
    ParameterRecord,
    Placement,
    Reduction,
    Topology,
    handlers,
    make_plan,
)
from pipegrad.errors import PlanError, PluginOptionError, TopologyError
from pipegrad.model.manifest import Manifest
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import Plan, make_plans
from pipegrad.testing import HandlerContract
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.diloco import DiLoCo
from pipegrad_handlers.expert_parallel import ExpertParallel
from pipegrad_handlers.pipeline_shared import PipelineShared
from pipegrad_handlers.sequence_parallel import SequenceParallel
from pipegrad_handlers.sharded import Sharded
from tests.support.gradients.cases import grads, rank, stage, step, tied
from tests.support.gradients.plans import manifest, record

# --- the contract: a class for each way to reduce, place and send

SHARED = ("pipeline-shared",)
OWNER: dict[str, Any] = {"name": "pipeline-shared", "placement": "owner"}


class TestDataParallel(HandlerContract):
    handler = "data-parallel"
    beside = SHARED


class TestDataParallelInBf16(HandlerContract):
    handler: ClassVar[Any] = {"name": "data-parallel", "hook": "bf16_compress_hook"}
    beside = SHARED
    relative_error = 2**-7  # bfloat16 rounds by 2**-8 at most: both halves, and then their sum


class TestPipelineShared(HandlerContract):
    handler = "pipeline-shared"
    beside = ("data-parallel",)


class TestPipelineSharedByOwners(HandlerContract):
    handler = OWNER
    beside = ("data-parallel",)


class TestAsymmetric(HandlerContract):
    handler: ClassVar[Any] = {"name": "pipeline-shared", "exchange": "asymmetric"}
    beside = ("data-parallel",)


class TestSharded(HandlerContract):
    handler = "sharded"
    beside = SHARED


class TestShardedBehindOwners(HandlerContract):
    """Ties are given to an owner first, and its sums are cut into rows."""

    handler = "sharded"
    beside = (OWNER,)


class TestDiLoCo(HandlerContract):
    handler: ClassVar[Any] = {"name": "diloco", "every": 1, "lr": 1.0, "momentum": 0.0}
    beside = SHARED


class TestSequenceParallel(HandlerContract):
    handler: ClassVar[Any] = {"name": "sequence-parallel", "axis": "dp", "parameters": ["*"]}
    beside = SHARED

    def expected(self, whole: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return 2 * whole  # of which `whole` is the mean


class TestOnlyExperts(HandlerContract):
    """All parameters live on their data rank alone, and the loss is the mean over two of them."""

    handler: ClassVar[Any] = {"name": "expert-parallel", "experts": ["*"], "axis": "dp"}

    def expected(self, whole: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return own / 2


class TestNoop(HandlerContract):
    handler = "noop"

    def expected(self, whole: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return own


def held(name: str, stage: int = 0, *holders: int, key: str = "") -> ParameterRecord:
    trained = name != "frozen"
    return record(name, 2, key=key, stage=stage, holders=holders, trained=trained)


PLACED: list[tuple[GradientHandler, Placement]] = [
    (DataParallel(), Placement.REPLICATE),
    (Sharded(), Placement.SHARD),
]


@pytest.mark.parametrize(("handler", "placement"), PLACED, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(("rank", "copies"), [(0, (0, 1)), (5, (4, 5))])
def test_every_parameter_is_averaged_over_its_copies(
    handler: GradientHandler, placement: Placement, rank: int, copies: tuple[int, ...]
) -> None:
    topology = Topology.build(axes=(("pp", 4), ("dp", 2)), rank=rank)
    stage = topology.local_stages[0]
    records = [held("w", stage), held("emb", stage, 0, 3), held("frozen", stage)]
    assert list(handler.reductions(records, topology)) == [
        Reduction(r, copies, "mean", placement) for r in records
    ]


def test_dimensions_holders_and_outer_steps_are_those_asked_for() -> None:
    w = held("w")
    named = Topology.build(axes=(("replica", 2), ("stage", 1)), pipeline="stage", data="replica")
    assert DataParallel().reductions([w], named) == [Reduction(w, (0, 1), "mean")]
    outer = Topology.build(axes=(("pp", 1), ("dp", 2), ("out", 2)), data=("dp", "out"), rank=1)
    chosen: GradientHandler
    for chosen, placement, wrong in (
        (DataParallel(axis="out"), Placement.REPLICATE, DataParallel(axis="in")),
        (Sharded(axis="out"), Placement.SHARD, Sharded(axis="in")),
    ):
        assert chosen.reductions([w], outer) == [Reduction(w, (0, 1), "mean", placement)]
        with pytest.raises(TopologyError, match=r"no dimension 'in', only \['pp', 'dp', 'out'\]"):
            wrong.reductions([w], outer)
    diloco = handlers.resolve({"name": "diloco", "every": 50}).plugin
    assert isinstance(diloco, DiLoCo)
    assert (diloco.equal_every, diloco.lr, diloco.momentum) == (50, 0.7, 0.9)
    assert diloco.independent_axes(outer) == ("dp", "out")
    assert DiLoCo(every=3, axis="out").independent_axes(outer) == ("out",)
    # A shared parameter is summed over its holders.
    topology = Topology.build(axes=(("pp", 4), ("dp", 2)), rank=1)
    emb, own = held("emb", 0, 0, 3), held("w")
    assert PipelineShared().reductions([own, emb], topology) == [Reduction(emb, (1, 7), "sum")]
    by_owner = Reduction(emb, (1, 7), "sum", Placement.OWNER)
    assert PipelineShared(placement="owner").reductions([own, emb], topology) == [by_owner]
    three = held("emb", 2, 0, 2, 3)
    assert PipelineShared().reductions([three], topology.at(4)) == [Reduction(three, (0, 4, 6))]
    # Where one rank holds all, it is a reduction over one.
    v = Topology.build(axes=(("pp", 2), ("dp", 2)), stage_to_rank=(0, 1, 1, 0), rank=3)
    tie = held("w", 1, 1, 2)
    assert PipelineShared().reductions([tie], v) == [Reduction(tie, (3,))]


def test_two_ranks_may_exchange_and_more_all_reduce() -> None:
    topology = Topology.build(axes=(("pp", 4), ("dp", 2)), rank=1)
    two, three = held("emb", 0, 0, 3), held("w", 0, 0, 2, 3)
    assert PipelineShared(exchange="asymmetric").reductions([two, three], topology) == [
        Reduction(two, (1, 7), exchange="asymmetric"),
        Reduction(three, (1, 5, 7)),
    ]


AXES = (("pp", 1), ("dp", 2), ("ep", 2), ("tp", 2))


@pytest.mark.parametrize(
    ("placement", "placed"), [("replicate", Placement.REPLICATE), ("shard", Placement.SHARD)]
)
def test_experts_stay_apart_and_the_rest_is_averaged(placement: Any, placed: Placement) -> None:
    expert, other = held("experts.up"), held("router")
    topology = Topology.build(axes=AXES, rank=3, data=("dp", "ep"))
    handler = ExpertParallel(placement=placement)
    assert list(handler.reductions([expert, other], topology)) == [
        Reduction(expert, (3, 7), "mean", placed, 2),
        Reduction(other, (1, 3, 5, 7), "mean", placed),
    ]
    # Experts of which there is one copy keep their divisor.
    alone = Topology.build(axes=(("pp", 1), ("dp", 1), ("ep", 4)), rank=2, data=("dp", "ep"))
    [reduction] = ExpertParallel().reductions([expert], alone)
    assert reduction == Reduction(expert, (2,), "mean", divisor=4)
    with pytest.raises(ValueError, match=r"axis is 'ep', but .* along \['dp'\] only.* add 'ep'"):
        list(handler.reductions([expert], Topology.build(axes=AXES)))


CUBE = Topology.build(axes=(("pp", 2), ("dp", 2), ("tp", 2)), rank=3)


@pytest.mark.parametrize(
    ("options", "ranks", "op"),
    [({}, (2, 3), "sum"), ({"axis": "dp", "op": "mean"}, (1, 3), "mean")],
)
def test_what_matches_is_reduced(options: dict[str, Any], ranks: tuple[int, ...], op: Any) -> None:
    records = [held("norm.weight"), held("up.weight")]
    handler = SequenceParallel(parameters=["*norm*"], **options)
    assert handler.reductions(records, CUBE) == [Reduction(records[0], ranks, op)]
    everything = SequenceParallel(parameters=["*"], **options)
    assert everything.reductions(records, CUBE) == [Reduction(r, ranks, op) for r in records]


def test_patterns_match_the_name_here_and_where_the_key_is_from() -> None:
    head = held("head.weight", 1, 0, 1, key="0.embed.weight")
    for pattern in ("head.*", "embed.weight", "*.weigh?"):
        assert SequenceParallel(parameters=[pattern]).reductions([head], CUBE), pattern
    for pattern in ("embed", "Head.*", "1.head.weight", "0.head.*"):
        assert not SequenceParallel(parameters=[pattern]).reductions([head], CUBE), pattern
    # The key of layer 1 on stage 0 is "0.1.weight", which "0.*" means layer 0 by.
    layers = [held("0.weight"), held("1.weight")]
    asked = SequenceParallel(parameters=["0.*"]).reductions(layers, CUBE)
    assert [reduction.record.name for reduction in asked] == ["0.weight"]
    # A dimension that is missing is named.
    flat = Topology.build(axes=(("pp", 2), ("dp", 2)))
    with pytest.raises(TopologyError, match=r"no dimension 'tp', only \['pp', 'dp'\]"):
        SequenceParallel(parameters=["*"]).reductions([held("w")], flat)


def planned(model: Manifest, mesh: Topology, handler: GradientHandler) -> object:
    return make_plans(model, mesh, [("mine", handler)], GradientOptions(bucket_bytes=64))


def test_patterns_that_match_nothing_of_the_whole_model_are_refused() -> None:
    model, absent = manifest(["up"], ["norm"]), SequenceParallel(parameters=["*nrom*"])
    with pytest.raises(PlanError) as caught:
        planned(model, CUBE, absent)
    assert "handler 'mine': check() failed: ValueError" in str(caught.value)
    assert "parameters is ['*nrom*'], which matches none of the model's 2" in str(caught.value)
    assert planned(model, Topology.build(axes=(("pp", 2), ("dp", 2), ("tp", 1))), absent)
    for patterns in [], ["norm"]:  # on one stage alone
        assert planned(model, CUBE, SequenceParallel(parameters=patterns))
    # A model without what is named as experts is refused. They would be averaged over all data, and
    # be one expert from the first step on.
    moe = manifest(["router", "moe.up"])
    one, two = (
        Topology.build(axes=(("pp", 1), ("dp", 1), ("ep", size)), data=("dp", "ep"))
        for size in (1, 2)
    )
    assert planned(moe, one, ExpertParallel(experts=["moe.*"]))
    assert planned(moe, two, ExpertParallel(experts=["moe.*"]))
    assert planned(moe, one, ExpertParallel())
    with pytest.raises(PlanError, match=r"handler 'mine': check.*experts is .* matches none"):
        planned(moe, two, ExpertParallel())


def test_what_no_reduction_can_be_is_refused_by_the_plan() -> None:
    model, wrong = manifest(["emb"], ["head"]), "max"
    mesh = Topology.build(axes=(("pp", 2), ("dp", 1), ("tp", 2)))
    for handler, words in (
        (PipelineShared(exchange=wrong), "exchange 'max': expected one of"),  # type: ignore[arg-type]
        (PipelineShared(placement="owner", exchange="asymmetric"), "placed by 'replicate'"),
        (SequenceParallel(parameters=["*"], op=wrong), "by 'max': expected 'sum'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(PlanError, match=f"handler 'mine' reduces '0.emb' over .*{words}"):
            planned(model, mesh, handler)


def test_noop_plans_what_the_real_handlers_reduce() -> None:
    model = manifest(["emb", "w"], ["head"])
    topology = Topology.build(axes=(("pp", 2), ("dp", 2)))

    def plan(at: int, *names: str) -> Plan:
        chosen = [(name, handlers.resolve(name).plugin) for name in names]
        return make_plan(model, topology.at(at), chosen, GradientOptions(bucket_bytes=2**20))

    for at in range(4):
        real, free = plan(at, "pipeline-shared", "data-parallel"), plan(at, "noop")
        assert free.launches == real.launches
        assert free.reduced_bytes == real.reduced_bytes
        assert [[h.ranks for h in b.route] for b in free.buckets] == [
            [h.ranks for h in b.route] for b in real.buckets
        ]
        assert {h.op for b in free.buckets for h in b.route} == {"sum"}


@pytest.mark.ranks(4)
def test_noop_leaves_gradients_and_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken wire: collectives in the comm streams raise, gradients come through all the same."""
    module = stage(emb=(2,), own=(2,))
    sync = tied(module, "emb", handlers=["noop"])
    with monkeypatch.context() as broken:
        broken.setattr(dist, "all_reduce", None)
        for _ in range(2):
            module.zero_grad()
            step(sync, module, emb=rank() + 1.0)
    assert grads(module) == {"emb": [rank() + 1.0] * 2, "own": None}
    assert len(sync.plan.launches) == 3
    sync.close()


STEPS = {"every": 5}
PATTERNS = "'*x*', expected a list of patterns"
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "diloco": [
        ({"evry": 5}, "has no option 'evry', needs the option 'every'"),
        ({"every": 2.0}, "every is 2.0, expected a whole number of steps, 1 or more"),
        ({**STEPS, "momentum": 1}, "momentum is 1, expected at least 0 and below 1"),
        ({**STEPS, "lr": float("nan")}, "lr is nan, expected a number"),
    ],
    "expert-parallel": [
        ({"experts": "*x*"}, f"experts is {PATTERNS}"),
        ({"placement": "owner"}, "placement is 'owner', expected one of ['replicate', 'shard']"),
    ],
    "pipeline-shared": [
        ({"placement": "OWNER"}, "placement is 'OWNER', expected one of ['replicate', 'owner']"),
    ],
    "sequence-parallel": [
        ({"parameters": "*x*"}, f"parameters is {PATTERNS}"),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_options_are_refused_in_words(name: str) -> None:
    for options, words in REFUSED[name]:
        with pytest.raises(PluginOptionError) as caught:
            handlers.resolve({"name": name, **options})
        assert words in str(caught.value)
