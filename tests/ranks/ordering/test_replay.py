"""Small steps of GradientSync, drained in every order that their waits allow."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from pipegrad.comm.sync_points import sites
from pipegrad.testing.ordering.replay import Recording
from tests.support.gradients.cases import rank, replicated, stage, tied
from tests.support.ordering.producers import Producers

# Sites whose absence shows in the bits of a step; the others order steps, threads or frees.
SHOWN = (
    "buffer.written",
    "comm-stream.producers",
    "comm-stream.task-done",
    "comm-stream.result",
    "reduce.collective",
)


def drained(mutant: str | None) -> list[tuple[int, int]]:
    """Returns for each program the number of orders and of those with other bits.

    All orders of the right program; of a wrong one, of which there are far more, the extremes.
    """
    found = []
    for name in ("viewed", "copied", "tied"):
        off = sites[mutant].off() if mutant else contextlib.nullcontext()
        with Recording() as recording, off:
            program(recording, name)
        found.append(recording.differing(recording.priorities() if mutant else recording.orders()))
    return found


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
    for orders, wrong in drained(None):
        assert (orders > 1, wrong) == (True, 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mutant", SHOWN)
def test_without_a_wait_some_order_gives_others(mutant: str) -> None:
    assert any(wrong > 0 for _, wrong in drained(mutant))
