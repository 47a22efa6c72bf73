"""Boundaries: which layer begins each stage, so that the heaviest stage is as light as can be.

[Note: recut] After a run, times of layers are known better than at the cut, and so is the network.
Another cut makes the slowest stage as fast as can be, and must fit into the memory limit. What 1f1b
holds is counted: a stage has as many microbatches in flight as there are stages from it to the last
one. The gain is that of simulated steps, before and after.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from pipegrad.errors import TopologyError
from pipegrad.schedules import lower
from pipegrad.schedules.schedule import Schedule
from pipegrad.simulation.choose import chain_of, merged_stages
from pipegrad.simulation.costs import Costs, StageCosts
from pipegrad.simulation.simulator import simulate

BY = ("parameters", "time", "measured", "memory")

# An estimate of time needs a price for what moves through memory, beside what is computed. Devices
# compute about this many operations in the time in which they move a byte.
_FLOPS_A_BYTE = 100
_STATES = 4  # a parameter, its gradient, and two moments of an optimizer


@dataclass(frozen=True)
class Layer:
    """A place where a stage may begin: a layer, and what follows it up to the next one.

    Attributes:
        name: Of the layer's call.
        parameters: Id -> bytes and number of elements, of all parameters.
        flops: Floating-point operations of a forward on the sample; 0 if unknown.
        saved_bytes: What a forward keeps for its backward, on the sample; 0 if unknown.
        seconds: How long its forward and backward took; 0 if unknown.
    """

    name: str
    parameters: Mapping[int, tuple[int, int]]
    flops: int = 0
    saved_bytes: int = 0
    seconds: float = 0.0

    @property
    def time(self) -> float:
        """Its time: measured, in seconds, or else an estimate, in floating-point operations."""
        return self.seconds or self.flops + _FLOPS_A_BYTE * self.saved_bytes


Cost = Callable[[int, int, int], float]  # of a stage that holds the layers from a start to an end


def starts_of(
    layers: Sequence[Layer],
    num_stages: int,
    *,
    by: str | Sequence[float],
    boundaries: Sequence[int | str] | None,
) -> list[int]:
    """Returns the index of the first layer of every stage but the first.

    Args:
        layers: Where stages may begin.
        num_stages: How many stages.
        by: What is to be even: of `BY`, or a number for each layer, such as measured seconds.
        boundaries: Indices or names of these layers, instead of an even cut.

    Raises:
        TopologyError: If that is impossible.
    """
    if not 1 <= num_stages <= len(layers):
        raise TopologyError(
            f"a model of {len(layers)} layers cannot be cut into {num_stages!r} stages: choose 1 "
            f"to {len(layers)}"
        )
    if boundaries is not None:
        return _starts_named(layers, num_stages, boundaries)
    return balanced(len(layers), num_stages, cost_of(layers, num_stages, by))


def _starts_named(
    layers: Sequence[Layer], num_stages: int, boundaries: Sequence[int | str]
) -> list[int]:
    names = [layer.name for layer in layers]
    unknown = [b for b in boundaries if isinstance(b, str) and b not in names]
    if unknown:
        raise TopologyError(
            f"boundaries {unknown} are no layers that a stage can begin with; these are {names}"
        )
    starts = [names.index(b) if isinstance(b, str) else b for b in boundaries]
    edges = [0, *starts, len(layers)]
    if len(starts) != num_stages - 1 or any(a >= b for a, b in pairwise(edges)):
        raise TopologyError(
            f"boundaries {list(boundaries)} do not cut {len(layers)} layers into {num_stages} "
            f"stages: give {num_stages - 1} ascending indices from 1 to {len(layers) - 1}, or "
            f"names of layers in their order"
        )
    return starts


def cost_of(layers: Sequence[Layer], num_stages: int, by: str | Sequence[float]) -> Cost:
    """Returns what a stage costs: elements, bytes, or estimated or given time.

    Raises:
        TopologyError: If `by` is unknown.
    """
    if not isinstance(by, str):
        if len(by) != len(layers):
            raise TopologyError(
                f"by has {len(by)} numbers, expected one for each of the {len(layers)} layers"
            )
        sums = [0.0, *accumulate(map(float, by))]
        return lambda stage, start, end: sums[end] - sums[start]
    if by not in BY:
        raise TopologyError(f"by is {by!r}, expected one of {list(BY)}, or a number for each layer")
    if by in ("time", "measured"):
        if not any(layer.time for layer in layers):
            raise TopologyError(
                f"by={by!r} needs a run of the model: take how='structural', or a number for each "
                "layer"
            )
        times = [0.0, *accumulate(layer.time for layer in layers)]
        return lambda stage, start, end: times[end] - times[start]
    if by == "parameters":
        elements = _unique(layers, 1)
        return lambda stage, start, end: elements(start, end)
    held = _unique(layers, 0)
    saved = [0, *accumulate(layer.saved_bytes for layer in layers)]
    # A stage has as many microbatches in flight as there are stages from it to the last one.
    return lambda stage, start, end: (
        _STATES * held(start, end) + (num_stages - stage) * (saved[end] - saved[start])
    )


def balanced(num_layers: int, num_stages: int, cost: Cost) -> list[int]:
    """Returns starts that make the heaviest stage light, and then the others even."""
    # best[end]: cost of cutting the first `end` layers into the stages so far, and their starts.
    # Costs are compared by the heaviest stage, then by the sum of squares: an even cut.
    last = num_layers - num_stages + 1  # each later stage needs a layer
    best: dict[int, tuple[tuple[float, float], list[int]]] = {
        end: ((cost(0, 0, end), cost(0, 0, end) ** 2), []) for end in range(1, last + 1)
    }
    for stage in range(1, num_stages):
        best = {
            end: _best_start(best, stage, end, cost) for end in range(stage + 1, last + stage + 1)
        }
    return best[num_layers][1]


def _best_start(
    best: dict[int, tuple[tuple[float, float], list[int]]], stage: int, end: int, cost: Cost
) -> tuple[tuple[float, float], list[int]]:
    """Returns the best cost of the first `end` layers with one more stage, and its starts."""
    lightest = None
    for start in range(min(end - 1, max(best)), stage - 1, -1):
        weight = cost(stage, start, end)
        if lightest is not None and weight > lightest[0][0]:
            break  # a stage of more layers is no lighter
        (heaviest, squares), starts = best[start]
        candidate = (max(heaviest, weight), squares + weight**2), [*starts, start]
        lightest = candidate if lightest is None else min(lightest, candidate)
    assert lightest is not None
    return lightest


def _unique(layers: Sequence[Layer], which: int) -> Callable[[int, int], int]:
    """Returns what tells what the layers between a start and an end hold; a tie counts once."""
    rows: dict[int, tuple[list[int], set[int]]] = {}  # only what is asked for: stages are short

    def held(start: int, end: int) -> int:
        sums, seen = rows.setdefault(start, ([0], set()))
        for layer in layers[start + len(sums) - 1 : end]:
            new = layer.parameters.keys() - seen
            sums.append(sums[-1] + sum(layer.parameters[key][which] for key in new))
            seen |= new
        return sums[end - start]

    return held


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
        moved: dict[int, list[str]] = {}
        for layer, name in enumerate(self.names):
            stage = bisect_right(self.boundaries, layer)
            if stage != bisect_right(self.before, layer):
                moved.setdefault(stage, []).append(name)
        if not moved:
            return "the cut is the best there is"
        moves = [f"{_listed(names)} to stage {stage}" for stage, names in sorted(moved.items())]
        # A cut that must hold less memory may take more time.
        less = "less" if self.gain >= 0 else "more"
        return f"move {'; '.join(moves)}: {abs(self.gain):.0%} {less} time"


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
    after = balanced(len(each), num_stages, cost)
    if not _fits(after, len(each), cost):
        raise TopologyError(
            f"no cut of {len(each)} layers into {num_stages} stages fits into "
            f"{memory_limit_bytes} bytes a stage: take more stages, or recompute activations"
        )
    fixed = costs or Costs(())
    seconds_before = _simulated(each, before, schedule, fixed)
    seconds = _simulated(each, after, schedule, fixed)
    if seconds >= seconds_before and _fits(before, len(each), cost):
        after, seconds = list(before), seconds_before
    return Recut(names, before, tuple(after), seconds_before, seconds)


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
    costs = dict[str, StageCosts]()
    for layer in layers:
        num_bytes = sum(size for size, _ in layer.parameters.values())
        costs[layer.name] = StageCosts(
            forward_seconds=layer.time / 3,
            backward_seconds=2 * layer.time / 3,
            parameter_bytes=num_bytes,
            gradient_bytes=num_bytes,
            optimizer_bytes=2 * num_bytes,
            activation_bytes=layer.saved_bytes,
        )
    return costs


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
        known = sum(x.forward_seconds + x.backward_seconds for x in layers[begin:end])
        factor = seconds / known if known else 0.0
        scaled += (
            replace(
                layer,
                forward_seconds=factor * layer.forward_seconds,
                backward_seconds=factor * layer.backward_seconds,
                weight_seconds=factor * layer.weight_seconds,
            )
            for layer in layers[begin:end]
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


def _listed(names: Sequence[str]) -> str:
    joined = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    if all(name.isdigit() for name in names):  # those of an nn.Sequential say nothing alone
        return f"layer{'s' * (len(names) > 1)} {joined}"
    return joined
