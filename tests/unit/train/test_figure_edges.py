"""Figures of a run: in which unit they are, and when they are called inexact."""

from __future__ import annotations

import pytest
import torch

from pipegrad.simulation.explain.breakdown import break_down
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.timeline import Span, Timeline
from pipegrad.train.evaluation import peak_memory_bytes
from pipegrad.train.rendering import rendered_breakdown


@pytest.mark.parametrize(("overlap", "is_said"), [(0.5, False), (2.0, True)])
def test_an_overlap_is_said_if_it_is_more_than_a_hundredth_of_the_step(
    overlap: float, *, is_said: bool
) -> None:
    spans = (Span(0, "F", 0, 50 + overlap), Span(0, "B", 50, 100))
    breakdown = break_down(Lookup(Timeline("", "measured", 1, (0,), 1, spans, (100.0,))), 0)
    lines = [str(part) for part in rendered_breakdown(breakdown, "step 0")]
    assert any("overlap by more than 1 %" in line for line in lines) == is_said


def test_the_memory_of_a_process_is_in_bytes() -> None:
    assert 2**26 < peak_memory_bytes(torch.device("cpu")) < 2**44  # torch alone takes 64 MiB
