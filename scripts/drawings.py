"""Draws the pictures of the documentation from data. `scripts/docs` writes them.

Timelines come from `pipegrad.simulate`. Units of time: a forward takes 1, a backward 2. The colours
are those of the Okabe-Ito palette, lightened, which colour-blind readers can tell apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pipegrad
from pipegrad.schedules.program.program import Collective, Program
from pipegrad.simulation.costs import CollectiveCosts, Costs, Network, StageCosts
from pipegrad.simulation.timeline import Span, Timeline

NUM_STAGES, NUM_MICROBATCHES = 4, 8
LEFT, ROW, BOX, BAR, GAP = 62, 34, 28, 11, 13  # pixels
COLOURS = {
    "F": "#8ecae6",
    "B": "#fdae6b",
    "I": "#fdae6b",
    "W": "#ffe08a",
    "transfer": "#9a9a9a",
    "mean": "#74c476",
    "tie": "#c8a2d8",
    "stage": "#eef3f8",
}
WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
    "transfer": "message",
    "mean": "mean over the replicas",
    "tie": "tied weight: its gradient to rank 0, the new value back",
}


def pictures() -> dict[str, str]:
    """Returns the pictures by their path in docs/."""
    return {
        "timeline.svg": timelines([("", tied_step())], scale=24),
        "drawings/pipeline.svg": pipeline(),
        "drawings/mesh.svg": mesh(),
        "drawings/schedules.svg": timelines(
            [(name, step(name)) for name in ("gpipe", "1f1b", "zb-h1", "zbv")], scale=20
        ),
        "drawings/slow_network.svg": timelines(
            [(name, step(name, transfer=0.8)) for name in ("1f1b", "eager-1f1b")], scale=18
        ),
    }


# What is drawn.


def costs(program: Program, transfer: float, **collectives: CollectiveCosts) -> Costs:
    """Returns costs of a program; a message of one stage takes `transfer`."""
    stages = len(program.schedule.stage_to_rank)
    share = NUM_STAGES / stages
    each = StageCosts(share, 2 * share, share, outputs={"x": round(100 * transfer)})
    return Costs((each,) * stages, Network(nic_bytes_per_second=100), collectives)


def step(name: str, *, transfer: float = 0.0) -> Timeline:
    """Returns a step of a schedule."""
    schedule = pipegrad.schedules.build(
        name, num_ranks=NUM_STAGES, num_microbatches=NUM_MICROBATCHES
    )
    program = pipegrad.schedules.lower(schedule)
    simulated = pipegrad.simulate(program, costs(program, transfer))
    assert simulated.timeline is not None
    return simulated.timeline


def tied_step() -> Timeline:
    """Returns a step of 1F1B: a mean for each stage, and a weight of stages 0 and 3.

    The tied weight has the placement OWNER: stage 3 sends its gradient to stage 0, which steps.
    """
    last = NUM_STAGES - 1
    means = [Collective(f"mean {s}", (s,), (s,), 0) for s in reversed(range(NUM_STAGES))]
    tie = Collective("tie", (0, last), (0, last), 1, (last,))
    schedule = pipegrad.schedules.build(
        "1f1b", num_ranks=NUM_STAGES, num_microbatches=NUM_MICROBATCHES
    )
    program = pipegrad.schedules.lower(schedule, collectives=[*means, tie])
    times = {mean.name: CollectiveCosts(seconds=2.5) for mean in means}
    times["tie"] = CollectiveCosts(kind="send", seconds=3.0, sync_bytes=1, sync_seconds=3.0)
    simulated = pipegrad.simulate(program, costs(program, 0.15, **times), num_steps=2)
    assert simulated.timeline is not None
    timeline = simulated.timeline.of_step(1)  # the value of the step before comes back in it
    # The owner has posted its receive long before, so the message leaves when stage 3 is final.
    final = max(s.end for s in timeline.spans if s.rank == last and s.kind == "B")
    words = {0: "tie receive", last: "tie to rank 0"}
    spans = [
        s._replace(begin=final, end=final + s.seconds, label=words[s.rank])
        if (s.kind, s.label) == ("reduction", "tie")
        else s
        for s in timeline.spans
        if s.kind != "transfer"  # so short that they would be dots
    ]
    return replace(timeline, spans=tuple(spans))


# How it is drawn.


class Box(NamedTuple):
    """A coloured box with a text: left, top, width and height in pixels."""

    left: float
    top: float
    width: float
    height: float
    colour: str
    text: str


def svg(width: float, height: float, parts: Iterable[str]) -> str:
    """Returns a picture on white."""
    size = f'width="{width:.0f}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" {size}'
    lines = [f'{head} font-family="sans-serif" font-size="11">', f'<rect {size} fill="white"/>']
    return "\n".join([*lines, *parts, "</svg>", ""])


def drawn(box: Box) -> str:
    """Returns a box as SVG; a text that does not fit is left out."""
    font = 11 if box.height > BAR else 9
    rect = (
        f'<rect x="{box.left:.1f}" y="{box.top:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" fill="{box.colour}" stroke="white"/>'
    )
    if len(box.text) * font * 0.5 > box.width:
        return rect
    x, y = box.left + box.width / 2, box.top + box.height / 2 + font / 2 - 1.5
    middle = f'font-size="{font}" text-anchor="middle"'
    return f'{rect}<text x="{x:.1f}" y="{y:.1f}" {middle}>{box.text}</text>'


def label(x: float, y: float, text: str, more: str = "") -> str:
    """Returns a text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{text}</text>'


def timelines(panels: Sequence[tuple[str, Timeline]], *, scale: float) -> str:
    """Returns timelines below each other, in one scale: pixels for each unit of time."""
    kinds = {colour_of(span) for _, timeline in panels for span in timeline.spans}
    parts, top = list(legend([kind for kind in WORDS if kind in kinds])), 40.0
    for title, timeline in panels:
        if title:
            text = f"{title}: {timeline.seconds:g}" if timeline.seconds else title
            parts.append(label(8, top + 6, text, 'font-weight="bold"'))
            top += 16
        for rank in range(timeline.num_ranks):
            parts.append(label(8, top + 18, f"rank {rank}"))
            boxes = list(rows(timeline, rank, top, scale))
            parts += map(drawn, boxes)
            top = max([top + ROW, *(box.top + box.height + 8 for box in boxes)])
        top += 14
    width = LEFT + max(timeline.seconds for _, timeline in panels) * scale + 12
    return svg(max(width, 620), top, parts)


def colour_of(span: Span) -> str:
    """Returns the name of the colour of a span; "" if it is not drawn."""
    if span.kind in ("reduction", "parameter sync"):
        return span.label.split()[0]
    return span.kind if span.kind in COLOURS else ""


def rows(timeline: Timeline, rank: int, top: float, scale: float) -> Iterator[Box]:
    """Yields the boxes of a rank: what it computes, and below what runs beside it."""
    ends: list[float] = []  # of the thin lines
    for span in [*timeline.on_rank(rank), *timeline.beside(rank)]:
        colour, left = colour_of(span), LEFT + span.begin * scale
        if not colour or span.seconds == 0:
            continue
        if colour in "FBIW":
            text = f"{span.kind}{span.microbatch}"
            yield Box(left, top, span.seconds * scale, BOX, COLOURS[colour], text)
            continue
        free = [number for number, end in enumerate(ends) if end <= span.begin + 1e-9]
        line = free[0] if free else len(ends)
        ends[line:] = [span.end, *ends[line + 1 :]]
        word, _, rest = span.label.partition(" ")
        texts = {"transfer": "", "parameter sync": "value"}
        text = texts.get(span.kind, rest if word == "tie" else word)
        height = 4 if colour == "transfer" else BAR
        below = top + BOX + 2 + line * (height + 2)
        yield Box(left, below, span.seconds * scale, height, COLOURS[colour], text)


def legend(kinds: Iterable[str]) -> Iterator[str]:
    """Yields what the colours mean."""
    x = float(LEFT)
    for kind in kinds:
        yield drawn(Box(x, 12, 14, BAR, COLOURS[kind], ""))
        yield label(x + 19, 22, WORDS[kind])
        x += 42 + 6 * len(WORDS[kind])


def pipeline() -> str:
    """Returns an uncut model, and its stages on ranks."""
    layers = ["embedding", "block 1", "block 2", "block 3", "block 4", "head"]
    stages = [layers[:1], layers[1:3], layers[3:5], layers[5:]]
    parts, wide = [label(8, 20, "the uncut model", 'font-weight="bold"')], 84
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
