"""Timelines that are drawn: a small one written by hand, and simulated ones."""

from __future__ import annotations

from dataclasses import replace

from pipegrad.schedules import build, lower
from pipegrad.simulation.costs import CollectiveCosts, Costs, Network, StageCosts
from pipegrad.simulation.simulator import simulate
from pipegrad.simulation.timeline import MemoryPoint, Span, Timeline

# Two ranks, one microbatch. Rank 1 waits 4 ms for x: 3 ms until it is made, 1 ms on its way.
SPANS = (
    Span(0, "F", 0.000, 0.003, stage=0, microbatch=0),
    Span(0, "transfer", 0.003, 0.004, stage=0, microbatch=0, peer=1, which=0, label="x of 0F0"),
    Span(1, "wait for receive", 0.000, 0.004, 0, 0, 0, 0, 0, "x of 0F0"),
    Span(1, "F", 0.004, 0.007, stage=1, microbatch=0),
    Span(1, "B", 0.007, 0.011, stage=1, microbatch=0),
    Span(1, "transfer", 0.011, 0.012, stage=0, microbatch=0, peer=0, which=1, label="gradient"),
    Span(0, "wait for receive", 0.003, 0.012, 0, 0, 0, 1, 1, "gradient"),
    Span(0, "B", 0.012, 0.016, stage=0, microbatch=0),
    Span(1, "reduction", 0.010, 0.015, which=0, label="mean"),
    Span(1, "wait for reduction", 0.011, 0.015, which=0, label="mean"),
    Span(1, "optimizer", 0.015, 0.016),
)
MEMORY = (
    (MemoryPoint(0.0, 100), MemoryPoint(0.003, 300), MemoryPoint(0.016, 100)),
    (MemoryPoint(0.0, 200),),
)
SMALL = Timeline("by hand", "predicted", 2, (0, 1), 1, SPANS, (0.016,), MEMORY, {"device": "cpu"})


def simulated(
    name: str = "1f1b", *, ranks: int = 4, microbatches: int = 8, steps: int = 1, slow: float = 1.0
) -> Timeline:
    """Returns the timeline of a schedule over 1 Gbit/s, with a mean over replicas for each stage.

    Args:
        name: Of the schedule.
        ranks: Of the pipeline.
        microbatches: Of a step.
        steps: How many follow each other.
        slow: Times how much longer computing takes than 10 ms for a forward of a rank.
    """
    schedule = build(name, num_ranks=ranks, num_microbatches=microbatches)
    holders = schedule.stage_to_rank
    means = {
        f"mean {s}": CollectiveCosts(num_bytes=2**21, num_ranks=2, stages=(s,))
        for s in range(len(holders))
    }
    share = slow * ranks / len(holders)
    stage = StageCosts(
        0.010 * share, 0.020 * share, 0.010 * share, optimizer_seconds=0.003, parameter_bytes=2**28,
        activation_bytes=2**27, outputs={"x": 400_000},
    )  # fmt: skip
    costs = Costs((stage,) * len(holders), Network(125e6, 1e-4), means)
    timeline = simulate(lower(schedule), costs, num_steps=steps).timeline
    assert timeline is not None
    return timeline


def repeated(timeline: Timeline, times: int) -> Timeline:
    """Returns a timeline of one step again and again."""
    length = timeline.seconds
    spans = (
        span._replace(begin=span.begin + n * length, end=span.end + n * length, step=n)
        for n in range(times)
        for span in timeline.spans
    )
    memory = (
        tuple(
            MemoryPoint(p.seconds + n * length, p.num_bytes) for n in range(times) for p in points
        )
        for points in timeline.memory
    )
    ends = tuple((n + 1) * length for n in range(times))
    return replace(timeline, spans=tuple(spans), step_ends=ends, memory=tuple(memory))
