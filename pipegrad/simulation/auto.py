"""auto: the schedule that takes least time, as a schedule of its own name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from pipegrad.errors import ScheduleError
from pipegrad.schedules.builtin.one_f_one_b import OneForwardOneBackward
from pipegrad.schedules.measured import MeasuredGenerator, Times
from pipegrad.schedules.schedule import Schedule
from pipegrad.simulation.choose import Choice, check_limit, choose
from pipegrad.simulation.costs import Costs, LinkCosts, Network, StageCosts

# Bytes of a value whose size is not known, over a link that takes the measured time for them. Only
# the time counts.
_BYTES = 2**20


class Auto(MeasuredGenerator):
    """Simulates all schedules with the costs of a job, and takes the best; see `choose`.

    Without `costs` it begins as 1f1b, and a `Scheduler` measures computes and hops in its second
    step. From the third step on it is the best of the schedules that have one stage on each rank,
    do not split backwards, and hold at most 2 P - 1 microbatches, as eager-1f1b does; the others
    would move stages, or need further measurements. Each rank chooses without a message, because
    all have the same numbers and choosing is pure.

    Args:
        costs: A file of `Costs`, its content, or the costs themselves.
        memory_limit_bytes: The most that a rank may hold; needs `costs`.

    Raises:
        ScheduleError: If the costs cannot be read, or if a limit is no number or needs costs.
    """

    def __init__(
        self,
        *,
        costs: Costs | Mapping[str, Any] | str | PathLike[str] | None = None,
        memory_limit_bytes: int | None = None,
    ) -> None:
        if memory_limit_bytes is not None and costs is None:
            raise ScheduleError(
                "memory_limit_bytes needs costs, which say what stages hold: give costs"
            )
        check_limit("memory_limit_bytes", memory_limit_bytes)
        self._costs = _read(costs)
        self._memory_limit_bytes = memory_limit_bytes
        self._max_live_activations: int | None = None
        self._choices: dict[tuple[int, int], Choice] = {}

    @property
    def wants_times(self) -> bool:
        """True until costs are given, or measured."""
        return self._costs is None

    def generate(self, *, num_ranks: int, num_microbatches: int) -> Schedule:
        """Returns the best schedule; without costs 1f1b.

        Raises:
            ScheduleError: If no schedule fits, or if the costs are of other stages.
        """
        chosen = self.choice(num_ranks=num_ranks, num_microbatches=num_microbatches)
        if chosen is not None:
            return chosen.schedule
        begin = OneForwardOneBackward()
        made = begin.generate(num_ranks=num_ranks, num_microbatches=num_microbatches)
        return replace(made, name="auto")

    def choice(self, *, num_ranks: int, num_microbatches: int) -> Choice | None:
        """Returns the chosen schedule and all other candidates; None without costs.

        Raises:
            ScheduleError: If no schedule fits, or if the costs are of other stages.
        """
        if self._costs is None:
            return None
        key = num_ranks, num_microbatches
        if key not in self._choices:
            self._choices[key] = choose(
                num_ranks=num_ranks,
                num_microbatches=num_microbatches,
                costs=self._costs,
                memory_limit_bytes=self._memory_limit_bytes,
                max_live_activations=self._max_live_activations,
            )
        return self._choices[key]

    def planned(self, times: Times) -> Auto:
        """Returns the generator of the schedules from the next step on."""
        planned = Auto(costs=costs_of(times))
        planned._max_live_activations = 2 * len(times.forward_seconds) - 1
        return planned


def costs_of(times: Times) -> Costs:
    """Returns the costs of one stage a rank, from measured times of computes and hops."""
    num_ranks = len(times.forward_seconds)
    weights = times.weight_seconds or (0.0,) * num_ranks
    stages = tuple(
        StageCosts(
            forward_seconds=forward,
            backward_seconds=backward,
            # A part may exceed the whole, because each is a median or the slowest pipeline's.
            weight_seconds=min(weight, backward),
            outputs={"x": _BYTES} if rank + 1 < num_ranks else {},
        )
        for rank, (forward, backward, weight) in enumerate(
            zip(times.forward_seconds, times.backward_seconds, weights, strict=True)
        )
    )
    links = tuple(
        LinkCosts(source, target, bytes_per_second=_BYTES / max(seconds, 1e-9))
        for hop, seconds in enumerate(times.hop_seconds)
        for source, target in ((hop, hop + 1), (hop + 1, hop))
    )
    return Costs(stages, Network(links=links))


def _read(costs: Costs | Mapping[str, Any] | str | PathLike[str] | None) -> Costs | None:
    if costs is None or isinstance(costs, Costs):
        return costs
    return Costs.from_json(costs) if isinstance(costs, Mapping) else Costs.load(Path(costs))
