"""What makes a step long is planted, and the sentence names it, with what the simulator says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipegrad.schedules import build, lower
from pipegrad.simulation.costs import CollectiveCosts, Costs, Network, StageCosts
from pipegrad.simulation.explain.explanation import explain
from pipegrad.simulation.explain.sentence import sentence
from pipegrad.simulation.timeline import BATCH, Span, Timeline
from pipegrad.train.rendering import rendered_explanation
from tests.support.schedules.makespan import recorded

SCHEDULE = build("1f1b", num_ranks=4, num_microbatches=8)


def run(*factors: float, megabytes: int = 0, optimizer: float = 0.0, tied: float = 0.0) -> Timeline:
    """Returns what a run of 1f1b records. A forward takes 10 ms, or more by the rank's factor."""
    stages = tuple(
        StageCosts(
            0.01 * f, 0.02 * f, optimizer_seconds=optimizer, outputs={"x": megabytes * 10**6}
        )
        for f in factors or (1.0,) * 4
    )
    collectives = {"tied": CollectiveCosts(1, seconds=tied, stages=(0, 3))} if tied else {}
    costs = Costs(stages, Network(nic_bytes_per_second=125e6), collectives)
    timeline = recorded(lower(SCHEDULE), costs, num_steps=3)
    return replace(timeline, source="measured")


def said(timeline: Timeline, **notes: str | float) -> str:
    return sentence(explain(replace(timeline, notes={"noise": 0.02, **notes})))


def slow_data(timeline: Timeline, seconds: float) -> Timeline:
    """Adds the time that ranks take for the next batch, behind the last compute of each step."""
    spans, ends = (
        list[Span](),
        [end + seconds * (n + 1) for n, end in enumerate(timeline.step_ends)],
    )
    for span in timeline.spans:
        late = seconds * span.step
        spans.append(span._replace(begin=span.begin + late, end=span.end + late))
    for step, end in enumerate(ends):
        spans += [Span(rank, "host", end - seconds, end, step, label=BATCH) for rank in range(4)]
    return replace(timeline, spans=tuple(spans), step_ends=tuple(ends))


LAYERS = ({"0": 1.0}, dict.fromkeys("123", 1.0), {"4": 1.0}, {"5": 1.0})
UNEVEN = run(1, 3, 1, 1)  # three layers of seven are on rank 1: 8 times 90 ms and 30 ms
SLOW_DATA = slow_data(run(), 0.33)
ONCE = tuple(  # in a step of three rank 1 is no slower than the others, and the step takes as long
    s._replace(end=s.begin + s.seconds / 4) if (s.rank, s.step, s.kind) == (1, 2, "B") else s
    for s in UNEVEN.spans
)
PART = tuple(s for s in run().spans if (s.kind, s.microbatch) != ("B", 3))

# What was planted, what the notes of the timeline say, and what the sentence says.
FINDINGS: dict[str, tuple[Timeline, dict[str, str | float], str]] = {
    "layers that one rank can give away": (
        replace(UNEVEN, layers=LAYERS),
        {"rows": 8.0},
        (
            "a step takes 750 ms; rank 1 holds everyone up; move layer 1 to rank 0 "
            "(parallel.boundaries = [2, 4, 5]): about 25 % less"
        ),
    ),
    "layers that nobody knows": (
        UNEVEN,
        {"rows": 8.0},
        "; move layers from it, so that all ranks compute alike: at most ",
    ),
    "slow links with three remedies": (
        run(megabytes=2),
        {},
        (
            "a step takes 611 ms; links take 46 % of it, most of all the link 1->2; "
            'parallel.codecs = "int8": about 36 % less, or parallel.schedule = "hop-aware-1f1b" '
        ),
    ),
    "a pipeline that fills and drains": (
        run(),
        {},
        "a step takes 330 ms; ranks compute nothing in 27 % of it, mostly at its begin and end; ",
    ),
    "an optimizer": (
        run(optimizer=0.5),
        {"rows": 8.0},
        "; the optimizer takes 60 % of it; try optimizer.fused = true: at most as much less",
    ),
    "a reduction": (run(tied=0.5), {"rows": 8.0}, "; ranks wait for reductions of gradients; "),
    "late data": (
        SLOW_DATA,
        {},
        "a step takes 660 ms; the next batch takes 50 % of it; load it in other processes: at ",
    ),
    "a way to load it": (SLOW_DATA, {"batch": "let num_workers be 2"}, "workers be 2: at most"),
    "more than steps differ by": (SLOW_DATA, {"noise": 0.45}, "; the next batch takes 50 % of it"),
    "what is between steps": (
        run(),
        {"between_steps": 0.6, "between": "what eval.every takes"},
        "a step takes 330 ms; what eval.every takes 60 % of the run",
    ),
    "a gain above the noise": (run(), {"noise": 0.13}, "at most 14 % less"),
    "a gain within the noise": (
        run(),
        {"noise": 0.15},
        "nothing stands out: no change is simulated to save more than the noise, 15 %",
    ),
    "too much noise": (run(), {"noise": 0.57}, "; steps differ too much from each other, by 57 %"),
    "too much noise, and the next batch is late": (
        SLOW_DATA,
        {"noise": 0.57},
        "runs on its machines; the next batch takes 50 % of it",
    ),
    "a rank that differs": (replace(UNEVEN, spans=ONCE), {}, "; steps differ too much from each o"),
    "all cores are used": (
        UNEVEN,
        {"busy_cores": 0.95, "cores": 2},
        "a step takes 750 ms; the ranks of a machine use all of its 2 cores: only more cores, or ",
    ),
    "the time of the whole run": (run(), {"step_seconds": 0.12}, "a step takes 120 ms; "),
    "a note that is no number": (
        run(),
        {"step_seconds": "soon", "busy_cores": "many"},
        "a step takes 330 ms; ",
    ),
    "a step recorded in part": (
        replace(run(), spans=PART),
        {},
        "a step takes 330 ms; no advice: step 1 was recorded in part",
    ),
}


@pytest.mark.parametrize("planted", FINDINGS)
def test_the_sentence_names_what_was_planted(planted: str) -> None:
    timeline, notes, words = FINDINGS[planted]
    assert words in said(timeline, **notes)


def test_a_codec_that_is_in_use_is_not_a_remedy() -> None:
    assert "parallel.codecs" not in said(run(megabytes=2), codecs="int8")


def test_steps_that_differ_too_much_have_no_rendered_advice() -> None:
    noisy = explain(replace(run(), notes={"noise": 0.57}))
    assert noisy.advice
    assert "what would help, as simulated:" not in [*rendered_explanation(noisy)]
    even = run()
    first, second, third = even.step_ends
    uneven = replace(even, step_ends=(first, second + 0.2, third + 0.5))
    assert "; steps differ too much from each other, by " in sentence(explain(uneven, step=0))


def test_a_simulation_that_is_off_is_not_called_noise() -> None:
    known = replace(explain(replace(run(), notes={"noise": 0.02})), error=0.3)
    assert "; nothing stands out: no change is simulated to save more than the 30 %" in (
        sentence(known)
    )


def test_python_has_arguments_in_the_place_of_keys() -> None:
    assert "num_microbatches=16, if half the rows" in str(explain(run()))
    assert "; try fused=True: at most" in str(explain(run(optimizer=0.5)))
    assert "(boundaries=[2, 4, 5])" in str(explain(replace(UNEVEN, layers=LAYERS)))
