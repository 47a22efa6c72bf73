"""sharded: each data-parallel rank gets and steps a shard of the averaged gradients, as in ZeRO."""

from __future__ import annotations

from pipegrad import Placement
from pipegrad_handlers.data_parallel import DataParallel


class Sharded(DataParallel):
    """Averages every gradient over the data-parallel dimension, a shard of the result on each rank.

    Use it instead of ``data-parallel``. Half of the traffic runs during and after backward. The
    other half sends updated parameters, during the next forwards. Optimizer state and steps are
    divided among the ranks. Make the optimizer by ``sync.optimizer``. The optimizer
    must be elementwise, because it sees flat shards.

    Args:
        axis: The mesh dimension; by default all data dimensions of the topology.
    """

    placement = Placement.SHARD

    def __init__(self, *, axis: str | None = None) -> None:
        super().__init__(axis=axis)
