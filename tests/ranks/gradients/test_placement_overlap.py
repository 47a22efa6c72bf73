"""A bucket's reduce-scatter runs beside another's all-reduce, and so do their ways back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pipegrad import FlatBucket, GradientSync, Placement, ReductionStep, Topology, Work
from pipegrad.reduce import reductions
from pipegrad.testing import run_ranks
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.sharded import Sharded

WAIT_SECONDS = 30.0


class Meeting:
    """Two collectives that wait for each other to have begun: in turns they would never."""

    def __init__(self) -> None:
        self.begun = {kind: threading.Event() for kind in ("shard", "replicate")}
        self.met: list[bool] = []

    def begin(self, kind: str, other: str) -> None:
        self.begun[kind].set()
        self.met.append(self.begun[other].wait(WAIT_SECONDS))


class MeetingRows(Sharded):
    """The second bucket's reduce-scatter waits until the first one's all-reduce has begun."""

    meeting = Meeting()

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        if bucket.buffer.numel() > 100:  # the second one's
            self.meeting.begin("shard", "replicate")
        return super().launch(bucket, reduction, group)


class MeetingSums(DataParallel):
    """The first bucket's all-reduce waits until the second one's reduce-scatter has begun."""

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        if bucket.buffer.numel() < 40:
            MeetingRows.meeting.begin("replicate", "shard")
        return super().launch(bucket, reduction, group)


def step() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "outer", "dp"))
    module = nn.Module()
    module.late = nn.Parameter(torch.zeros(128))
    module.early = nn.Parameter(torch.zeros(32))
    sync = GradientSync(
        {0: module},
        Topology.from_mesh(mesh),
        handlers=[MeetingRows, {"name": f"{__name__}:MeetingSums", "axis": "outer"}],
        bucket_bytes=0,
        comm_streams=2,
    )
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
    sync.prepare()
    for parameter in (module.late, module.early):
        parameter.grad = torch.full_like(parameter, float(dist.get_rank()))
    sync.stage_final(0)
    sync.finish()
    optimizer.step()

    back, gather = Meeting(), reductions._SYNC[Placement.SHARD]

    def gathered(
        parameters: torch.Tensor, scattered: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        back.begin(*(("shard", "replicate") if len(parameters) > 100 else ("replicate", "shard")))
        gather(parameters, scattered, group)

    reductions._SYNC[Placement.SHARD] = gathered  # type: ignore[index]
    sync.publish()
    sync.wait_parameters()
    reductions._SYNC[Placement.SHARD] = gather  # type: ignore[index]
    values = [float(x) for p in module.parameters() for x in p.detach().unique()]
    found = {"met": MeetingRows.meeting.met, "back": back.met, "values": values}
    sync.close()
    return {**found, "plan": str(sync.plan)}


def test_hops_of_successive_buckets_overlap_there_and_back() -> None:
    for reply in run_ranks(step, 4):
        assert (reply["met"], reply["back"]) == ([True, True], [True, True]), reply["plan"]
        assert reply["values"] == [-1.5, -1.5]
