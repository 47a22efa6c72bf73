"""expert-parallel: each rank holds other experts; everything else is data parallel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pipegrad import ParameterRecord, Placement, Reduction, Topology
from pipegrad.plugins.handler import matches_any
from pipegrad_handlers.communication_hook import CommunicationHook
from pipegrad_handlers.options import checked_patterns, checked_word, refuse_unmatched


class ExpertParallel(CommunicationHook):
    """Averages experts over the ranks that hold the same ones, everything else over all data ranks.

    Use it instead of ``data-parallel`` or ``sharded``. An expert's gradient is averaged over its
    copies and also divided by the size of `axis`, because it contains the tokens of all ranks along
    `axis`, and the loss is the mean over all data ranks. Without this division, experts would learn
    faster than the rest, by that factor.

    Args:
        experts: Shell-style patterns of the names of experts, case-sensitive. Along `axis`, each
            rank has other experts.
        axis: The mesh dimension along which tokens are exchanged, one of the topology's ``data``.
        placement: ``replicate``, or ``shard``: each rank steps a shard of the average.
        hook: With ``replicate``, how gradients are sent, as in ``data-parallel``.
    """

    def __init__(
        self,
        *,
        experts: Sequence[str] = ("*experts*",),
        axis: str = "ep",
        placement: Literal["replicate", "shard"] = "replicate",
        hook: str | Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(hook)
        self._experts = checked_patterns("experts", experts)
        self._axis = axis
        self._placement = Placement(checked_word("placement", placement, ["replicate", "shard"]))

    def check(self, parameters: Sequence[ParameterRecord], topology: Topology) -> None:
        """Refuses patterns that match nothing."""
        # Without a match all experts would be averaged over all data ranks, as if they were copies.
        if topology.size(self._axis) > 1:
            refuse_unmatched("experts", self._experts, parameters)

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns one mean for each parameter.

        Raises:
            ValueError: If ranks along `axis` do not see different data.
        """
        axes = topology.data_axes
        if self._axis not in axes:
            raise ValueError(
                f"axis is {self._axis!r}, but ranks see different data along {list(axes)} only: "
                f"choose one of these, or add {self._axis!r} to the topology's data dimensions"
            )
        copies = topology.ranks_along(tuple(axis for axis in axes if axis != self._axis))
        # Copies of an expert are on the ranks that differ in the other data dimensions.
        divisor, all_ranks = topology.size(self._axis), topology.ranks_along(axes)
        for p in parameters:
            if matches_any(self._experts, p.names):
                yield Reduction(p, copies, "mean", self._placement, divisor)
            else:
                yield Reduction(p, all_ranks, "mean", self._placement)
