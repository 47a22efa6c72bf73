"""What `pipegrad.verify` calls crossed is computed wrong by torch, without an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import pipegrad

DEFERS = hasattr(schedules, "_defer_recv_ops")
NUM_MICROBATCHES, NUM_STAGES = 4, 4


def worst_error(**options: Any) -> tuple[bool, float]:
    """Returns whether verify finds a step right, and how far its gradients are from one process."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(NUM_STAGES)]
    whole = nn.Sequential(*copy.deepcopy(layers))
    batch, target = torch.randn(2, 2 * NUM_MICROBATCHES, 8)
    rank = dist.get_rank()
    own = [rank, NUM_STAGES - 1 - rank]
    stages: list[Any] = [PipelineStage(layers[s], s, NUM_STAGES, torch.device("cpu")) for s in own]
    loss_fn = nn.functional.mse_loss
    schedule = schedules.ScheduleZBVZeroBubble(stages, NUM_MICROBATCHES, loss_fn=loss_fn, **options)
    if rank == 0:
        schedule.step(batch, target=target, losses=[])
    else:
        schedule.step()
    loss_fn(whole(batch), target).backward()
    errors = [
        float((p.grad - q.grad).abs().max() / q.grad.abs().max())
        for stage in own
        for p, q in zip(layers[stage].parameters(), whole[stage].parameters(), strict=True)
        if p.grad is not None and q.grad is not None
    ]
    assert len(errors) == 4
    return pipegrad.verify(schedule).is_right, max(errors)


@pytest.mark.ranks(2)
def test_what_is_right_is_computed_right() -> None:
    is_right, error = worst_error()
    assert is_right
    assert error < 1e-5


@pytest.mark.skipif(not DEFERS, reason="needs defer_pp_recv of torch 2.13")
@pytest.mark.ranks(2)
def test_what_is_crossed_is_computed_wrong() -> None:
    """torch 2.13, receives right before their computes: 0SEND_F2 meets 2RECV_B0."""
    is_right, error = worst_error(defer_pp_recv=True)
    assert not is_right
    assert error > 0.1
