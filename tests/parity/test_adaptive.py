"""Steps whose schedule changes between them, against one process: tied, and over replicas."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from unittest import mock

import pytest
from torch import Tensor

from pipegrad.pipeline.programs import StepTimes
from pipegrad.schedules.measured import Times
from tests.parity.test_scheduler_parity import TIED, batch_of, truth
from tests.support.pipeline.models import build
from tests.support.pipeline.schedulers import MOST, ROWS, share, topology
from tests.support.pipeline.trained import (
    bits,
    differences,
    held_by,
    on_ranks,
    scheduled,
    train,
)

STEPS, MICROBATCHES = 7, 8
HOPS = (0.0, 1.5, 1.5, 0.0, 3.0)
LIMIT = 8  # of activations


@dataclass(frozen=True)
class Case:
    """A way to train the tied model."""

    pipeline: int
    data: int = 1
    schedule: str = "adaptive-1f1b"

    def __str__(self) -> str:
        return f"{self.schedule}, {self.pipeline} x {self.data} ranks"

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data


CASES = [Case(2, 2), Case(4), Case(2, 2, "hop-aware-zb-h1"), Case(4, 1, "hop-aware-zb-h1")]


@pytest.mark.parametrize("case", on_ranks(CASES, CASES[0]))
def test_gradients_are_those_of_one_process_whatever_the_warm_up(case: Case) -> None:
    """Times are given by the test, so that the warm-up changes in four steps."""
    at, p, rows = topology(case.pipeline), case.pipeline, ROWS * MICROBATCHES * case.data
    settings = {"name": case.schedule, "max_live_activations": LIMIT}
    scheduler = scheduled(build("tied"), settings, at, MICROBATCHES)
    hops = HOPS if case.schedule == "adaptive-1f1b" else (1.0,)
    once, warm_ups = (1.0,) * p, list[int]()
    times = [Times(once, tuple(2 * t for t in once), (c,) * (p - 1), once) for c in hops]

    def step(number: int, _: int) -> Tensor:
        tokens, target = (share(whole, at) for whole in batch_of(rows, number))
        loss = scheduler.step(tokens, target=target).loss
        warm_ups.append([a.kind in "BI" for a in scheduler.schedule.actions[0]].index(True))
        return loss

    with mock.patch.object(StepTimes, "times", side_effect=times):
        seen = train(step, functools.partial(held_by, scheduler), sync=scheduler.sync, steps=STEPS)
    scheduler.close()

    assert differences(seen, truth(rows, STEPS), MOST) == {}
    if case.schedule == "adaptive-1f1b":
        assert warm_ups == [p, p, p, 2 * p - 1, 2 * p - 1, p, min(LIMIT, 3 * p - 2)]
    else:  # it is made anew once
        assert warm_ups == [p, p, *[2 * p - 1] * 5]
    for gradients in seen.gradients:
        bits({name: gradients[name] for name in TIED if name in gradients}, [TIED])
