"""noop: does everything except communication, to measure the cost of communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
from pipegrad.plugins.handler import Done


class Noop(GradientHandler):
    """Plans the reductions of ``pipeline-shared`` and ``data-parallel``, and sends nothing.

    Use it only for measurements: copies drift apart, and each rank keeps its own gradients. The
    difference to a real run is communication, because buckets are filled, launched and finished as
    usual.
    """

    # pipegrad must accept drift, because this handler causes it.
    keeps_equal = False

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns the reductions that would be sent."""
        # All are sums. A mean would also divide gradients that were never summed.
        for p in parameters:
            yield Reduction(p, topology.ranks_along(topology.data))
            if p.shared:
                yield Reduction(p, topology.ranks_of(p.holders))

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        """Sends nothing."""
        return Done()
