"""noop: the same plan and the same work as a real run, and nothing on the wire."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from pipegrad import GradientSync, Topology, handlers, make_plan
from pipegrad.model.manifest import Manifest, ParameterEntry
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import Plan
from pipegrad.testing import HandlerContract, run_ranks


class TestNoop(HandlerContract):
    handler = "noop"

    def expected(self, whole: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return own


def entry(name: str) -> ParameterEntry:
    return ParameterEntry(name, (), (3,), (1,), torch.float32, torch.float32, True)


def test_it_plans_what_the_real_handlers_reduce() -> None:
    manifest = Manifest(
        ((entry("emb"), entry("w")), (entry("head"),)), (((0, "emb"), (1, "head")),)
    )
    topology = Topology.build(axes=(("pp", 2), ("dp", 2)))

    def plan(rank: int, *names: str) -> Plan:
        chosen = [(name, handlers.resolve(name).plugin) for name in names]
        return make_plan(manifest, topology.at(rank), chosen, GradientOptions(bucket_bytes=2**20))

    for rank in range(4):
        real, free = plan(rank, "pipeline-shared", "data-parallel"), plan(rank, "noop")
        assert free.launches == real.launches
        assert free.reduced_bytes == real.reduced_bytes
        assert [[h.ranks for h in b.route] for b in free.buckets] == [
            [h.ranks for h in b.route] for b in real.buckets
        ]
        assert {h.op for b in free.buckets for h in b.route} == {"sum"}


def step() -> Mapping[str, object]:
    """A broken wire: collectives in the comm streams raise, gradients come through all the same."""
    module = nn.Module()
    module.emb, module.own = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    topology = Topology.create(pipeline=2)
    rank = dist.get_rank()
    stage = topology.local_stages[0]
    sync = GradientSync({stage: module}, topology, tied=[["emb"]], handlers=["noop"])
    wire, dist.all_reduce = dist.all_reduce, None  # type: ignore[assignment]
    try:
        for _ in range(2):
            module.zero_grad()
            sync.prepare()
            (module.emb * (rank + 1.0)).sum().backward()
            sync.stage_final(stage)
            sync.finish()
    finally:
        dist.all_reduce = wire
    statistics = sync.statistics()
    return {
        "emb": module.emb.grad.tolist() if module.emb.grad is not None else None,
        "own": module.own.grad,
        "collectives": statistics.collectives,
        "bytes": statistics.reduced_bytes == sync.plan.reduced_bytes > 0,
    }


def test_gradients_stay_each_ranks_own() -> None:
    assert run_ranks(step, 4) == [
        {"emb": [rank + 1.0] * 2, "own": None, "collectives": 3, "bytes": True} for rank in range(4)
    ]
