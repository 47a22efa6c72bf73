"""owned: each matrix is averaged onto one data-parallel rank, which steps it whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipegrad import GradientHandler, ParameterRecord, Placement, Reduction, Topology
from pipegrad.plugins.handler import EMBEDDINGS_AND_HEADS
from pipegrad_handlers.options import checked_patterns, refuse_unmatched


class Owned(GradientHandler):
    """Averages gradients over the data-parallel dimension: matrices whole, the rest in shards.

    Use it instead of ``data-parallel`` for optimizers that look at whole matrices, such as Muon,
    SOAP and Shampoo: ``sync.optimizer(torch.optim.Muon, others=torch.optim.AdamW)``. Each rank gets
    the average of some matrices, steps them, and sends them to the other ranks during the next
    forwards. The ranks have similar work. Everything else is sharded, as by ``sharded``. Each
    element is stepped by one rank, and optimizer state is divided among the ranks.

    A matrix has two dimensions or more. Embeddings and heads are none: a parameter of a module
    whose class is called an embedding, one that several modules hold, in one stage or in several,
    and one that `others` matches. A module that the model uses twice is one module, if no cut
    divides its uses.

    Args:
        axis: The mesh dimension; by default all data dimensions of the topology.
        others: Shell-style patterns of the names of further parameters that are sharded,
            case-sensitive. They replace the default, usual names of embeddings and heads.
    """

    def __init__(
        self, *, axis: str | None = None, others: Sequence[str] = EMBEDDINGS_AND_HEADS
    ) -> None:
        self._axis = axis
        self._others = checked_patterns("others", others)

    def check(self, parameters: Sequence[ParameterRecord], topology: Topology) -> None:
        """Refuses patterns that match nothing, but for the default."""
        if self._others != EMBEDDINGS_AND_HEADS:
            refuse_unmatched("others", self._others, parameters)

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns one mean for each parameter. It costs nothing if the dimension has size 1."""
        ranks = topology.ranks_along(self._axis or topology.data)
        for p in parameters:
            placement = Placement.WHOLE if p.is_matrix(self._others) else Placement.SHARD
            yield Reduction(p, ranks, "mean", placement)
