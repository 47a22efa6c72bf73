"""A bucket's reduce-scatter runs beside another's all-reduce, and so do their ways back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipegrad import FlatBucket, GradientSync, Placement, ReductionStep, Work
from pipegrad.reduce import reductions
from tests.support.gradients.cases import rank, stage
from tests.support.gradients.placements import REPLICATE, SHARD, By, mesh

WAIT_SECONDS = 30.0


class Meeting:
    """Two collectives, one of rows, that wait for each other: in turns they would never begin."""

    def __init__(self) -> None:
        self.begun = threading.Event(), threading.Event()
        self.met: list[bool] = []

    def begin(self, *, is_rows: bool) -> None:
        self.begun[is_rows].set()
        self.met.append(self.begun[not is_rows].wait(WAIT_SECONDS))


class Meets(By):
    """The second bucket's reduce-scatter and the first one's all-reduce wait for each other."""

    meeting: Meeting

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        is_rows, numel = self._axis == "dp", bucket.buffer.numel()
        if (numel > 100) if is_rows else (numel < 40):
            self.meeting.begin(is_rows=is_rows)
        return super().launch(bucket, reduction, group)


@pytest.mark.ranks(4)
def test_hops_of_successive_buckets_overlap_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = stage(late=(128,), early=(32,))
    rows, sums = Meets("dp", SHARD, "mean"), Meets("outer", REPLICATE, "mean")
    rows.meeting = sums.meeting = Meeting()
    options: dict[str, Any] = {"bucket_bytes": 0, "comm_streams": 2}
    sync = GradientSync({0: module}, mesh(outer=2, dp=2), handlers=[rows, sums], **options)
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
    sync.prepare()
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, float(rank()))
    sync.stage_final(0)
    sync.finish()
    optimizer.step()
    assert rows.meeting.met == [True, True], sync.plan

    back, gather = Meeting(), reductions._SYNC[Placement.SHARD]

    def gathered(
        parameters: torch.Tensor, scattered: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        back.begin(is_rows=len(parameters) > 100)
        gather(parameters, scattered, group)

    monkeypatch.setitem(reductions._SYNC, Placement.SHARD, gathered)
    sync.publish()
    sync.wait_parameters()
    assert back.met == [True, True], sync.plan
    assert [p.unique().tolist() for p in module.parameters()] == [[-1.5], [-1.5]]
    sync.close()
