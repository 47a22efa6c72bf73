"""pipeline-shared: sums the gradients of tied parameters over the stages that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pipegrad import GradientHandler, ParameterRecord, Placement, Reduction, Topology
from pipegrad.plugins.handler import Exchange
from pipegrad_handlers.options import checked_word


class PipelineShared(GradientHandler):
    """Sums a tied parameter's gradient over its holders, as one process would.

    It takes a sum, not a mean, because each stage uses the parameter in another way, and one
    process would add the gradients of all uses.

    Args:
        placement: ``replicate``: every holder gets the sum and steps the parameter. ``owner``: only
            the lowest rank of the holders steps it. The parts of the others leave as soon as they
            are final, and the updated parameter comes back during the next step's first forwards.
            The optimizer must then be made by ``sync.optimizer``.
        exchange: With ``replicate``, how two ranks exchange their parts. ``all-reduce`` runs when
            both are final. ``asymmetric`` sends one message in each direction: the whole gradient
            of the later stage while the pipeline drains, the rows that the first stage used while
            it fills again. Use it for an embedding that is tied to the head. It needs the memory of
            the gradient once more on the lower rank. Ties of more than two ranks always use
            ``all-reduce``.
    """

    def __init__(
        self,
        *,
        placement: Literal["replicate", "owner"] = "replicate",
        exchange: Exchange = "all-reduce",
    ) -> None:
        self._placement = Placement(checked_word("placement", placement, ["replicate", "owner"]))
        self._exchange: Exchange = exchange

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns one sum for each tied parameter. It costs nothing if one rank has all holders."""
        return [self._sum(p, topology.ranks_of(p.holders)) for p in parameters if p.shared]

    def _sum(self, record: ParameterRecord, ranks: tuple[int, ...]) -> Reduction:
        # An exchange is messages between two ranks. A tie of more ranks needs a collective.
        is_other = self._exchange == "asymmetric" and len(ranks) != 2
        exchange = "all-reduce" if is_other else self._exchange
        return Reduction(record, ranks, "sum", self._placement, exchange=exchange)
