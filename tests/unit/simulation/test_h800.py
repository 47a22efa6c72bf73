"""The simulator against runs on cards: ``benchmarks/h800``, on a few of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "h800" / "h800.py"


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


def test_no_order_is_predicted_below_the_bound(h800: Any) -> None:
    run = run_of(h800, "increasing-delay", "14B", "ZB-CPU-ReSchedule", "6-7", 60)
    cells = {way: int(cell.split()[0]) for way, cell in h800.beside_ours(run).items()}
    bound = cells.pop("bound")
    assert min(cells.values()) >= bound
    assert cells["hop-aware-zb-h1, at most 24"] < cells["rescheduled, predicted"]
