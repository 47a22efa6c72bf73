"""Real streams, slow at will: right numbers with every site, wrong ones without one of them.

One process and no process group. Wrong numbers are the proof that a test can fail: a wait that is
never late orders nothing.
"""

from __future__ import annotations

import pytest
import torch

from pipegrad.comm.sync_points import sites
from tests.support.gpu.card import GPU, SLEEP_MS, Card, cycles_per_ms, milliseconds
from tests.support.gpu.programs import EXPECTED, TWINS, Program, dropped, held

pytestmark = GPU


@pytest.fixture(autouse=True)
def warm() -> None:
    """Runs all that is run later: a kernel's first launch may wait for the whole device."""
    cycles_per_ms()
    for program in EXPECTED:
        program(Card(), {})
    torch.cuda.synchronize()


def test_a_sleep_is_as_long_as_it_is_said_to_be() -> None:
    taken = milliseconds(int(SLEEP_MS * cycles_per_ms()))
    assert 0.5 * SLEEP_MS < taken < 3 * SLEEP_MS


def test_the_streams_of_a_program_run_at_the_same_time() -> None:
    card = Card()
    flag = torch.zeros(1, device=card.device)
    seen = torch.ones(1, device=card.device)
    torch.cuda.synchronize()
    with card.on("slow"):
        card.sleep(1)
        flag.fill_(1)
    with card.on("fast"):
        seen.copy_(flag)
    torch.cuda.synchronize()
    assert (flag.item(), seen.item()) == (1, 0)


@pytest.mark.parametrize("program", EXPECTED, ids=lambda program: program.__name__)
def test_numbers_are_right_wherever_it_is_slow(program: Program) -> None:
    producers = ("producer of a", "producer of b", "optimizer")
    for place in ("allocation", "zeroing", *producers, "comm_stream", "reader"):
        assert program(Card(), {place: 1}) == EXPECTED[program], place


@pytest.mark.parametrize("name", TWINS)
def test_numbers_are_wrong_without_the_site_and_right_with_it(name: str) -> None:
    twin = TWINS[name]
    assert twin.program(Card(), twin.slow) == EXPECTED[twin.program]
    with sites[name].off():
        found = twin.program(Card(), twin.slow)
    assert found != EXPECTED[twin.program], sites[name].reason


def test_memory_that_is_dropped_too_early_is_somebody_elses() -> None:
    assert held(Card(), {"comm_stream": 1}) == EXPECTED[held]
    assert dropped(Card(), {"comm_stream": 1}) != EXPECTED[held]
