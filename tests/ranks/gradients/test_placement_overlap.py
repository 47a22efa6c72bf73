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
    """Two collectives that wait for each other to have begun: in turns they would never."""

    def __init__(self) -> None:
        self.begun = {kind: threading.Event() for kind in ("shard", "replicate")}
        self.met: list[bool] = []

    def begin(self, kind: str, other: str) -> None:
        self.begun[kind].set()
        self.met.append(self.begun[other].wait(WAIT_SECONDS))


class MeetingRows(By):
    """The second bucket's reduce-scatter waits until the first one's all-reduce has begun."""

    meeting: Meeting

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        if bucket.buffer.numel() > 100:  # the second one's
            self.meeting.begin("shard", "replicate")
        return super().launch(bucket, reduction, group)


class MeetingSums(MeetingRows):
    """The first bucket's all-reduce waits until the second one's reduce-scatter has begun."""

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        if bucket.buffer.numel() < 40:
            self.meeting.begin("replicate", "shard")
        return By.launch(self, bucket, reduction, group)


@pytest.mark.ranks(4)
def test_hops_of_successive_buckets_overlap_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = stage(late=(128,), early=(32,))
    rows, sums = MeetingRows("dp", SHARD, "mean"), MeetingSums("outer", REPLICATE, "mean")
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
        back.begin(*(("shard", "replicate") if len(parameters) > 100 else ("replicate", "shard")))
        gather(parameters, scattered, group)

    monkeypatch.setitem(reductions._SYNC, Placement.SHARD, gathered)
    sync.publish()
    sync.wait_parameters()
    assert back.met == [True, True], sync.plan
    assert [p.unique().tolist() for p in module.parameters()] == [[-1.5], [-1.5]]
    sync.close()
