"""Each data-parallel rank gets, and steps, its part of the averaged gradients: ZeRO's idea."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipegrad import GradientHandler, ParameterRecord, Placement, Reduction, Topology


class Sharded(GradientHandler):
    """Averages every gradient over the data-parallel dimension, a shard of the result on each rank.

    In the place of ``data-parallel``: half of its traffic behind backward, the other half, updated
    parameters, under the next forward; optimizer state and steps are divided by the ranks. The
    optimizer is made of ``sync.optimizer_parameters()``, and looks at each element by itself.

    Args:
        axis: The mesh dimension; by default all data dimensions of the topology.
    """

    def __init__(self, *, axis: str | None = None) -> None:
        self._axis = axis

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns one mean for each parameter; free where the dimension has size 1."""
        ranks = topology.ranks_along(self._axis or topology.data)
        return [Reduction(p, ranks, "mean", Placement.SHARD) for p in parameters]
