"""Layout: where along the mesh a parameter or buffer lives that has no equal copies."""

from __future__ import annotations

import re

from pipegrad.plan.plan import Plan
from pipegrad.topology import Topology
from pipegrad.train.config import Config


class Locations:
    """Locations of this rank's parameters, as in ``"[tp=1]"``; "" if all replicas are equal.

    Args:
        topology: The topology of this rank.
        plan: The plan of this rank.
    """

    def __init__(self, topology: Topology, plan: Plan) -> None:
        self._view = topology
        self._routes, self._divisors = dict(plan.routes), dict(plan.divisors)

    def of(self, key: str | None = None) -> str:
        """Returns the location of a parameter, in dimensions that none of its reductions spans.

        Args:
            key: The parameter; None for a buffer, which no reduction makes equal.
        """
        view = self._view
        # Replicas along "dp" count as one parameter, even if no reduction makes them equal. Experts
        # are the exception: each data rank may hold other experts.
        replicated = {view.pipeline, *(() if key in self._divisors else ("dp",))}
        reduction_steps = [
            set(reduction_step.ranks) for reduction_step in self._routes.get(key or "", ())
        ]
        apart = [
            f"{axis}={view.coordinate(axis)}"
            for axis, size in view.axes
            if size > 1 and axis not in replicated
            if not any(
                set(view.ranks_along(axis)) <= reduction_step for reduction_step in reduction_steps
            )
        ]
        return f"[{','.join(apart)}]" if apart else ""


def check_locations(config: Config, saved: set[str], own: set[str]) -> None:
    """Refuses a checkpoint in which a parameter or buffer of this run has other locations.

    Args:
        config: The configuration.
        saved: All keys of the checkpoint.
        own: The keys of all ranks of this run.

    Raises:
        ConfigError: If locations differ. Names a key and both sets of locations.
    """
    saved_at, own_at = _locations_of(saved), _locations_of(own)
    for stem in sorted(own_at.keys() & saved_at.keys()):
        if saved_at[stem] != own_at[stem]:
            config.refuse(
                "train.resume",
                f"{stem.partition('.')[2]!r} is there in the places "
                f"{_in_words(saved_at[stem])}, and here in {_in_words(own_at[stem])}: "
                f"choose the parallel.dimensions and the handlers of the run that wrote it",
            )


def _locations_of(keys: set[str]) -> dict[str, set[str]]:
    """Returns keys without locations -> their locations."""
    locations: dict[str, set[str]] = {}
    for key in keys:
        stem, location = _parted(key)
        locations.setdefault(stem, set()).add(location)
    return locations


def _parted(key: str) -> tuple[str, str]:
    """Returns a key of a checkpoint without its location, and the location."""
    match = re.fullmatch(r"(.*?)(\[\w+=\d+(?:,\w+=\d+)*\])", key)
    return (match[1], match[2]) if match else (key, "")


def _in_words(locations: set[str]) -> str:
    return " ".join(location or "(everywhere the same)" for location in sorted(locations))
