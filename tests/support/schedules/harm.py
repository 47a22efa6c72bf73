"""Good Programs made bad: what verify says of them, and how items are moved."""

from __future__ import annotations

import re

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from pipegrad.errors import ScheduleError
from pipegrad.schedules.program.program import Program
from pipegrad.schedules.program.verify import verify
from tests.support.schedules.programs import with_items

quick = settings(deadline=None, max_examples=60, derandomize=True)
seeds = st.integers(0, 2**16)


def refused(program: Program) -> str:
    """Returns why `program` is refused."""
    with pytest.raises(ScheduleError) as caught:
        verify(program)
    return str(caught.value)


def assert_marked(text: str, program: Program) -> None:
    """Raises unless the text ends in the grid, some cells marked."""
    grid = text[text.index("\nrank 0  ") :]
    assert re.search(r">\d+[FBIW]\d+<", grid), text
    assert len(grid.strip().splitlines()) == program.schedule.num_ranks


def times(program: Program, rank: int, place: int, number: int) -> Program:
    """Returns it with an item as often as said."""
    items = list(program.items[rank])
    items[place : place + 1] = [items[place]] * number
    return with_items(program, rank, items)


def swap(program: Program, rank: int, left: int, right: int) -> Program:
    items = list(program.items[rank])
    items[left], items[right] = items[right], items[left]
    return with_items(program, rank, items)


def move(program: Program, rank: int, place: int, to: int) -> Program:
    """Puts an item directly in front of the one at `to`."""
    items = list(program.items[rank])
    item = items[place]
    del items[place]
    items.insert(to - (to > place), item)
    return with_items(program, rank, items)
