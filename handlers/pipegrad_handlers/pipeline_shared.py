"""Gradients of parameters that several pipeline stages hold are summed over those stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipegrad import GradientHandler, ParameterRecord, Reduction, Topology


class PipelineShared(GradientHandler):
    """Sums a tied parameter's gradient over its holders, so that it is what one process has.

    A sum, not a mean: each stage saw a different use of the parameter, and one process would have
    added their gradients.
    """

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns one sum for each shared parameter; free where one rank holds all its stages."""
        return [Reduction(p, topology.ranks_of(p.holders)) for p in parameters if p.shared]
