"""Gradients of parameters that several pipeline stages hold are summed over those stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from pipegrad import GradientHandler, ParameterRecord, Placement, Reduction, Topology
from pipegrad.plugins.handler import Exchange

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
        exchange: With ``replicate``, how the parts of two ranks meet. ``all-reduce``: once both are
            final. ``pairwise``: by one message each way, the later stages' while the pipeline
            drains, the first ones' while it fills again; for as much memory again on each rank, and
            twice on the lower. ``asymmetric``: the same, but from the lower rank only the rows come
            back that it used: for an embedding tied to the head. Ties of more ranks all-reduce.
    """

    def __init__(
        self,
        *,
        placement: Literal["replicate", "owner"] = "replicate",
        exchange: Exchange = "all-reduce",
    ) -> None:
        try:
            self._placement = _PLACEMENTS[placement]
        except KeyError:
            raise ValueError(
                f"placement is {placement!r}, expected one of {list(_PLACEMENTS)}"
            ) from None
        if exchange not in get_args(Exchange):
            raise ValueError(
                f"exchange is {exchange!r}, expected one of {list(get_args(Exchange))}"
            )
        if exchange != "all-reduce" and placement != "replicate":
            raise ValueError(f"placement {placement!r} has no exchange {exchange!r}: drop one")
        self._exchange = exchange

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns one sum for each shared parameter; free where one rank holds all its stages."""
        return [self._sum(p, topology.ranks_of(p.holders)) for p in parameters if p.shared]

    def _sum(self, record: ParameterRecord, ranks: tuple[int, ...]) -> Reduction:
        exchange = self._exchange if len(ranks) == 2 else "all-reduce"
        return Reduction(record, ranks, "sum", self._placement, exchange=exchange)
