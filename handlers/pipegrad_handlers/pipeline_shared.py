"""Gradients of parameters that several pipeline stages hold are summed over those stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pipegrad import GradientHandler, ParameterRecord, Placement, Reduction, Topology

_PLACEMENTS = {"replicate": Placement.REPLICATE, "owner": Placement.OWNER}


class PipelineShared(GradientHandler):
    """Sums a tied parameter's gradient over its holders, so that it is what one process has.

    A sum, not a mean: each stage saw a different use of the parameter, and one process would have
    added their gradients.

    Args:
        placement: ``replicate``: every holder gets the sum, and steps. ``owner``: the lowest rank
            of them does alone; the others' parts leave as soon as they are final, and the updated
            parameter comes back under the next step's first forwards. The optimizer is then made
            of ``sync.optimizer_parameters()``.
    """

    def __init__(self, *, placement: Literal["replicate", "owner"] = "replicate") -> None:
        try:
            self._placement = _PLACEMENTS[placement]
        except KeyError:
            raise ValueError(
                f"placement is {placement!r}, expected one of {list(_PLACEMENTS)}"
            ) from None

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns one sum for each shared parameter; free where one rank holds all its stages."""
        return [
            Reduction(p, topology.ranks_of(p.holders), "sum", self._placement)
            for p in parameters
            if p.shared
        ]
