"""report: a cut as a table, with the reason for each boundary."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipegrad.partition.boundaries import Layer
from pipegrad.partition.part import Part


def report(
    parts: Sequence[Part],
    layers: Sequence[Layer],
    boundaries: Sequence[int],
    *,
    how: str,
    by: str,
) -> str:
    """Returns a table with a line for each stage, as text."""
    edges = list(pairwise([0, *boundaries, len(layers)]))
    times = [sum(layer.time for layer in layers[a:b]) for a, b in edges]
    saved = [sum(layer.saved_bytes for layer in layers[a:b]) for a, b in edges]
    rows = [("stage", "layers", "parameters", "MiB", "time", "activations", "receives")]
    for stage, ((first, end), part) in enumerate(zip(edges, parts, strict=True)):
        held = {k: v for layer in layers[first:end] for k, v in layer.parameters.items()}
        names = [layers[first].name, layers[end - 1].name]
        rows.append(
            (
                f"{stage}",
                " to ".join(dict.fromkeys(names)),
                f"{sum(numel for _, numel in held.values()):,}",
                f"{sum(nbytes for nbytes, _ in held.values()) / 2**20:,.1f}",
                f"{times[stage] / sum(times):.0%}" if any(times) else "unknown",
                f"{saved[stage] / 2**20:,.2f} MiB" if any(saved) else "unknown",
                ", ".join(part.inputs) or "nothing",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"{len(parts)} stages, {how}, cut by {by}", *map(str.rstrip, lines)])
