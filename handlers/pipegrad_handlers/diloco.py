"""diloco: data replicas train alone, and meet every few steps. For clusters with slow links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipegrad import (
    GradientHandler,
    OuterStep,
    ParameterRecord,
    Placement,
    Reduction,
    Topology,
)


class DiLoCo(GradientHandler):
    """Lets every data replica train alone, and joins all replicas every few steps.

    Use it instead of ``data-parallel``. No gradient is sent along the dimension. After every
    `every` steps the replicas average how far they have come, and an outer Nesterov step moves the
    parameters of the last meeting: see `pipegrad.OuterStep`. The bytes on the dimension are divided
    by about `every`. Make the optimizer by ``sync.optimizer``; its state stays with each replica.

    With `axis`, the handler joins clusters: ``data-parallel`` with the inner dimension as its axis
    keeps the replicas inside of a cluster equal, and this handler has the outer dimension.

    Args:
        every: Steps between two meetings.
        lr: Learning rate of the outer step.
        momentum: Its Nesterov momentum. With 0 and an `lr` of 1 replicas are averaged.
        axis: The mesh dimension; by default all data dimensions of the topology.
    """

    def __init__(
        self, *, every: int, lr: float = 0.7, momentum: float = 0.9, axis: str | None = None
    ) -> None:
        self._axis = axis
        self.outer = OuterStep(every=every, lr=lr, momentum=momentum)

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        """Returns one meeting for each parameter. It costs nothing if the dimension has size 1."""
        ranks = topology.ranks_along(self._axis or topology.data)
        return [Reduction(p, ranks, "mean", Placement.MEET) for p in parameters]
