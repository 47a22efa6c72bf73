"""Diagrams of models, ranks and placements, from small tables."""

from __future__ import annotations

from collections.abc import Iterator

import pipegrad
from drawings.svg import BOX, COLOURS, Box, drawn, label, svg

# For each placement what ranks 0, 1 and 2 have of a gradient's three shards, once it is reduced.
RESULTS = {
    "REPLICATE": ({0, 1, 2}, {0, 1, 2}, {0, 1, 2}),
    "OWNER": ({0, 1, 2}, set(), set()),
    "SHARD": ({0}, {1}, {2}),
}
WAYS = {
    "REPLICATE": ("all-reduce", ""),
    "OWNER": ("reduce chain", "broadcast chain"),
    "SHARD": ("reduce-scatter", "all-gather"),
}
EVERYTHING = ({0, 1, 2},) * 3


def pictures() -> dict[str, str]:
    """Returns the pictures by their path in docs/."""
    return {
        "drawings/pipeline.svg": pipeline(),
        "drawings/mesh.svg": mesh(),
        "drawings/placements.svg": placements(),
    }


def pipeline() -> str:
    """Returns a whole model, and its stages on ranks."""
    layers = ["embedding", "block 1", "block 2", "block 3", "block 4", "head"]
    stages = [layers[:1], layers[1:3], layers[3:5], layers[5:]]
    parts, wide = [label(8, 20, "the whole model", 'font-weight="bold"')], 84
    for number, layer in enumerate(layers):
        colour = COLOURS["tie" if layer in ("embedding", "head") else "F"]
        parts.append(drawn(Box(8 + number * (wide + 8), 34, wide, BOX, colour, layer)))
    parts += arc(8 + wide / 2, 8 + 5 * (wide + 8) + wide / 2, 62, 26, "one weight")
    parts.append(label(8, 122, "its stages", 'font-weight="bold"'))
    for rank, own in enumerate(stages):
        left = 8 + rank * 140
        parts.append(drawn(Box(left, 132, 124, 64, COLOURS["stage"], "")))
        parts.append(label(left + 6, 146, f"stage {rank} on rank {rank}"))
        for number, layer in enumerate(own):
            colour = COLOURS["tie" if layer in ("embedding", "head") else "F"]
            each = 112 / len(own)
            parts.append(drawn(Box(left + 6 + number * each, 156, each - 2, BOX, colour, layer)))
        if rank:
            arrow = f'x1="{left - 14}" x2="{left - 4}" y1="170" y2="170"'
            parts.append(f'<line {arrow} stroke="#555" stroke-width="2"/>')
            parts.append(f'<path d="M {left - 1} 170 l -6 -4 v 8 z" fill="#555"/>')
    parts += arc(70, 8 + 3 * 140 + 62, 196, 26, "gradients are summed, copies stay equal")
    return svg(580, 244, parts)


def arc(left: float, right: float, top: float, depth: float, text: str) -> Iterator[str]:
    """Yields a curve below two boxes, with a text in its middle."""
    middle, low = (left + right) / 2, top + 2 * depth
    path = f"M {left:.0f} {top:.0f} Q {middle:.0f} {low:.0f} {right:.0f} {top:.0f}"
    yield f'<path d="{path}" fill="none" stroke="#8e5ea2" stroke-width="2"/>'
    yield label(middle, top + depth + 14, text, 'text-anchor="middle" fill="#6a3d80"')


def mesh() -> str:
    """Returns the ranks of two machines as a mesh of a pipeline and replicas."""
    topology = pipegrad.Topology.build(axes=(("pp", 2), ("dp", 4)))
    parts, size = list[str](), topology.size("dp")
    for rank in topology.ranks:
        stage, replica = divmod(rank, size)
        left, top = 110 + replica * 92, 34 + stage * 44
        parts.append(drawn(Box(left, top, 84, 36, COLOURS["F" if stage == 0 else "B"], "")))
        words = f"rank {rank}"
        parts.append(label(left + 42, top + 22, words, 'text-anchor="middle"'))
    for stage in range(topology.size("pp")):
        parts.append(label(8, 56 + stage * 44, f"stage {stage}"))
        parts.append(label(486, 56 + stage * 44, f"machine {stage}"))
    for replica in range(size):
        parts.append(label(152 + replica * 92, 24, f"replica {replica}", 'text-anchor="middle"'))
    parts.append(
        label(110, 138, "a column is one pipeline; a row averages the gradients of a stage")
    )
    return svg(580, 150, parts)


def placements() -> str:
    """Returns what each rank has of one parameter, for each placement."""
    columns = ("each rank's part", "the sum", "what is stepped", "the new parameter")
    parts = [
        label(110 + 150 * number, 20, title, 'font-weight="bold"')
        for number, title in enumerate(columns)
    ]
    for row, (placement, result) in enumerate(RESULTS.items()):
        top = 34 + row * 84
        parts.append(label(8, top + 34, placement, 'font-weight="bold"'))
        kinds = ("F", "B", "B", "mean")
        for column, held in enumerate((EVERYTHING, result, result, EVERYTHING)):
            parts += shards(110 + 150 * column, top, held, COLOURS[kinds[column]])
        for column, way in zip((1, 3), WAYS[placement], strict=True):
            x = 110 + 150 * column - 46
            parts.append(label(x, top + 64, way, 'text-anchor="middle" fill="#555"'))
            if way:
                path = f"M {x - 6} {top + 26} h 12 l -5 -4 m 5 4 l -5 4"
                parts.append(f'<path d="{path}" fill="none" stroke="#555"/>')
    parts.append(label(110, 296, "a row of boxes is a rank; a box is a third of the parameter"))
    return svg(700, 306, parts)


def shards(left: float, top: float, held: tuple[set[int], ...], colour: str) -> Iterator[str]:
    """Yields three ranks below each other, with the shards that each of them has."""
    for rank, own in enumerate(held):
        for shard in range(3):
            fill = colour if shard in own else COLOURS["stage"]
            yield drawn(Box(left + 20 * shard, top + 18 * rank, 20, 16, fill, ""))
