"""data-parallel: averages gradients over the ranks that hold the same stage, with other data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipegrad import ParameterRecord, Placement, Reduction, Topology
from pipegrad_handlers.communication_hook import CommunicationHook


class DataParallel(CommunicationHook):
    """Averages every gradient over the data-parallel dimension.

    It takes a mean, because the loss of each rank is a mean over its share of the batch.

    Args:
        axis: The mesh dimension; by default all data dimensions of the topology.
        hook: A communication hook that sends the gradients; see `CommunicationHook`.
    """

    placement: Placement = Placement.REPLICATE

    def __init__(
        self, *, axis: str | None = None, hook: str | Mapping[str, object] | None = None
    ) -> None:
        super().__init__(hook)
        self._axis = axis

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns one mean for each parameter. It costs nothing if the dimension has size 1."""
        ranks = topology.ranks_along(self._axis or topology.data)
        return [Reduction(p, ranks, "mean", self.placement) for p in parameters]
