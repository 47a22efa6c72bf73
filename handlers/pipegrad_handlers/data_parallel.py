"""Gradients are averaged over the ranks that hold the same stage and saw different data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipegrad import CommunicationHook, GradientHandler, ParameterRecord, Reduction, Topology


class DataParallel(GradientHandler):
    """Averages every gradient over the data-parallel dimension.

    A mean: the loss of each rank is a mean over its share of the batch.

    Args:
        axis: The mesh dimension; by default all data dimensions of the topology. Behind
            ``sharded`` an outer one, over which shards are averaged.
        hook: How they are sent, a communication hook of torch's DistributedDataParallel by name:
            ``"bf16_compress_hook"``, or a table of name and options, ``{name = "powerSGD_hook",
            matrix_approximation_rank = 2}``; see `pipegrad.CommunicationHook`.
    """

    def __init__(
        self, *, axis: str | None = None, hook: str | Mapping[str, object] | None = None
    ) -> None:
        self._axis = axis
        self.hook = None if hook is None else CommunicationHook(hook)

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns one mean for each parameter; free where the dimension has size 1."""
        ranks = topology.ranks_along(self._axis or topology.data)
        return [Reduction(p, ranks, "mean") for p in parameters]
