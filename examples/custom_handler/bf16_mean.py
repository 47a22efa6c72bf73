"""Gradients are averaged over data-parallel replicas with half of the bytes, or fewer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from pipegrad import (
    FlatBucket,
    GradientHandler,
    ParameterRecord,
    Reduction,
    ReductionStep,
    Topology,
    Work,
)


class Done:
    """Work that has ended already."""

    def wait(self) -> None:
        """Returns at once."""


class Bf16Mean(GradientHandler):
    """Averages as ``data-parallel`` does, and sends what is wider than 16 bits as bfloat16.

    Sums are made in bfloat16 too, so with two replicas a gradient is off by up to 1 %.
    """

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns one mean for each parameter."""
        ranks = topology.ranks_along(topology.data)
        return [Reduction(p, ranks, "mean") for p in parameters]

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        """Sums a bfloat16 copy of ``bucket.buffer``, and copies it back.

        Flags at the end of the buffer, which say who contributed, are small integers: bfloat16 has
        them exactly up to 256, and beyond that none of them becomes zero.

        Sync: all on the comm stream: on its stream, or on CPU in its thread, which waits for the
            sum. That
        is what a comm stream is for: the compute goes on beside it.
        """
        if bucket.buffer.itemsize <= 2:
            return super().launch(bucket, reduction, group)
        sent = bucket.buffer.to(torch.bfloat16)
        dist.all_reduce(sent, group=group)  # no async_op: what follows is ordered behind the sum
        bucket.buffer.copy_(sent)
        return Done()
