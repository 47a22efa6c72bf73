"""Places: where along the mesh something lives that has no equal copies, as checkpoints say it."""

from __future__ import annotations

import re

from pipegrad.plan.plan import Plan
from pipegrad.topology import Topology
from pipegrad.train.config import Config


class Places:
    """Where this rank's copies live, as in ``"[tp=1]"``; "" for what replicas have the same of.

    Args:
        topology: As this rank sees it.
        plan: This rank's.
    """

    def __init__(self, topology: Topology, plan: Plan) -> None:
        self._view = topology
        self._routes, self._divisors = dict(plan.routes), dict(plan.divisors)

    def of(self, key: str | None = None) -> str:
        """Returns the place of a parameter, by dimensions that none of its reductions spans.

        Args:
            key: Which one; None for a buffer, which nobody makes equal.
        """
        view = self._view
        # Replicas along "dp" are one parameter, even if nobody makes them equal: but for experts.
        one = {view.pipeline, *(() if key in self._divisors else ("dp",))}
        reduction_steps = [
            set(reduction_step.ranks) for reduction_step in self._routes.get(key or "", ())
        ]
        apart = [
            f"{axis}={view.coordinate(axis)}"
            for axis, size in view.axes
            if size > 1 and axis not in one
            if not any(
                set(view.ranks_along(axis)) <= reduction_step for reduction_step in reduction_steps
            )
        ]
        return f"[{','.join(apart)}]" if apart else ""


def check_places(config: Config, there: set[str], here: set[str]) -> None:
    """Refuses a checkpoint in which something that the ranks hold lives in other places.

    Args:
        config: The configuration.
        there: All keys of the checkpoint.
        here: Those of all ranks.

    Raises:
        ConfigError: Names one, and its places there and here.
    """
    found, expected = _places(there), _places(here)
    for stem in sorted(expected.keys() & found.keys()):
        if found[stem] != expected[stem]:
            config.refuse(
                "train.resume",
                f"{stem.partition('.')[2]!r} is there in the places {_in_words(found[stem])}, and "
                f"here in {_in_words(expected[stem])}: choose the parallel.dimensions and the "
                f"handlers of the run that wrote it",
            )


def _places(keys: set[str]) -> dict[str, set[str]]:
    """Returns keys without their places -> the places."""
    found: dict[str, set[str]] = {}
    for key in keys:
        stem, location = _parted(key)
        found.setdefault(stem, set()).add(location)
    return found


def _parted(key: str) -> tuple[str, str]:
    """Returns a key of a checkpoint without its place, and its place."""
    found = re.fullmatch(r"(.*?)(\[\w+=\d+(?:,\w+=\d+)*\])", key)
    return (found[1], found[2]) if found else (key, "")


def _in_words(locations: set[str]) -> str:
    return " ".join(location or "(everywhere the same)" for location in sorted(locations))
