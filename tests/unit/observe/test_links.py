"""What explains the times of messages: latency and rate."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import pytest
import torch

from pipegrad.observe import links
from pipegrad.observe.links import Wires, fitted


def test_the_latency_is_half_of_an_empty_round_trip_and_the_rate_that_of_what_is_added() -> None:
    latency, rate = fitted(0.002, 1_000_000, 0.010)
    assert latency == 0.001
    assert rate == pytest.approx(1_000_000 / 0.008)


def test_a_large_message_that_is_as_fast_as_an_empty_one_has_no_rate() -> None:
    assert fitted(0.002, 1_000, 0.001) == (0.001, math.inf)


class FarWires(Wires):
    """A link of 100 MB/s and a round trip of 40 ms, now and then 4 ms more."""

    now, late = 0.0, itertools.cycle([0.0, 0.004, 0.004])

    def pass_on(self, source: int, target: int, num_bytes: int) -> None:
        seconds = num_bytes / 1e8 if num_bytes else 0.040 + next(self.late)
        FarWires.now += seconds


def test_the_rate_of_a_far_link_is_not_that_of_its_round_trip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 KiB over 40 ms showed 15 to 23 MB/s of 91, as round trips differ by some ms."""
    monkeypatch.setattr(time, "perf_counter", lambda: FarWires.now)
    monkeypatch.setattr(links, "Wires", FarWires)
    monkeypatch.setattr(links, "agree", lambda _what, look, **_: [look()])
    edges: Any = None
    (link,) = links.measure_links(
        edges, rank=0, ranks=[0, 1], pairs=[(0, 1)], device=torch.device("cpu")
    )
    assert link.latency_seconds == pytest.approx(0.020)
    # 2 of 3 round trips take 4 ms more than the fastest, beside 4 MiB.
    assert link.bytes_per_second == pytest.approx(2**22 / (2**22 / 1e8 + 0.004))
