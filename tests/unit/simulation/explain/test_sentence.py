"""What makes a step long is planted, and the sentence names it, with what the simulator says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipegrad.schedules import build, lower
from pipegrad.schedules.program.program import Collective
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
    collectives = [Collective("tied", (0, 3), (0, 3), 0)] if tied else []
    costs = Costs(
        stages, Network(nic_bytes_per_second=125e6), {"tied": CollectiveCosts(1, seconds=tied)}
    )
    timeline = recorded(lower(SCHEDULE, collectives=collectives), costs, num_steps=3)
    return replace(timeline, source="measured")


def said(timeline: Timeline, **notes: str | float) -> str:
    return sentence(explain(replace(timeline, notes={"noise": 0.02, **notes})))


def test_layers_that_one_rank_can_give_away() -> None:
    """Three layers of seven are on rank 1: 8 times 90 ms and 30 ms. On two ranks, two are."""
    layers = ({"0": 1.0}, dict.fromkeys("123", 1.0), {"4": 1.0}, {"5": 1.0})
    words = said(replace(run(1, 3, 1, 1), layers=layers), rows=8.0)
    assert words == (
        "a step takes 750 ms; rank 1 holds everyone up; move layer 1 to rank 0 "
        "(parallel.boundaries = [2, 4, 5]): about 25 % less"
    )


def test_layers_that_nobody_knows() -> None:
    words = said(run(1, 3, 1, 1), rows=8.0)
    assert words.startswith(
        "a step takes 750 ms; rank 1 holds everyone up; move layers from it, so that all ranks "
        "compute alike: at most "
    )


def test_slow_links_with_three_remedies() -> None:
    words = said(run(megabytes=2))
    assert words == (
        "a step takes 611 ms; links take 46 % of it, most of all the link 1->2; "
        'parallel.codecs = "int8" and parallel.schedule = "eager-1f1b" (a rank holds 7 '
        'activations, now 4): about 42 % less, or parallel.schedule = "hop-aware-1f1b" '
        "(a rank holds 8 activations, now 4): about 29 % less, or parallel.microbatches = 16, "
        "if half the rows take half the time: at most 13 % less"
    )


def test_a_codec_that_is_in_use_is_not_a_remedy() -> None:
    assert "parallel.codecs" not in said(run(megabytes=2), codecs="int8")


def test_a_pipeline_that_fills_and_drains() -> None:
    assert said(run()) == (
        "a step takes 330 ms; ranks compute nothing in 27 % of it, mostly at its begin and end; "
        "parallel.microbatches = 16, if half the rows take half the time: at most 14 % less"
    )


def test_an_optimizer_that_takes_long() -> None:
    assert said(run(optimizer=0.5), rows=8.0) == (
        "a step takes 830 ms; the optimizer takes 60 % of it; try optimizer.fused = true: at most "
        "as much less"
    )


def test_a_reduction_that_ranks_wait_for() -> None:
    words = said(run(tied=0.5), rows=8.0)
    assert words.startswith("a step takes ")
    assert "; ranks wait for reductions of gradients; " in words
    assert 'gradients.reduce_dtype = "bfloat16": about ' in words


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


def test_data_that_come_late() -> None:
    slow = slow_data(run(), 0.33)
    assert said(slow) == (
        "a step takes 660 ms; the next batch takes 50 % of it; load it in other processes: at most "
        "as much less"
    )
    assert "set data.streaming = false: at most" in said(slow, batch="set data.streaming = false")


def test_what_is_between_steps() -> None:
    words = said(run(), between_steps=0.6, between="what eval.every and train.save_every take")
    assert words == "a step takes 330 ms; what eval.every and train.save_every take 60 % of the run"


@pytest.mark.parametrize(("noise", "is_said"), [(0.13, True), (0.15, False)])
def test_a_gain_within_the_noise_is_none(noise: float, *, is_said: bool) -> None:
    words = said(run(), noise=noise)
    assert ("at most 14 % less" in words) is is_said
    quiet = "nothing stands out: no change is simulated to save more than the noise, 15 %"
    assert words.endswith(quiet) is not is_said


def test_steps_that_differ_too_much_say_nothing() -> None:
    assert said(run(), noise=0.57) == (
        "a step takes 330 ms; steps differ too much from each other, by 57 %, to say what would "
        "help: repeat the run while nothing else runs on its machines"
    )
    noisy = explain(replace(run(), notes={"noise": 0.57}))
    assert noisy.advice
    assert "what would help, as simulated:" not in [*rendered_explanation(noisy)]
    # What saves more than steps differ by is still named.
    assert "; the next batch takes 50 % of it; " in said(slow_data(run(), 0.33), noise=0.45)


def test_a_simulation_that_is_off_is_not_called_noise() -> None:
    known = replace(explain(replace(run(), notes={"noise": 0.02})), error=0.3)
    assert sentence(known).endswith(
        "; nothing stands out: no change is simulated to save more than the 30 % that the "
        "simulation of this step is off by"
    )


def test_ranks_that_use_all_cores_gain_nothing_by_another_order() -> None:
    assert said(run(1, 3, 1, 1), busy_cores=0.95, cores=2) == (
        "a step takes 750 ms; the ranks of a machine use all of its 2 cores: only more cores, or "
        "less to compute, would help"
    )


def test_the_time_of_a_step_is_that_of_the_whole_run() -> None:
    assert said(run(), step_seconds=0.12).startswith("a step takes 120 ms; ")


def test_steps_that_differ_are_noise() -> None:
    even = run()
    first, second, third = even.step_ends
    uneven = replace(even, step_ends=(first, second + 0.2, third + 0.5))
    assert "; steps differ too much from each other, by " in sentence(explain(uneven, step=0))


def test_python_has_arguments_in_the_place_of_keys() -> None:
    assert str(explain(run())).endswith(
        "num_microbatches=16, if half the rows take half the time: at most 14 % less"
    )
    assert "; try fused=True: at most" in str(explain(run(optimizer=0.5)))
    layers = ({"0": 1.0}, dict.fromkeys("123", 1.0), {"4": 1.0}, {"5": 1.0})
    words = str(explain(replace(run(1, 3, 1, 1), layers=layers)))
    assert "(boundaries=[2, 4, 5])" in words


def test_a_note_that_is_no_number_is_none() -> None:
    assert said(run(), step_seconds="soon", busy_cores="many").startswith("a step takes 330 ms; ")


def test_a_step_recorded_in_part_says_so() -> None:
    whole = run()
    spans = tuple(span for span in whole.spans if (span.kind, span.microbatch) != ("B", 3))
    words = said(replace(whole, spans=spans))
    assert words.startswith("a step takes 330 ms; no advice: step 1 was recorded in part")
