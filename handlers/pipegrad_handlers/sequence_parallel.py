"""Gradients of parameters that are whole on every tensor-parallel rank, which sees a part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pipegrad import GradientHandler, ParameterRecord, Reduction, Topology
from pipegrad_handlers.patterns import Patterns


class SequenceParallel(GradientHandler):
    """Sums the gradients of parameters that a tensor- or sequence-parallel dimension replicates.

    Each of its ranks has the gradient of its part of the sequence or of the heads: of norms, of
    biases behind a row-parallel layer, of embeddings. What is sharded over the dimension, weights
    of column- and row-parallel layers, is not to be listed. Goes with ``data-parallel``,
    ``sharded`` and ``pipeline-shared``.

    Args:
        parameters: Shell-style patterns of names, case-sensitive: what is replicated.
        axis: The mesh dimension.
        op: ``sum`` of parts. ``mean`` where every rank has the whole gradient already: copies then
            stay equal to the last bit, and count once in the norm instead of once a rank.
    """

    def __init__(
        self,
        *,
        parameters: Sequence[str],
        axis: str = "tp",
        op: Literal["sum", "mean"] = "sum",
    ) -> None:
        if op not in ("sum", "mean"):
            raise ValueError(f"op is {op!r}, expected 'sum' or 'mean'")
        self._parameters = Patterns("parameters", parameters)
        self._axis = axis
        self._op: Literal["sum", "mean"] = op

    def check(self, parameters: Sequence[ParameterRecord], topology: Topology) -> None:
        """Refuses patterns that match nothing, where there are ranks to sum over."""
        if topology.size(self._axis) > 1:
            self._parameters.check(parameters)

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns one reduction for each parameter that matches."""
        ranks = topology.ranks_along(self._axis)
        return [Reduction(p, ranks, self._op) for p in parameters if self._parameters.match(p)]
