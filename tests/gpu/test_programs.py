"""The programs of the tests on a card, without one: right, and wrong without each site.

An hour on one card runs the files of this folder in this order, each in a process of its own and
bounded in time. Files with timings come first and alone; then ranks may share the card:

1. test_programs, test_streams, test_order_cuda, test_recording_on_card: 80 s.
2. test_schedulers_on_one_card with ``-n 6``: 110 s. A case that hangs takes a minute.
3. test_ranks_on_one_card, once with ``-k gloo-cuda``, with ``-k "nccl and not eager"`` and with
   ``-k eager``; test_trainer_on_card: 70 s beside each other.
4. benchmarks/card, benchmarks/host with ``--one-card``, on_cards.py of benchmarks/bucket_path with
   ``--one-card``.
"""

from __future__ import annotations

from typing import Any

import pytest

from pipegrad.comm.sync_points import sites
from pipegrad.testing import OrderChecker
from tests.support.gpu.programs import ELSEWHERE, EXPECTED, TWINS, Program, Virtual, dropped
from tests.support.ordering.uses import uses


def run(program: Program) -> tuple[Any, int]:
    with OrderChecker() as checker:
        found = program(Virtual(checker), {})
    return found, len(checker.violations)


@pytest.mark.parametrize("program", EXPECTED, ids=lambda program: program.__name__)
def test_programs_are_right_on_virtual_streams(program: Program) -> None:
    assert run(program) == (EXPECTED[program], 0)


def test_every_site_has_a_program_here_or_elsewhere() -> None:
    assert {name for name in uses() if name.partition(".")[0] not in ELSEWHERE} == TWINS.keys()


@pytest.mark.parametrize("name", TWINS)
def test_every_site_about_streams_has_a_program_that_needs_it(name: str) -> None:
    with sites[name].off():
        _, violations = run(TWINS[name].program)
    assert violations


def test_memory_that_is_dropped_too_early_is_found() -> None:
    _, violations = run(dropped)
    assert violations
