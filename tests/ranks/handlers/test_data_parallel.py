"""data-parallel: a mean over copies, exactly what one process gets from the whole batch."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrad import GradientSync, ParameterRecord, Reduction, Topology
from pipegrad.testing import HandlerContract, run_ranks
from pipegrad_handlers.data_parallel import DataParallel
from tests.support.pipeline.schedulers import error
from tests.support.rounding import ADAM_EPS, rounding


class TestDataParallel(HandlerContract):
    handler = "data-parallel"
    beside = ("pipeline-shared",)


class TestDataParallelInBf16(HandlerContract):
    handler: ClassVar[Any] = {"name": "data-parallel", "hook": "bf16_compress_hook"}
    beside = ("pipeline-shared",)
    relative_error = 2**-7  # bfloat16 rounds by 2**-8 at most: both halves, and then their sum


class TestDataParallelBeforePowerSGDBegins(HandlerContract):
    handler: ClassVar[Any] = {"name": "data-parallel", "hook": {"name": "powerSGD_hook"}}
    beside = ("pipeline-shared",)


@pytest.mark.parametrize(("rank", "copies"), [(0, (0, 1)), (5, (4, 5))])
def test_every_parameter_is_averaged_over_its_copies(rank: int, copies: tuple[int, ...]) -> None:
    topology = Topology.build(axes=(("pp", 4), ("dp", 2)), rank=rank)
    stage = topology.local_stages[0]
    records = [
        ParameterRecord(
            key=f"{stage}.{name}",
            name=name,
            stage=stage,
            shape=(2,),
            dtype=torch.float32,
            requires_grad=name != "frozen",
            holders=holders,
            position=0,
        )
        for name, holders in (("w", (stage,)), ("emb", (0, 3)), ("frozen", (stage,)))
    ]
    assert DataParallel().reductions(records, topology) == [
        Reduction(record, copies, "mean") for record in records
    ]


def test_the_data_dimension_may_have_any_name() -> None:
    axes = (("replica", 2), ("stage", 1))
    topology = Topology.build(axes=axes, pipeline="stage", data="replica")
    w = ParameterRecord(
        key="0.w",
        name="w",
        stage=0,
        shape=(2,),
        dtype=torch.float32,
        requires_grad=True,
        holders=(0,),
        position=0,
    )
    assert DataParallel().reductions([w], topology) == [Reduction(w, (0, 1), "mean")]


def batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.randn(12, 5)


def train_on_a_share() -> tuple[list[torch.Tensor], int]:
    """Three steps, two microbatches each, on this rank's third of the batch."""
    model, inputs = batch()
    share = inputs.chunk(dist.get_world_size())[dist.get_rank()]
    sync = GradientSync({0: model}, Topology.create(pipeline=1), handlers=["data-parallel"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=ADAM_EPS)
    for _ in range(3):
        sync.prepare(divisor=2)
        for number, microbatch in enumerate(share.chunk(2)):
            if number == 1:
                sync.stage_last_backward(0)
            model(microbatch).square().mean().backward()
        sync.stage_final(0)
        sync.finish()
        sync.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    sync.check_replicas()
    return [p.detach().clone() for p in model.parameters()], sync.statistics().early


def test_training_on_shares_is_training_on_the_batch() -> None:
    model, inputs = batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=ADAM_EPS)
    for _ in range(3):
        model(inputs).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    replies = run_ranks(train_on_a_share, 3)
    for weights, early in replies:
        assert early == 4
        for found, first, expected in zip(weights, replies[0][0], model.parameters(), strict=True):
            assert torch.equal(found, first)
            assert error(found, expected.detach()) <= rounding(3 * 12)
