"""Names of parameters in checkpoints: those of the uncut model, the same for any cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from pipegrad.plan.plan import Plan
from pipegrad.plugins.handler import ParameterRecord
from pipegrad.topology import Topology


def uncut_names(records: Sequence[ParameterRecord]) -> dict[str, str]:
    """Returns key -> name in the uncut model.

    If several stages use one name for parameters that are not tied, there is no such name. Then it
    is the key, such as ``"1.weight"``.

    Args:
        records: Of all ranks, from their lowest holders.
    """
    names = {record.key: record.key.partition(".")[2] for record in records}
    counts = Counter(names.values())
    return {key: name if counts[name] == 1 else key for key, name in names.items()}


class Locations:
    """Locations of this rank's parameters, as in ``"[tp=1]"``; "" if all replicas are equal.

    Args:
        topology: The topology of this rank.
        plan: The plan of this rank.
    """

    def __init__(self, topology: Topology, plan: Plan) -> None:
        self._view = topology
        self._routes, self._divisors = dict(plan.routes), dict(plan.divisors)
        self._independent = plan.independent_axes

    def of(self, key: str | None = None) -> str:
        """Returns the location of a parameter, in dimensions that none of its reductions spans.

        Args:
            key: The parameter; None for a buffer, which no reduction makes equal.
        """
        # Replicas along "dp" count as one parameter, even if no reduction makes them equal. Experts
        # are the exception: each data rank may hold other experts. So are replicas that train
        # alone: each has its own parameters, and its own state of the optimizer.
        is_apart = key in self._divisors or (key is not None and self._independent)
        return self._along(key, () if is_apart else ("dp",))

    def joined(self, key: str) -> str:
        """Returns the location of a parameter in a run whose replicas do not train alone."""
        return self._along(key, self._independent) if self._independent else self.of(key)

    def _along(self, key: str | None, replicated: Collection[str]) -> str:
        """Returns the location in all dimensions but the pipeline and `replicated`."""
        view = self._view
        replicated = {view.pipeline, *replicated}
        reduction_steps = [set(step.ranks) for step in self._routes.get(key or "", ())]
        apart = [
            f"{axis}={view.coordinate(axis)}"
            for axis, size in view.axes
            if size > 1 and axis not in replicated
            if not any(
                set(view.ranks_along(axis)) <= reduction_step for reduction_step in reduction_steps
            )
        ]
        return f"[{','.join(apart)}]" if apart else ""
