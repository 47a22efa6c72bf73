"""Skips on a connection of their own: exact, in any shape, and never a hang."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology
from pipegrad.comm import sync_points
from pipegrad.comm.sync_points import Work
from tests.support.gradients.cases import rank
from tests.support.pipeline.layers import farthest
from tests.support.rounding import rounding

pytestmark = pytest.mark.ranks(2)
WIDTH, ROWS, OWN = 4, 8, 4
MOST = rounding(4 * WIDTH * ROWS)
# For each schedule the ranks of stages, and the one that takes the skip of stage 0, on another
# rank than that.
PLACES = {"interleaved-1f1b": ((0, 1, 0, 1), 3), "zbv": ((0, 1, 1, 0), 2)}


class Part(nn.Module):
    """A layer; the first one makes a skip of another width, which a later one takes."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.stage, self.factor = stage, 3
        self.error: BaseException | None = None

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Any:
        if self.error is not None:
            raise self.error
        out = self.layer(x).tanh()
        if skip is not None:
            out = out + skip.sum(1, keepdim=True) / WIDTH
        return (out, x.repeat(1, self.factor) * self.layer.bias.sum()) if self.stage == 0 else out


class Noted(sync_points.Backend):
    """Notes how many groups send, and what each of them sends."""

    def __init__(self) -> None:
        self.sent: dict[dist.ProcessGroup, list[int]] = {}

    def send(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, tag: int) -> Work:
        self.sent.setdefault(group, []).append(tensor.nbytes)
        return super().send(group, tensor, peer, tag)


class Pipeline:
    """Four stages on two ranks, and the same in one process."""

    def __init__(self, schedule: str) -> None:
        places, self.taker = PLACES[schedule]
        at = Topology.create(pipeline=2, stage_to_rank=places)
        self.parts = {stage: Part(stage) for stage in at.local_stages}
        self.true = [Part(stage) for stage in range(4)]
        self.scheduler = Scheduler(
            [Stage(part, stage, *self._names(stage)) for stage, part in self.parts.items()],
            at,
            schedule=schedule,
            num_microbatches=OWN,
            loss_fn=lambda out, target: (out - target).square().mean(),
            handlers=["noop"],
        )
        self.close = self.scheduler.close

    def _names(self, stage: int) -> tuple[list[str], list[str]]:
        takes = ["x", "skip"] if stage == self.taker else ["x"]
        return takes, ["x", "skip"] if stage == 0 else ["x"]

    def step(self, rows: int = ROWS, factor: int = 3) -> str:
        """Takes a step; returns what it raised, or whether gradients are right."""
        for part in (*self.parts.values(), *self.true):
            part.factor = factor
            part.zero_grad()
        torch.manual_seed(rows)
        x, y = torch.randn(2, rows, WIDTH).unbind()
        try:
            float(self.scheduler.step(x, target=y).loss)
        except BaseException as error:  # noqa: BLE001 - an interrupt is none
            return f"{type(error).__name__}: {error}"
        out, skip = self.true[0](x)
        for stage in (1, 2, 3):
            out = self.true[stage](out, skip if stage == self.taker else None)
        (out - y).square().mean().backward()
        errors = [farthest(part, self.true[stage]) for stage, part in self.parts.items()]
        return "right" if max(errors) <= MOST else "wrong"


@pytest.mark.parametrize("schedule", PLACES)
def test_gradients_are_those_of_one_process_whatever_the_shape(schedule: str) -> None:
    """Of steps whose skips are as before, larger, smaller and empty."""
    noted, x = Noted(), torch.ones(ROWS, WIDTH)
    with closing(Pipeline(schedule)) as pipeline:
        assert pipeline.step() == "right"
        with sync_points.using(noted):
            assert pipeline.step() == "right"
        for rows, factor in ((ROWS, 50), (2 * ROWS, 1), (ROWS, 0), (ROWS, 3)):
            assert pipeline.step(rows, factor) == "right"
        assert float(pipeline.scheduler.evaluate(x, target=x).loss) > 0
    # Rank 0 sends skips, and rank 1 their gradients, on a connection that has nothing else.
    skips, values = sorted(noted.sent.values(), key=len)
    num_bytes = 4 * WIDTH * ROWS // OWN
    assert skips == [3 * num_bytes] * OWN
    # In a loop rank 0 sends 0F and 2F, and the gradient for stage 1; rank 1 sends 1F, and two
    # gradients.
    assert values == [num_bytes] * OWN * (2 if schedule == "zbv" else 3)


@pytest.mark.parametrize("schedule", PLACES)
def test_a_stage_that_fails_fails_on_both_ranks_and_then_all_goes_on(schedule: str) -> None:
    with closing(Pipeline(schedule)) as pipeline:
        assert pipeline.step() == "right"
        for stage in range(4):
            part = pipeline.parts.get(stage, pipeline.true[stage])
            part.error = RuntimeError(f"stage {stage}")
            assert f"stage {stage}" in pipeline.step()
            part.error = None
            assert pipeline.step() == "right"


def test_an_interrupt_ends_the_step_on_both_ranks() -> None:
    """Rank 1 is interrupted, while rank 0 may wait for a gradient on either connection."""
    with closing(Pipeline("interleaved-1f1b")) as pipeline:
        assert pipeline.step() == "right"
        if rank() == 1:
            pipeline.parts[3].error = KeyboardInterrupt()
        for _ in range(2):
            assert pipeline.step() not in ("right", "wrong")
