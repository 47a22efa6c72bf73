"""Times and shares as people read them."""

from __future__ import annotations

import pytest

from pipegrad.simulation.timeline import in_percent, in_time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 us"),
        (85e-6, "85.0 us"),
        (0.00123, "1.23 ms"),
        (0.0123, "12.3 ms"),
        (0.64, "640 ms"),
        (1.5, "1.50 s"),
        (7200, "7200 s"),
        (0.0009999999, "1.00 ms"),
        (1e9, "1.00e+09 s"),
        (-0.01, "-10.0 ms"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert in_time(seconds) == text


def test_shares() -> None:
    shares = [0, 0.004, 0.0994, 0.0996, 0.5, 1]
    assert list(map(in_percent, shares)) == ["0.0 %", "0.4 %", "9.9 %", "10 %", "50 %", "100 %"]
