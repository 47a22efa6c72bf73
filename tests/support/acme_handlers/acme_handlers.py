"""A handler as somebody else writes it: one class, pipegrad's public names only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipegrad import GradientHandler, ParameterRecord, Reduction, Topology


class AcmeSum(GradientHandler):
    """Sums every gradient along one mesh dimension."""

    def __init__(self, *, axis: str = "dp") -> None:
        self.axis = axis

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        ranks = topology.ranks_along(self.axis)
        return [Reduction(p, ranks) for p in parameters]
