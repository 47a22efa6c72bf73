"""Boundaries: finds the first layer of each stage that makes the heaviest stage lightest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pipegrad.errors import TopologyError
from pipegrad.simulation.fastest_cut import Cost, balanced

BY = ("parameters", "time", "memory")

# Operations that a device computes in about the time in which it moves a byte. An estimate of time
# needs this price, because a layer's time depends on operations and on memory traffic.
_FLOPS_A_BYTE = 100
_STATES = 4  # a parameter, its gradient, and two moments of an optimizer


@dataclass(frozen=True)
class Layer:
    """A layer at which a stage may begin, with all calls up to the next such layer.

    Attributes:
        name: Name of the layer's call.
        parameters: Id of each parameter -> its bytes and number of elements.
        flops: Floating-point operations of a forward on the sample; 0 if unknown.
        saved_bytes: Bytes that a forward on the sample keeps for its backward; 0 if unknown.
    """

    name: str
    parameters: Mapping[int, tuple[int, int]]
    flops: int = 0
    saved_bytes: int = 0

    @property
    def time(self) -> float:
        """An estimate of its time, in units of a floating-point operation."""
        return self.flops + _FLOPS_A_BYTE * self.saved_bytes


def starts_of(
    layers: Sequence[Layer],
    num_stages: int,
    *,
    by: str | Sequence[float],
    boundaries: Sequence[int | str] | None,
) -> list[int]:
    """Returns the index of the first layer of every stage but the first.

    Raises:
        TopologyError: If there are too few layers, or if `by` or `boundaries` are wrong.
    """
    if not 1 <= num_stages <= len(layers):
        raise TopologyError(
            f"a model of {len(layers)} layers cannot be cut into {num_stages!r} stages: choose 1 "
            f"to {len(layers)}. An nn.Sequential inside of another one is one layer: unpack it by *"
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
    """Returns the cost function of a stage: its elements, its bytes, or its time.

    Raises:
        TopologyError: If `by` is unknown, or is no list of finite numbers from 0 on.
    """
    if by == "time":
        by = [layer.time for layer in layers]
        if not any(by):
            raise TopologyError(
                "by='time' needs a run of the model: take how='structural', or a number for each "
                "layer"
            )
    if not isinstance(by, str):
        if len(by) != len(layers):
            raise TopologyError(
                f"by has {len(by)} numbers, expected one for each of the {len(layers)} layers"
            )
        try:
            numbers = [float(number) for number in by]
        except (TypeError, ValueError):
            numbers = [math.nan]
        sums = [0.0, *accumulate(numbers)]
        if not (all(number >= 0 for number in numbers) and math.isfinite(sums[-1])):
            raise TopologyError(f"by is {[*by]}, expected finite numbers, none below 0")
        return lambda stage, start, end: sums[end] - sums[start]
    if by not in BY:
        raise TopologyError(f"by is {by!r}, expected one of {list(BY)}, or a number for each layer")
    if by == "parameters":
        elements = _unique(layers, 1)
        return lambda stage, start, end: elements(start, end)
    held = _unique(layers, 0)
    saved = [0, *accumulate(layer.saved_bytes for layer in layers)]
    # A stage has as many microbatches in flight as there are stages from it to the last one.
    return lambda stage, start, end: (
        _STATES * held(start, end) + (num_stages - stage) * (saved[end] - saved[start])
    )


def _unique(layers: Sequence[Layer], which: int) -> Callable[[int, int], int]:
    """Returns a function of start and end that sums parameters of these layers, each tie once."""
    rows: dict[int, tuple[list[int], set[int]]] = {}  # filled on demand, because stages are short

    def held(start: int, end: int) -> int:
        sums, seen = rows.setdefault(start, ([0], set()))
        for layer in layers[start + len(sums) - 1 : end]:
            new = layer.parameters.keys() - seen
            sums.append(sums[-1] + sum(layer.parameters[key][which] for key in new))
            seen |= new
        return sums[end - start]

    return held
