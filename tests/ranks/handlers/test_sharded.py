"""sharded: rows of a mean, an optimizer's state in rows; what one process gets from the batch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrad import GradientSync, ParameterRecord, Placement, Reduction, Topology
from pipegrad.errors import TopologyError
from pipegrad.testing import HandlerContract, run_ranks
from pipegrad_handlers.sharded import Sharded
from tests.support.pipeline.schedulers import error
from tests.support.rounding import ADAM_EPS, rounding


class TestSharded(HandlerContract):
    handler = "sharded"
    beside = ("pipeline-shared",)


class TestShardedBehindOwners(HandlerContract):
    """Ties are given to an owner first, and its sums are cut into rows."""

    handler = "sharded"
    beside = ({"name": "pipeline-shared", "placement": "owner"},)


def record(name: str, stage: int, holders: tuple[int, ...]) -> ParameterRecord:
    key = f"{holders[0]}.{name}"
    return ParameterRecord(key, name, stage, (2,), torch.float32, True, holders, 0)


@pytest.mark.parametrize(("rank", "copies"), [(0, (0, 1)), (5, (4, 5))])
def test_every_parameter_is_cut_over_its_copies(rank: int, copies: tuple[int, ...]) -> None:
    topology = Topology.build(axes=(("pp", 4), ("dp", 2)), rank=rank)
    stage = topology.local_stages[0]
    records = [record("w", stage, (stage,)), record("emb", stage, (0, 3))]
    assert Sharded().reductions(records, topology) == [
        Reduction(r, copies, "mean", Placement.SHARD) for r in records
    ]


def test_the_dimension_may_be_another_one() -> None:
    topology = Topology.build(axes=(("pp", 1), ("out", 2), ("dp", 2)), rank=1)
    w = record("w", 0, (0,))
    assert Sharded(axis="out").reductions([w], topology) == [
        Reduction(w, (1, 3), "mean", Placement.SHARD)
    ]
    with pytest.raises(TopologyError, match=r"no dimension 'in', only \['pp', 'out', 'dp'\]"):
        Sharded(axis="in").reductions([w], topology)


def batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.randn(12, 5)


@dataclass(frozen=True)
class Trained:
    """What a rank has after some steps, and the elements that its optimizer has state of."""

    weights: list[torch.Tensor]
    state_numel: int
    early: int


def train_on_a_share() -> Trained:
    """Three steps, two microbatches each, on this rank's third of the batch."""
    model, inputs = batch()
    share = inputs.chunk(dist.get_world_size())[dist.get_rank()]
    sync = GradientSync({0: model}, Topology.create(pipeline=1), handlers=["sharded"])
    optimizer = torch.optim.AdamW(sync.optimizer_parameters(), lr=0.01, eps=ADAM_EPS)
    for _ in range(3):
        sync.prepare(divisor=2)
        sync.stage_first_use(0)
        for number, microbatch in enumerate(share.chunk(2)):
            if number == 1:
                sync.stage_last_backward(0)
            model(microbatch).square().mean().backward()
        sync.stage_final(0)
        sync.finish()
        sync.clip_grad_norm_(0.5)
        optimizer.step()
        sync.publish()
        optimizer.zero_grad()
    sync.check_replicas()
    early = sync.statistics().early
    sync.close()
    weights = [p.detach().clone() for p in model.parameters()]
    return Trained(weights, sum(s["exp_avg"].numel() for s in optimizer.state.values()), early)


def test_training_on_shares_in_rows_is_training_on_the_batch() -> None:
    model, inputs = batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=ADAM_EPS)
    for _ in range(3):
        model(inputs).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    replies = run_ranks(train_on_a_share, 3)
    for reply in replies:
        assert reply.early == 4
        pairs = zip(reply.weights, replies[0].weights, model.parameters(), strict=True)
        for found, first, expected in pairs:
            assert torch.equal(found, first)
            assert error(found, expected.detach()) <= rounding(3 * 12)
    numel = sum(p.numel() for p in model.parameters())
    assert sum(reply.state_numel for reply in replies) == numel
    assert max(reply.state_numel for reply in replies) < numel / 2
