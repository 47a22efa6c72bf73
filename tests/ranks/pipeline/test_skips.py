"""Skips on a connection of their own: exact, in any shape, and never a hang."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology
from pipegrad.comm import sync_points
from pipegrad.comm.work import Work
from tests.support.gradients.cases import Case, Replies, on, rank, replies
from tests.support.rounding import rounding

TWO: list[Case] = []
FOUR: list[Case] = []
two = replies(2, TWO)
four = replies(4, FOUR)

WIDTH, ROWS, OWN = 4, 8, 4
MOST = rounding(4 * WIDTH * ROWS)
SOON = 30.0  # far more than any step takes, and less than a time-out
# For each schedule the stage that takes the skip of stage 0, on another rank than that.
TAKERS = {"interleaved-1f1b": 3, "zbv": 2}


class Part(nn.Module):
    """A layer; the first one makes a skip of another width, which a later one takes."""

    def __init__(self, stage: int, factor: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.stage, self.factor = stage, factor
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
    """Four stages on two ranks, in one pipeline or in two; and the same in one process."""

    def __init__(self, schedule: str) -> None:
        self.at = Topology.create(pipeline=2, stage_to_rank=PLACES[schedule])
        self.taker, self.factor = TAKERS[schedule], 3
        self.parts = {stage: Part(stage, self.factor) for stage in self.at.local_stages}
        self.true = [Part(stage, self.factor) for stage in range(4)]
        self.scheduler = Scheduler(
            [Stage(part, stage, *self._names(stage)) for stage, part in self.parts.items()],
            self.at,
            schedule=schedule,
            num_microbatches=OWN,
            loss_fn=lambda out, target: (out - target).square().mean(),
            handlers=["noop"],
            agree_seconds=5.0,
        )

    def _names(self, stage: int) -> tuple[list[str], list[str]]:
        takes = ["x", "skip"] if stage == self.taker else ["x"]
        return takes, ["x", "skip"] if stage == 0 else ["x"]

    def step(self, rows: int = ROWS, factor: int = 3) -> str:
        """Takes a step; returns what it raised, or whether gradients are right."""
        for part in (*self.parts.values(), *self.true):
            part.factor = factor
            part.zero_grad()
        began = time.monotonic()
        try:
            said = str(self._distance(rows) <= MOST or "wrong")
        except BaseException as error:  # noqa: BLE001 - an interrupt is none
            said = f"{type(error).__name__}: {error}"
        return said if time.monotonic() - began < SOON else f"too late: {said}"

    def _distance(self, rows: int) -> float:
        torch.manual_seed(rows)
        x, y = torch.randn(2, rows, WIDTH).unbind()
        float(self.scheduler.step(x, target=y).loss)
        out, skip = self.true[0](x)
        for stage in (1, 2, 3):
            out = self.true[stage](out, skip if stage == self.taker else None)
        (out - y).square().mean().backward()
        pairs = (
            (own, true)
            for stage, part in self.parts.items()
            for own, true in zip(part.parameters(), self.true[stage].parameters(), strict=True)
        )
        return max(_error(own.grad, true.grad) for own, true in pairs)


PLACES = {"interleaved-1f1b": (0, 1, 0, 1), "zbv": (0, 1, 1, 0)}


def _error(found: Tensor | None, true: Tensor | None) -> float:
    assert found is not None
    assert true is not None
    return float((found - true).abs().max() / true.abs().max())


def messages() -> Any:
    """Steps whose skips are as before, larger, smaller and empty, and what was sent in the first
    two."""
    found = {}
    for schedule in TAKERS:
        pipeline, noted = Pipeline(schedule), Noted()
        said = [pipeline.step()]
        with sync_points.using(noted):
            said.append(pipeline.step())
        shapes = [(ROWS, 50), (2 * ROWS, 1), (ROWS, 0), (ROWS, 3)]
        said += [pipeline.step(rows, factor) for rows, factor in shapes]
        x = torch.ones(ROWS, WIDTH)
        said.append(str(float(pipeline.scheduler.evaluate(x, target=x).loss) > 0))
        pipeline.scheduler.close()
        found[schedule] = said, sorted(noted.sent.values(), key=len)
    return found


@on(TWO)
def alone() -> Any:
    return messages()


@on(FOUR)
def beside_a_replica() -> Any:
    return messages()


def test_gradients_are_those_of_one_process_whatever_the_shape(two: Replies, four: Replies) -> None:
    found = [reply["alone"] for reply in two] + [reply["beside_a_replica"] for reply in four]
    for reply in found:
        for schedule, (said, _) in reply.items():
            assert said == ["True"] * 7, schedule


def test_what_goes_where(two: Replies) -> None:
    x, skip = 4 * WIDTH * ROWS // OWN, 3 * 4 * WIDTH * ROWS // OWN
    for at, reply in enumerate(two):
        # Rank 0 sends skips, and rank 1 their gradients, on a connection that has nothing else.
        _, loop = reply["alone"]["interleaved-1f1b"]
        assert [set(each) for each in loop] == [{skip}, {x}]
        # Rank 0 sends 0F and 2F, and the gradient for stage 1; rank 1 sends 1F, and two gradients.
        assert [len(each) for each in loop] == [OWN, 3 * OWN], at
        _, v = reply["alone"]["zbv"]
        assert [set(each) for each in v] == [{skip}, {x}]
        assert [len(each) for each in v] == [OWN, 2 * OWN]


@on(TWO)
def failures() -> Any:
    """A stage raises in each place in turn, and then the pipeline goes on."""
    found = []
    for schedule in TAKERS:
        pipeline = Pipeline(schedule)
        said = [pipeline.step()]
        for stage in range(4):
            if stage in pipeline.parts:
                pipeline.parts[stage].error = RuntimeError(f"stage {stage}")
            said.append(pipeline.step())
            if stage in pipeline.parts:
                pipeline.parts[stage].error = None
            said.append(pipeline.step())
        pipeline.scheduler.close()
        found.append(said)
    return found


def test_a_stage_that_fails_fails_on_both_ranks_and_then_all_goes_on(two: Replies) -> None:
    for reply in two:
        for said in reply["failures"]:
            assert said[::2] == ["True"] * 5
            for stage, each in enumerate(said[1::2]):
                assert f"stage {stage}" in each
                assert "too late" not in each


@on(TWO)
def interrupted() -> Any:
    """Rank 1 is interrupted, while rank 0 may wait for a gradient on either connection."""
    pipeline = Pipeline("interleaved-1f1b")
    said = [pipeline.step()]
    if rank() == 1:
        pipeline.parts[3].error = KeyboardInterrupt()
    said += [pipeline.step(), pipeline.step()]
    pipeline.scheduler.close()
    return said


def test_an_interrupt_ends_the_step_on_both_ranks(two: Replies) -> None:
    for reply in two:
        first, second, third = reply["interrupted"]
        assert first == "True"
        assert "True" not in (second, third)
        assert "too late" not in second + third
