"""Everything but the wire: what a run would cost if communication were free."""

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


class Done:
    """Work that is over before it began."""

    def wait(self) -> None:
        """Returns at once."""


class Noop(GradientHandler):
    """Plans what ``pipeline-shared`` and ``data-parallel`` would reduce, and sends nothing.

    For measuring only: copies drift apart, gradients stay each rank's own. Buckets are filled,
    launched and finished as usual, so the difference to a real run is the communication.
    """

    keeps_equal = False

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns the sums that would be sent; a mean would divide what nobody summed."""
        for p in parameters:
            yield Reduction(p, topology.ranks_along(topology.data))
            if p.shared:
                yield Reduction(p, topology.ranks_of(p.holders))

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        """Sends nothing."""
        return Done()
