"""Timelines, from `pipegrad.simulate`. A forward takes 1, a backward 2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pipegrad
from drawings.svg import BAR, COLOURS, Box, drawn, label, svg
from pipegrad.schedules.program.program import Program
from pipegrad.simulation.costs import CollectiveCosts, Costs, Network, StageCosts
from pipegrad.simulation.timeline import Span, Timeline

NUM_STAGES, NUM_MICROBATCHES = 4, 8
# Pixels. A phone shows them as they are, so no text is smaller than 9; other screens more of them.
WIDTH, LEFT, BOX, ZOOM = 360, 42, 21, 1.7
WORDS = {
    "F": "forward of the numbered microbatch",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
    "transfer": "message",
    "mean": "mean over the replicas",
    "tie": "tied weight: its gradient to rank 0, its value back",
}


def pictures() -> dict[str, str]:
    """Returns the pictures by their path in docs/."""
    four, two = ("gpipe", "1f1b", "zb-h1", "zbv"), ("1f1b", "eager-1f1b")
    slow = [(name, step(name, transfer=0.8)) for name in two]
    return {
        "timeline.svg": timelines([("", tied_step())]),
        "drawings/schedules.svg": timelines([(name, step(name)) for name in four]),
        "drawings/slow_network.svg": timelines(slow),
    }


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
    schedule = pipegrad.schedules.build(
        "1f1b", num_ranks=NUM_STAGES, num_microbatches=NUM_MICROBATCHES
    )
    program = pipegrad.schedules.lower(schedule)
    stages = reversed(range(NUM_STAGES))
    times = {f"mean {s}": CollectiveCosts(seconds=2.5, stages=(s,)) for s in stages}
    times["tie"] = CollectiveCosts(
        kind="send",
        seconds=3.0,
        sync_bytes=1,
        sync_seconds=3.0,
        stages=(0, last),
        comm_stream=1,
        readers=(last,),
    )
    simulated = pipegrad.simulate(program, costs(program, 0.15, **times), num_steps=2)
    assert simulated.timeline is not None
    timeline = simulated.timeline.of_step(1)  # the value of the step before comes back in it
    words = {0: "tie receive", last: "tie to rank 0"}
    spans = [
        s._replace(label=words[s.rank]) if (s.kind, s.label) == ("reduction", "tie") else s
        for s in timeline.spans
        if s.kind != "transfer"  # so short that they would be dots
    ]
    return replace(timeline, spans=tuple(spans))


def timelines(panels: Sequence[tuple[str, Timeline]]) -> str:
    """Returns timelines below each other, in one scale."""
    scale = (WIDTH - LEFT - 4) / max(timeline.seconds for _, timeline in panels)
    spans = [span for _, timeline in panels for span in timeline.spans if span.seconds > 0]
    kinds = {colour_of(span) for span in spans}
    parts, top = legend([kind for kind in WORDS if kind in kinds])
    for title, timeline in panels:
        if title:
            text = f"{title}: {timeline.seconds:g}" if timeline.seconds else title
            parts.append(label(4, top + 6, text, 'font-weight="bold"'))
            top += 13
        for rank in range(timeline.num_ranks):
            parts.append(label(4, top + 15, f"rank {rank}"))
            boxes = list(rows(timeline, rank, top, scale))
            parts += map(drawn, boxes)
            top = max([top + BOX + 4, *(box.top + box.height + 5 for box in boxes)])
        top += 14
    return svg(WIDTH, top - 8, parts, zoom=ZOOM)


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
            text = str(span.microbatch)
            yield Box(left, top, span.seconds * scale, BOX, COLOURS[colour], text)
            continue
        free = [number for number, end in enumerate(ends) if end <= span.begin + 1e-9]
        line = free[0] if free else len(ends)
        ends[line:] = [span.end, *ends[line + 1 :]]
        rest = span.label.partition(" ")[2] if span.label.startswith("tie") else ""
        texts = {"transfer": "", "parameter sync": "value"}
        text = texts.get(span.kind, rest)
        height = 4 if colour == "transfer" else BAR
        below = top + BOX + 2 + line * (height + 2)
        yield Box(left, below, span.seconds * scale, height, COLOURS[colour], text)


def legend(kinds: Iterable[str]) -> tuple[list[str], float]:
    """Returns what the colours mean, and where the picture goes on below."""
    parts, x, y = list[str](), 4.0, 8.0
    for kind in kinds:
        width = 30 + 5.6 * len(WORDS[kind])
        if x + width > WIDTH + 10:
            x, y = 4.0, y + 17
        parts += [drawn(Box(x, y, 14, BAR, COLOURS[kind], "")), label(x + 18, y + 9, WORDS[kind])]
        x += width
    return parts, y + 28
