"""Before torch's stages know each other's shapes, an error ends the job: on all ranks, and soon."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import pipegrad
from pipegrad.testing import run_ranks


class Piece(nn.Linear):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise OSError("no space left")
        return super().forward(x)


def two_steps(place: int, behind: bool) -> tuple[list[str], float]:
    """Returns what two steps raise of which one rank fails in the first, and the seconds."""
    rank, at = dist.get_rank(), pipegrad.Topology.create(pipeline=3)
    module = Piece(2, 2)
    stage = PipelineStage(module, rank, 3, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, nn.MSELoss())
    pipegrad.attach(schedule, topology=at)
    x = torch.ones(4, 2)
    told, began = list[str](), time.monotonic()
    for _ in range(2):
        module.fails = rank == place and not behind
        batch = x[:3] if rank == place and behind else x  # refused before the exchange
        try:
            schedule.step(*[batch][rank:], target=batch if rank == 2 else None)
            told.append("fine")
        except Exception as error:  # noqa: BLE001
            told.append(f"{type(error).__name__}: {error}")
    return told, time.monotonic() - began


@pytest.mark.parametrize(("place", "behind"), [(0, True), (1, False)])
def test_an_error_before_stages_know_their_shapes_ends_the_job(place: int, behind: bool) -> None:
    """Without shapes no rank can make the zeros that others wait for."""
    for told, seconds in run_ranks(two_steps, 3, place, behind):
        assert seconds < 60
        for words in told:
            assert words.startswith("StallError: "), told
            assert f"rank {place}" in words
            assert ("Expecting 4" if behind else "no space left") in words
