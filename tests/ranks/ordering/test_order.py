"""OrderChecker on ranks: right programs pass, and what nobody waits for is found."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipegrad.comm.comm_stream import CommStream
from pipegrad.testing import OrderChecker
from tests.support.ordering.producers import CPU
from tests.support.ordering.programs import PROGRAMS, run_programs, wrong

NAMES = [pytest.param(n, marks=[pytest.mark.smoke] * (n == "viewed")) for n in PROGRAMS]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_right_and_ordered(name: str) -> None:
    assert wrong(name, run_programs([name])[name]) is None


# Of two collectives in a comm stream, of 4 and 5 elements: which are waited for -> which are left
# to luck.
WAITED: dict[tuple[str, tuple[int, ...]], list[int]] = {
    ("sum", (0, 1)): [],
    ("sum", (1,)): [],  # a group runs one behind the other
    ("sum", (0,)): [5],
    ("sum", ()): [4, 5],
    ("message", (0, 1)): [],
    ("message", (1,)): [4],
    ("message", (0,)): [5],
    ("message", ()): [4, 5],
}


def left_to_luck(kind: str, waited: Sequence[int]) -> list[int]:
    """Waits in the comm stream, as a handler would, then writes on the compute stream."""
    works: list[Any] = []
    with OrderChecker() as checker:
        comm_stream = CommStream("comm_stream", CPU, threaded=False)
        tensors = [torch.ones(4), torch.ones(5)]
        made = checker.record(CPU)

        def start() -> None:
            works.extend(started(kind, tensor) for tensor in tensors)
            for number in waited:
                works[number].wait()

        comm_stream.submit(start, [made]).wait(10)  # type: ignore[list-item]
        for tensor in tensors:
            tensor.mul_(2)
        comm_stream.close()
    for number in {0, 1} - {*waited}:  # a message must be waited for once
        works[number].wait()
    return [violation.span[1] // 4 for violation in checker.violations]


def started(kind: str, tensor: torch.Tensor) -> Any:
    if kind == "sum":
        return dist.all_reduce(tensor, async_op=True)
    exchange = dist.irecv if dist.get_rank() else dist.isend
    return exchange(tensor, 1 - dist.get_rank())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "waited"), WAITED)
def test_a_collective_ends_where_somebody_waits_for_it(kind: str, waited: tuple[int, ...]) -> None:
    assert left_to_luck(kind, waited) == WAITED[kind, waited]


# Live.

RACE = """
import threading, torch, pipegrad
from pipegrad.comm.comm_stream import CommStream
bucket = torch.zeros(4)
stream = CommStream("comm stream", torch.device("cpu"), threaded=True)
ticket = stream.submit(lambda: bucket.add_(1), [])
if {waits}:
    ticket.wait(10)
else:
    while not ticket.done.done(): pass
bucket.mul_(2)
print("done", bucket.tolist())
"""


@pytest.mark.parametrize(("live", "waits"), [("1", False), ("1", True), ("", False)])
def test_live(live: str, waits: bool) -> None:
    """In a real job, on CPU by its threads; numbers that happen to be right do not count."""
    environment = {**os.environ, "PIPEGRAD_CHECK_ORDER": live}
    code = textwrap.dedent(RACE.format(waits=waits))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if live and not waits:
        assert "OrderError: write not ordered after write: bytes 0 to 16" in done.stderr
        assert "done" not in done.stdout
    else:
        assert done.stdout == "done [2.0, 2.0, 2.0, 2.0]\n"
