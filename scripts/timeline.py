"""Draws docs/timeline.svg: one 1F1B step of four stages, and the reductions that run beside it.

The picture is made from a Program, the same data that the executor runs. `scripts/docs` writes
it. Units of time: a forward takes 1, a backward 2. Transfers and reductions are drawn to scale.
"""

from __future__ import annotations

from collections.abc import Iterator

import pipegrad
from pipegrad.schedules.program.program import Collective, Op

NUM_STAGES, NUM_MICROBATCHES = 4, 8
SECONDS = {"F": 1.0, "B": 2.0}
TRANSFER, REDUCTION, TIE = 0.15, 2.5, 3.0
SCALE, LEFT, TOP, ROW, BOX, BAR = 24, 62, 40, 66, 28, 11  # pixels
COLOURS = {"F": "#9ecae1", "B": "#fdae6b", "mean": "#74c476", "tie": "#9e9ac8"}
LEGEND = {
    "F": "forward",
    "B": "backward",
    "mean": "mean over the data-parallel replicas",
    "tie": "tied weight: its gradient to stage 0, the new value back",
}
Bar = tuple[int, int, float, float, str, str]  # rank, line, begin, end, kind, text


def program() -> pipegrad.schedules.Program:
    """Returns the Program of the step: a mean for each stage, and a weight of stages 0 and 3.

    The tied weight has the placement OWNER: stage 3 sends its gradient to stage 0, which steps.
    """
    means = [
        Collective(f"mean {stage}", (stage,), (stage,), 0) for stage in reversed(range(NUM_STAGES))
    ]
    tie = Collective("tie", (0, NUM_STAGES - 1), (0, NUM_STAGES - 1), 1, (NUM_STAGES - 1,))
    schedule = pipegrad.schedules.build(
        "1f1b", num_ranks=NUM_STAGES, num_microbatches=NUM_MICROBATCHES
    )
    made = pipegrad.schedules.lower(schedule, collectives=[*means, tie])
    pipegrad.schedules.verify(made)
    return made


def simulate(made: pipegrad.schedules.Program) -> Iterator[Bar]:
    """Yields what is drawn: every rank waits for what it receives, and for nothing else."""
    items = [list(made.decoded(rank)) for rank in range(NUM_STAGES)]
    clock, position = [0.0] * NUM_STAGES, [0] * NUM_STAGES
    arrived: dict[tuple[int, int], float] = {}
    launched: dict[tuple[str, int], float] = {}
    while any(position[rank] < len(items[rank]) for rank in range(NUM_STAGES)):
        for rank in range(NUM_STAGES):
            while position[rank] < len(items[rank]):
                op, which, microbatch = item = items[rank][position[rank]]
                if op is Op.WAIT_RECEIVE:
                    if (which, microbatch) not in arrived:
                        break  # until another rank has sent it
                    clock[rank] = max(clock[rank], arrived[which, microbatch])
                elif op is Op.FIRST_USE:  # the value that stage 0 stepped has left at 0
                    clock[rank] = max(clock[rank], TIE)
                elif op is Op.SEND:
                    arrived[which, microbatch] = clock[rank] + TRANSFER
                elif op is Op.LAUNCH:
                    launched[made.collectives[which].name, rank] = clock[rank]
                elif op is Op.COMPUTE:
                    kind, begin = made.action(item).kind, clock[rank]
                    clock[rank] += SECONDS[kind]
                    yield rank, 0, begin, clock[rank], kind, f"{kind}{microbatch}"
                position[rank] += 1
    yield from reductions(made, launched)


def reductions(
    made: pipegrad.schedules.Program, launched: dict[tuple[str, int], float]
) -> Iterator[Bar]:
    """Yields the collectives, each on the comm stream of its rank."""
    for name, ranks, _stages, _stream, readers in made.collectives:
        last = ranks[-1]
        begin = launched[name, last]
        if not readers:
            yield last, 1, begin, begin + REDUCTION, "mean", "mean"
            continue
        for rank in ranks:
            yield rank, 2, 0.0, TIE, "tie", "value" if rank == last else "to stage 3"
            yield rank, 2, begin, begin + TIE, "tie", "to stage 0" if rank == last else "receive"


def timeline() -> str:
    """Returns the picture as SVG."""
    bars = list(simulate(program()))
    end = max(bar[3] for bar in bars)
    width, height = LEFT + round(end * SCALE) + 12, TOP + NUM_STAGES * ROW + 26
    size = f'width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size}',
        '  font-family="sans-serif" font-size="11">',
        f'<rect {size} fill="white"/>',
        f'<text x="{LEFT}" y="{height - 10}">time of one step; thin bars are comm streams</text>',
    ]
    x = LEFT
    for kind, text in LEGEND.items():
        lines.append(f'<rect x="{x}" y="12" width="14" height="11" fill="{COLOURS[kind]}"/>')
        lines.append(f'<text x="{x + 19}" y="22">{text}</text>')
        x += 42 + 6 * len(text)
    lines += [
        f'<text x="8" y="{TOP + rank * ROW + 18}">stage {rank}</text>' for rank in range(NUM_STAGES)
    ]
    for rank, line, begin, finish, kind, text in bars:
        left, wide = LEFT + begin * SCALE, (finish - begin) * SCALE
        top = TOP + rank * ROW + (BOX + 2 + (line - 1) * (BAR + 2) if line else 0)
        tall, font = (BAR, 9) if line else (BOX, 11)
        lines.append(
            f'<rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{tall}" '
            f'fill="{COLOURS[kind]}" stroke="white"/>'
            f'<text x="{left + wide / 2:.1f}" y="{top + tall / 2 + font / 2 - 1.5:.1f}" '
            f'font-size="{font}" text-anchor="middle">{text}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])
