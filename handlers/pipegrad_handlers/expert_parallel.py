"""Experts live on a rank each and are given tokens of many; all else is data parallel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pipegrad import (
    CommunicationHook,
    GradientHandler,
    ParameterRecord,
    Placement,
    Reduction,
    Topology,
)
from pipegrad_handlers.patterns import Patterns

_PLACEMENTS = {"replicate": Placement.REPLICATE, "shard": Placement.SHARD}


class ExpertParallel(GradientHandler):
    """Averages experts over the ranks that hold the same ones, everything else over all data ranks.

    In the place of ``data-parallel`` or ``sharded``. An expert's gradient has the tokens of all
    ranks along `axis` in it, and the loss is the mean over all data ranks: so besides the mean over
    its copies it is divided by the size of `axis`. Without that experts would learn faster than
    the rest, by that factor.

    Args:
        experts: Shell-style patterns of names, case-sensitive: what lives on its rank along `axis`
            alone.
        axis: The mesh dimension that tokens are exchanged along; one of the topology's ``data``.
        placement: ``replicate``, or ``shard``: each rank steps a shard of what it averages.
        hook: With ``replicate``, how they are sent, as in ``data-parallel``.
    """

    def __init__(
        self,
        *,
        experts: Sequence[str] = ("*experts*",),
        axis: str = "ep",
        placement: Literal["replicate", "shard"] = "replicate",
        hook: str | Mapping[str, object] | None = None,
    ) -> None:
        if placement not in _PLACEMENTS:
            raise ValueError(f"placement is {placement!r}, expected one of {list(_PLACEMENTS)}")
        self._experts = Patterns("experts", experts)
        self._axis = axis
        self._placement = _PLACEMENTS[placement]
        self.hook = None if hook is None else CommunicationHook(hook)

    def check(self, parameters: Sequence[ParameterRecord], topology: Topology) -> None:
        """Refuses patterns that match nothing: all experts would become one."""
        if topology.size(self._axis) > 1:
            self._experts.check(parameters)

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
        divisor, everyone = topology.size(self._axis), topology.ranks_along(axes)
        for p in parameters:
            if self._experts.match(p):
                yield Reduction(p, copies, "mean", self._placement, divisor)
            else:
                yield Reduction(p, everyone, "mean", self._placement)
