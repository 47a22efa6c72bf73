"""OrderChecker on ranks: right programs pass, and a collective that nobody waits for is found."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pipegrad.comm.comm_stream import CommStream
from pipegrad.comm.sync_points import sites
from pipegrad.testing import OrderChecker
from tests.support.gradients.cases import rank, replicated, stage, tied
from tests.support.ordering.producers import CPU, Producers
from tests.support.ordering.programs import PROGRAMS, run_programs, wrong
from tests.support.ordering.replay import Recording


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_right_and_ordered(name: str) -> None:
    assert wrong(name, run_programs([name])[name]) is None


# Of two collectives in a comm stream, of 4 and 5 elements: which are waited for -> which are left
# to luck.
WAITED: dict[tuple[str, tuple[int, ...]], list[int]] = {
    ("sum", (0, 1)): [],
    ("sum", (1,)): [],  # a group runs one behind the other
    ("sum", (0,)): [5],
    ("sum", ()): [4, 5],
    ("future", (0, 1)): [],
    ("future", (0,)): [5],
    ("future", ()): [4, 5],
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
                work = works[number]
                (work.get_future() if kind == "future" else work).wait()

        comm_stream.submit(start, [made]).wait(10)  # type: ignore[list-item]
        for tensor in tensors:
            tensor.mul_(2)
        comm_stream.close()
    for number in {0, 1} - {*waited}:  # a message must be waited for once
        works[number].wait()
    return [violation.span[1] // 4 for violation in checker.violations]


def started(kind: str, tensor: torch.Tensor) -> Any:
    if kind != "message":
        return dist.all_reduce(tensor, async_op=True)
    exchange = dist.irecv if dist.get_rank() else dist.isend
    return exchange(tensor, 1 - dist.get_rank())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "waited"), WAITED)
def test_a_collective_ends_where_somebody_waits_for_it(kind: str, waited: tuple[int, ...]) -> None:
    assert left_to_luck(kind, waited) == WAITED[kind, waited]


@pytest.mark.ranks(2)
def test_collectives_of_other_code_end_where_python_waits_for_them() -> None:
    for waits in (True, False):
        with OrderChecker(virtual_streams=False, foreign=True) as checker:
            total = torch.ones(4)
            work = dist.all_reduce(total, async_op=True)
            if waits:
                work.wait()
            total.mul_(2)
        if not waits:
            work.wait()
        found = [(v.first.what, v.second.what) for v in checker.violations]
        assert found == ([] if waits else [("c10d.allreduce_.default", "aten.mul_.Tensor")])
        assert all("test_order.py" in v.first.where for v in checker.violations)
    # C++ code waits where nobody can listen.
    with OrderChecker(virtual_streams=False, foreign=True) as checker:
        module = DistributedDataParallel(torch.nn.Linear(2, 2))
        module(torch.ones(1, 2)).sum().backward()
    assert checker.violations == []


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


# Small steps of GradientSync, drained in every order that their waits allow.


def drained(name: str, mutant: str | None = None) -> tuple[int, int]:
    """Returns the number of orders of a program and of those with other bits.

    All orders of the right program; of a wrong one, of which there are far more, the extremes.
    """
    with Recording() as recording, sites[mutant].off() if mutant else contextlib.nullcontext():
        program(recording, name)
    return recording.differing(recording.priorities() if mutant else recording.orders())


def program(recording: Recording, name: str) -> None:
    module = stage(a=(1,), b=(2,))
    options: dict[str, Any] = {"bucket_bytes": 0 if name == "viewed" else 1024, "comm_streams": 2}
    if name == "tied":
        sync = tied(module, "a", "b", **options)
    else:
        dtype = torch.float64 if name == "copied" else None
        sync = replicated(module, reduce_dtype=dtype, **options)
    producers = Producers(recording, list(module.parameters()), 2)
    sync.prepare()
    with producers.backward():
        total = sum(p.sum() * (rank() + k + 1.0) for k, p in enumerate(module.parameters()))
        torch.as_tensor(total).backward()
    sync.stage_final(sync.topology.local_stages[0])
    sync.finish()
    for p in module.parameters():
        p.grad.mul_(0.5)  # type: ignore[union-attr]
    sync.close()


@pytest.mark.ranks(2)
def test_every_legal_order_of_a_step_gives_the_bits_of_a_serial_run() -> None:
    for name in ("viewed", "copied", "tied"):
        orders, differing = drained(name)
        assert (orders > 1, differing) == (True, 0)


@pytest.mark.ranks(2)
def test_without_a_wait_some_order_gives_others() -> None:
    """One of the waits, all of which the mutation gate switches off."""
    assert drained("copied", "comm-stream.result")[1] > 0  # in its buckets it shows
