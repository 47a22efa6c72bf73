"""The simulator against runs on cards: ``benchmarks/h800``, on a few of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from pipegrad.schedules import Schedule
from pipegrad.schedules.builtin.one_f_one_b import OneForwardOneBackward
from pipegrad.schedules.builtin.zb_h1 import split_in_turns
from pipegrad.simulation.costs import StageCosts

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "h800" / "h800.py"
DELAYS = {(0, 1): 10.0, (1, 0): 10.0}


@pytest.fixture(scope="module", name="h800")
def load() -> Any:
    spec = importlib.util.spec_from_file_location("h800", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["h800"] = module  # its dataclass asks for it
    spec.loader.exec_module(module)
    return module


def run_of(h800: Any, *key: object) -> Any:
    (run,) = (r for r in h800.RUNS if (r.set, r.model, r.policy, r.slow_hops, r.delay_ms) == key)
    return run


@pytest.mark.parametrize(
    "key",
    [
        ("single", "7B", "1F1B", "2-3", 60),
        ("single", "7B", "ZB", "0-1", 60),
        ("multiple", "7B", "ZB-CPU", "0-1,1-2", 30),
        ("single", "7B", "ZB-CPU-ReSchedule", "2-3", 60),
        ("increasing-delay", "14B", "ZB", "6-7", 60),
    ],
)
def test_a_delayed_run_is_predicted_from_healthy_ones(h800: Any, key: tuple[object, ...]) -> None:
    run = run_of(h800, *key)
    assert abs(h800.error(run, h800.predicted_ms(run))) < 0.05


def test_what_stage_2_sends_to_stage_1_is_delayed_with_hop_2_3(h800: Any) -> None:
    """Without it the prediction of this run is a third too low."""
    run = run_of(h800, "single", "7B", "1F1B", "2-3", 60)
    assert run.delays == {(2, 3): 0.06, (3, 2): 0.06, (2, 1): 0.06}
    assert h800.error(run, h800.predicted_ms(run, delays=run.named)) < -0.3


def test_each_microbatch_waits_in_the_queue_for_the_delay_there_and_back(h800: Any) -> None:
    longest, shorter = (
        h800.predicted_ms(run_of(h800, "increasing-delay", "14B", "ZB", "6-7", ms))
        for ms in (60, 50)
    )
    assert longest - shorter == pytest.approx(2 * 24 * 10)


def step(h800: Any, lowered: Any, order: Schedule) -> float:
    """Returns the seconds of a step whose F, I and W take 1, and whose transfers take 10."""
    stage = StageCosts(1.0, 2.0, 1.0, outputs={"x": 1})
    seconds: float = h800.step_ms(lowered(order), h800.on_device((stage, stage), DELAYS)) / 1e3
    return seconds


def test_a_queue_holds_up_computes_and_both_directions_of_a_hop(h800: Any) -> None:
    """Rank 0: F 0-1, sends until 11, F 11-12, sends until 22, I 32-33, W 33-34, I 44-45, W 45-46.

    Rank 1: F 11-12, I 12-13. It sends from 22 on, when the second message is there, until 32. Then
    F 32-33, I 33-34; it sends until 44, and W 44-46.
    """
    order = split_in_turns("order", [2, 1], 2)
    assert str(order).splitlines() == [
        "rank 0  0F0 0F1     0I0 0W0 0I1 0W1",
        "rank 1      1F0 1I0 1F1 1I1 1W0 1W1",
    ]
    assert step(h800, h800.queued, order) == 46


def test_a_batch_waits_for_what_is_sent_and_what_is_received(h800: Any) -> None:
    """Rank 0: F 0-1, sends until 11, F 11-12, a batch until 24, B 24-26, B 37-39.

    Rank 1: F 11-12, B 12-14, a batch until 24, F 24-25, B 25-27, sends until 37.
    """
    order = OneForwardOneBackward().generate(num_ranks=2, num_microbatches=2)
    assert step(h800, h800.batched, order) == 39


def test_no_order_is_predicted_below_the_bound(h800: Any) -> None:
    run = run_of(h800, "increasing-delay", "14B", "ZB-CPU-ReSchedule", "6-7", 60)
    cells = {way: int(cell.split()[0]) for way, cell in h800.beside_ours(run).items()}
    bound = cells.pop("bound")
    assert min(cells.values()) >= bound
    assert cells["hop-aware-zb-h1, at most 24"] < cells["rescheduled, predicted"]
