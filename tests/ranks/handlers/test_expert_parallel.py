"""expert-parallel: experts by the ranks that hold the same ones, with the divisor of all data."""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from pipegrad import GradientSync, ParameterRecord, Placement, Reduction, Topology, handlers
from pipegrad.errors import PlanError, PluginOptionError
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import make_plans
from pipegrad.testing import HandlerContract, run_ranks
from pipegrad_handlers.expert_parallel import ExpertParallel
from tests.support.plan.manifests import manifest
from tests.support.rounding import rounding


class TestOnlyExperts(HandlerContract):
    """All parameters live on their data rank alone, and the loss is the mean over two of them."""

    handler: ClassVar[Any] = {"name": "expert-parallel", "experts": ["*"], "axis": "dp"}

    def expected(self, whole: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return own / 2


class TestNoExperts(HandlerContract):
    handler: ClassVar[Any] = {"name": "expert-parallel", "experts": [], "axis": "dp"}
    beside = ("pipeline-shared",)


class TestNoExpertsInRows(HandlerContract):
    handler: ClassVar[Any] = {
        "name": "expert-parallel",
        "experts": [],
        "axis": "dp",
        "placement": "shard",
    }
    beside = ({"name": "pipeline-shared", "placement": "owner"},)


def record(name: str) -> ParameterRecord:
    return ParameterRecord(f"0.{name}", name, 0, (2,), torch.float32, True, (0,), 0)


AXES = (("pp", 1), ("dp", 2), ("ep", 2), ("tp", 2))


@pytest.mark.parametrize(
    ("placement", "placed"), [("replicate", Placement.REPLICATE), ("shard", Placement.SHARD)]
)
def test_experts_stay_apart_and_the_rest_is_averaged_at_once(
    placement: Any, placed: Placement
) -> None:
    expert, other = record("experts.up"), record("router")
    topology = Topology.build(axes=AXES, rank=3, data=("dp", "ep"))
    handler = ExpertParallel(placement=placement)
    assert list(handler.reductions([expert, other], topology)) == [
        Reduction(expert, (3, 7), "mean", placed, 2),
        Reduction(other, (1, 3, 5, 7), "mean", placed),
    ]


def test_experts_of_which_there_is_one_copy_keep_their_divisor() -> None:
    topology = Topology.build(axes=(("pp", 1), ("dp", 1), ("ep", 4)), rank=2, data=("dp", "ep"))
    expert = record("experts.up")
    [reduction] = ExpertParallel().reductions([expert], topology)
    assert reduction == Reduction(expert, (2,), "mean", divisor=4)


def test_an_axis_without_data_of_its_own_is_refused_in_words() -> None:
    topology = Topology.build(axes=AXES)
    with pytest.raises(ValueError, match=r"axis is 'ep', but .* along \['dp'\] only.* add 'ep'"):
        list(ExpertParallel().reductions([record("w")], topology))


def test_a_model_without_what_is_named_as_experts_is_refused() -> None:
    """They would be averaged over all data, and be one expert from the first step on."""
    moe = manifest(["router", "moe.up"])
    options: dict[str, Any] = {"bucket_bytes": 64}
    for size in (1, 2):
        mesh = Topology.build(axes=(("pp", 1), ("dp", 1), ("ep", size)), data=("dp", "ep"))
        assert make_plans(
            moe, mesh, [("ep", ExpertParallel(experts=["moe.*"]))], GradientOptions(**options)
        )
        if size == 1:
            assert make_plans(moe, mesh, [("ep", ExpertParallel())], GradientOptions(**options))
            continue
        with pytest.raises(PlanError, match=r"handler 'ep': check.*experts is .* matches none"):
            make_plans(moe, mesh, [("ep", ExpertParallel())], GradientOptions(**options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"experts": "*experts*"}, r"experts is '\*experts\*', expected a list of patterns"),
        ({"placement": "owner"}, r"placement is 'owner', expected one of \['replicate', 'shard'\]"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(PluginOptionError, match=said):
        handlers.resolve({"name": "expert-parallel", **options})


# Every rank's gradient of every parameter is a power of ten, so a sum says whose it is made of.

PLACEMENTS = ("replicate", "shard")


def gradients_of(placement: str) -> dict[str, list[torch.Tensor | None]]:
    """On 4 ranks, ep 2 x tp 2: what each steps, two microbatches, and the norm."""
    topology = Topology.create(pipeline=1, dimensions={"ep": 2, "tp": 2}, data=("dp", "ep"))
    module = nn.ParameterDict(
        {
            name: nn.Parameter(torch.zeros(4))
            for name in ("experts_whole", "experts_cut", "router_whole", "up_cut")
        }
    )
    names = ["sequence-parallel", "expert-parallel"]
    options: list[dict[str, Any]] = [{"parameters": ["*whole"]}, {"placement": placement}]
    chosen = [{"name": n, **o} for n, o in zip(names, options, strict=True)]
    sync = GradientSync(
        {0: module}, topology, handlers=chosen, bucket_bytes=0, allow_unsynced=["*cut"]
    )
    sync.optimizer_parameters()
    sync.prepare(divisor=2)
    for _ in range(2):
        sum(p.sum() * 10.0**topology.rank for p in module.values()).backward()
    sync.stage_final(0)
    sync.finish()
    found: dict[str, list[torch.Tensor | None]] = {n: [None] * 4 for n in module}
    for one in sync.main_parameters():
        assert one.tensor.grad is not None
        for i, value in enumerate(one.tensor.grad.flatten()):
            found[one.record.name][one.begin + i] = value.clone()
    found["norm"] = [sync.clip_grad_norm_(1.0)]
    sync.close()
    return found


def gradients() -> dict[str, dict[str, list[torch.Tensor | None]]]:
    return {placement: gradients_of(placement) for placement in PLACEMENTS}


def test_with_tensor_parallel_ranks_each_gradient_is_that_of_one_process() -> None:
    """Ranks 0, 1 are one data rank and 2, 3 the other; 0, 2 have one shard of what is cut."""
    expected = {
        "experts_whole": [11 / 2, 11 / 2, 1100 / 2, 1100 / 2],
        "experts_cut": [1 / 2, 10 / 2, 100 / 2, 1000 / 2],
        "router_whole": [1111 / 2] * 4,
        "up_cut": [101 / 2, 1010 / 2, 101 / 2, 1010 / 2],
    }
    every = run_ranks(gradients, 4)
    once = [(11, 1100), (1, 10, 100, 1000), (1111,), (101, 1010)]
    norm = sum(4 * (x / 2) ** 2 for values in once for x in values) ** 0.5
    for placement, (rank, found) in product(PLACEMENTS, enumerate(every)):
        for name, values in expected.items():
            there = [float(x) for x in found[placement][name] if x is not None]
            assert there == [values[rank]] * len(there), (placement, rank, name)
            holders = [r for r in range(4) if values[r] == values[rank]]
            covered = [
                any(every[r][placement][name][i] is not None for r in holders) for i in range(4)
            ]
            assert all(covered)
        assert float(found[placement]["norm"][0]) == pytest.approx(norm, rel=rounding(16))  # type: ignore[arg-type]
