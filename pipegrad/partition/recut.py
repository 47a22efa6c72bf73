"""recut: where a model should be cut, by what its layers took, and what that gains. Pure.

[Note: recut] The cut makes the slowest stage as fast as can be, as `cut` does with measured times.
A stage must fit into the memory limit. What 1f1b holds is counted: a stage has as many microbatches
in flight as there are stages from it to the last one. The gain is that of simulated steps, before
and after.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from pipegrad.errors import TopologyError
from pipegrad.partition.boundaries import Cost, Layer, balanced
from pipegrad.schedules import lower
from pipegrad.schedules.schedule import Schedule
from pipegrad.simulation.choose import chain_of, merged_stages
from pipegrad.simulation.costs import Costs, StageCosts
from pipegrad.simulation.simulator import simulate


@dataclass(frozen=True)
class Recut:
    """Another cut of a model.

    Attributes:
        names: Of the layers.
        before: Index of the first layer of every stage but the first, as the model is cut now.
        boundaries: The same of the other cut; ``pipegrad.cut(model, n, boundaries=...)`` takes it.
        seconds_before: What a step is simulated to take.
        seconds: The same with the other cut.
    """

    names: tuple[str, ...]
    before: tuple[int, ...]
    boundaries: tuple[int, ...]
    seconds_before: float
    seconds: float

    @property
    def gain(self) -> float:
        """The share of a step's time that is saved; 0 if the cut stays."""
        return 1 - self.seconds / self.seconds_before if self.seconds_before else 0.0

    def __str__(self) -> str:
        moves = self._moves()
        if not moves:
            return "the cut is the best there is"
        # A cut that must hold less memory may take more time.
        less = "less" if self.gain >= 0 else "more"
        return f"move {'; '.join(moves)}: {abs(self.gain):.0%} {less} time"

    def _moves(self) -> list[str]:
        moved: dict[int, list[str]] = {}
        for layer, name in enumerate(self.names):
            stage = _stage_of(layer, self.boundaries)
            if stage != _stage_of(layer, self.before):
                moved.setdefault(stage, []).append(name)
        return [f"{_listed(names)} to stage {stage}" for stage, names in sorted(moved.items())]


def recut(
    layers: Mapping[str, StageCosts],
    boundaries: Sequence[int],
    *,
    schedule: Schedule,
    costs: Costs | None = None,
    memory_limit_bytes: int | None = None,
    stage_seconds: Sequence[float] | None = None,
) -> Recut:
    """Returns the cut that balances the time of stages, and what it gains; see [Note: recut].

    If no other cut is simulated to be faster, the cut stays.

    Args:
        layers: What each layer takes and holds, by name, in the order of the model. The outputs of
            a layer are what a stage hands on that ends with it.
        boundaries: Index of the first layer of every stage but the first, as it is cut now.
        schedule: What every rank computes, for as many stages.
        costs: The network, and what else is the same in all cuts; their stages are not read.
        memory_limit_bytes: The most that a stage may hold.
        stage_seconds: What a forward and a backward of each stage took in a run, such as the
            `Times.compute_seconds` of a Scheduler. Then times of layers are shares of these.

    Raises:
        TopologyError: If no cut fits into the memory, or if boundaries do not fit the layers.
    """
    names, before = tuple(layers), tuple(boundaries)
    each, num_stages = list(layers.values()), len(before) + 1
    edges = [0, *before, len(each)]
    if any(a >= b for a, b in pairwise(edges)) or len(schedule.stage_to_rank) != num_stages:
        raise TopologyError(
            f"boundaries {list(before)} cut {len(each)} layers into {num_stages} stages, and "
            f"schedule {schedule.name!r} has {len(schedule.stage_to_rank)}: expected ascending "
            f"indices from 1 to {len(each) - 1}, and as many stages"
        )
    if stage_seconds is not None:
        each = _scaled(each, edges, stage_seconds)

    cost = _cost_of(each, num_stages, memory_limit_bytes)
    found = balanced(len(each), num_stages, cost)
    if not _fits(found, len(each), cost):
        raise TopologyError(
            f"no cut of {len(each)} layers into {num_stages} stages fits into "
            f"{memory_limit_bytes} bytes a stage: take more stages, or recompute activations"
        )
    fixed = costs or Costs(())
    seconds_before = _simulated(each, before, schedule, fixed)
    seconds = _simulated(each, found, schedule, fixed)
    if seconds >= seconds_before and _fits(before, len(each), cost):
        found, seconds = list(before), seconds_before
    return Recut(names, before, tuple(found), seconds_before, seconds)


def costs_of_layers(layers: Sequence[Layer]) -> dict[str, StageCosts]:
    """Returns what the layers of a cut take and hold, by name, for `recut`.

    Times and activations are those of the sample of ``pipegrad.cut(..., by="measured")``, so they
    are right as shares. A backward counts as two forwards, and an optimizer has two moments.

    Raises:
        TopologyError: If the times of layers are unknown.
    """
    if not any(layer.time for layer in layers):
        raise TopologyError(
            "the times of layers are unknown: cut the model with by='measured', or by='time'"
        )
    return {layer.name: _costs_of_layer(layer) for layer in layers}


def _costs_of_layer(layer: Layer) -> StageCosts:
    num_bytes = sum(size for size, _ in layer.parameters.values())
    return StageCosts(
        forward_seconds=layer.time / 3,
        backward_seconds=2 * layer.time / 3,
        parameter_bytes=num_bytes,
        gradient_bytes=num_bytes,
        optimizer_bytes=2 * num_bytes,
        activation_bytes=layer.saved_bytes,
    )


def _cost_of(layers: Sequence[StageCosts], num_stages: int, limit_bytes: int | None) -> Cost:
    """Returns the time of a stage; infinite if it does not fit."""
    seconds = [0.0, *accumulate(x.forward_seconds + x.backward_seconds for x in layers)]
    held = [0, *accumulate(x.held_bytes for x in layers)]
    saved = [0, *accumulate(x.activation_bytes for x in layers)]

    def cost(stage: int, start: int, end: int) -> float:
        in_flight = num_stages - stage
        most = held[end] - held[start] + in_flight * (saved[end] - saved[start])
        fits = limit_bytes is None or most <= limit_bytes
        return seconds[end] - seconds[start] if fits else math.inf

    return cost


def _fits(boundaries: Sequence[int], num_layers: int, cost: Cost) -> bool:
    edges = pairwise([0, *boundaries, num_layers])
    return all(cost(stage, a, b) < math.inf for stage, (a, b) in enumerate(edges))


def _scaled(
    layers: Sequence[StageCosts], edges: Sequence[int], stage_seconds: Sequence[float]
) -> list[StageCosts]:
    """Returns layers whose times add up to those of their stages."""
    if len(stage_seconds) != len(edges) - 1:
        raise TopologyError(
            f"stage_seconds has {len(stage_seconds)} numbers, expected one for each of the "
            f"{len(edges) - 1} stages"
        )
    scaled = list[StageCosts]()
    for (begin, end), seconds in zip(pairwise(edges), stage_seconds, strict=True):
        own = layers[begin:end]
        known = sum(layer.forward_seconds + layer.backward_seconds for layer in own)
        factor = seconds / known if known else 0.0
        scaled += (
            replace(
                layer,
                forward_seconds=factor * layer.forward_seconds,
                backward_seconds=factor * layer.backward_seconds,
                weight_seconds=factor * layer.weight_seconds,
            )
            for layer in own
        )
    return scaled


def _simulated(
    layers: Sequence[StageCosts], boundaries: Sequence[int], schedule: Schedule, fixed: Costs
) -> float:
    """Returns what a step takes that follows another."""
    edges = pairwise([0, *boundaries, len(layers)])
    costs = replace(fixed, stages=tuple(merged_stages(layers[a:b]) for a, b in edges))
    program = lower(schedule, links=chain_of(costs))
    return simulate(program, costs, num_steps=2, records=False).step_seconds[-1]


def _stage_of(layer: int, boundaries: Sequence[int]) -> int:
    return bisect_right(boundaries, layer)


def _listed(names: Sequence[str]) -> str:
    if all(name.isdigit() for name in names):  # those of an nn.Sequential say nothing alone
        return f"layer{'s' * (len(names) > 1)} {_joined(names)}"
    return _joined(names)


def _joined(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
