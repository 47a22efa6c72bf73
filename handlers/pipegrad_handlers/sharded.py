"""sharded: each data-parallel rank gets and steps a shard of the averaged gradients, as in ZeRO."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipegrad import GradientHandler, ParameterRecord, Placement, Reduction, Topology


class Sharded(GradientHandler):
    """Averages every gradient over the data-parallel dimension, a shard of the result on each rank.

    Use it instead of ``data-parallel``. Half of the traffic runs during and after backward. The
    other half sends updated parameters, during the next forwards. Optimizer state and steps are
    divided among the ranks. Make the optimizer by ``sync.optimizer``. The optimizer
    must be elementwise, because it sees flat shards.

    Args:
        axis: The mesh dimension; by default all data dimensions of the topology.
    """

    def __init__(self, *, axis: str | None = None) -> None:
        self._axis = axis

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns one mean for each parameter. It costs nothing if the dimension has size 1."""
        ranks = topology.ranks_along(self._axis or topology.data)
        return [Reduction(p, ranks, "mean", Placement.SHARD) for p in parameters]
