"""sequence-parallel: reduces gradients of parameters that tensor-parallel ranks replicate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipegrad import GradientHandler, ParameterRecord, Reduction, Topology
from pipegrad.plugins.handler import Op, matches_any
from pipegrad_handlers.options import checked_patterns, refuse_unmatched


class SequenceParallel(GradientHandler):
    """Sums the gradients of parameters that a tensor- or sequence-parallel dimension replicates.

    Each rank has the gradient of its part of the sequence or of the heads. This concerns norms,
    biases after a row-parallel layer, and embeddings. Do not list parameters that are sharded over
    the dimension, such as weights of column- and row-parallel layers. The handler works together
    with ``data-parallel``, ``sharded`` and ``pipeline-shared``.

    Args:
        parameters: Shell-style patterns of the names of replicated parameters, case-sensitive.
        axis: The mesh dimension.
        op: ``sum`` adds the parts. Use ``mean`` if every rank already has the whole gradient.
            Copies then stay equal to the last bit. They count once in the norm, not once for each
            rank.
    """

    def __init__(
        self,
        *,
        parameters: Sequence[str],
        axis: str = "tp",
        op: Op = "sum",
    ) -> None:
        self._parameters = checked_patterns("parameters", parameters)
        self._axis = axis
        self._op: Op = op

    def check(self, parameters: Sequence[ParameterRecord], topology: Topology) -> None:
        """Refuses patterns that match nothing, if the dimension has more than one rank."""
        if topology.size(self._axis) > 1:
            refuse_unmatched("parameters", self._parameters, parameters)

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns one reduction for each parameter that matches."""
        ranks = topology.ranks_along(self._axis)
        replicated = [p for p in parameters if matches_any(self._parameters, p.names)]
        return [Reduction(p, ranks, self._op) for p in replicated]
