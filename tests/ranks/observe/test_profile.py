"""measure_costs: times, bytes and names of real stages and links, and nothing else changes."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegrad
from pipegrad import Scheduler, Stage, Topology, schedules
from pipegrad.errors import PipegradError
from pipegrad.schedules import Program
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.simulator import simulate
from tests.support.gradients.cases import DATA
from tests.support.ranked import gathered

pytestmark = pytest.mark.ranks(4)
ROWS, WIDTH, MICROBATCHES, FLOAT = 8, 16, 4, 4
SLOW_SECONDS = 0.02


class Block(nn.Module):
    """Everything that a forward may leave behind: batch statistics, random numbers, a gradient."""

    def __init__(self, stage: int, *, fails: bool = False) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.stage, self.fails = stage, fails
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.stage == 1:
            time.sleep(SLOW_SECONDS)
            if self.fails:
                raise RuntimeError("broken")
        out: Tensor = self.dropout(self.norm(torch.tanh(self.linear(x))))
        return out


def made(schedule: str, *, fails: bool = False, **options: Any) -> Scheduler:
    topology = Topology.create(pipeline=2)
    built = schedules.build(schedule, num_ranks=2, num_microbatches=MICROBATCHES)
    own = topology.with_stages(built.stage_to_rank).local_stages
    stages = [Stage(Block(i, fails=fails), i, **options) for i in own]
    return Scheduler(
        stages, topology, schedule=built, loss_fn=nn.functional.mse_loss, handlers=[DATA]
    )


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = ROWS * MICROBATCHES, WIDTH
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def state(scheduler: Scheduler) -> list[Tensor]:
    modules = [stage.module for stage in scheduler.steps.pipeline.stages]
    tensors = [t for m in modules for t in m.state_dict().values()]
    tensors += [p.grad for m in modules for p in m.parameters() if p.grad is not None]
    return [torch.get_rng_state(), *(t.clone() for t in tensors)]


def assert_equal(before: list[Tensor], after: list[Tensor]) -> None:
    assert len(before) == len(after) > 1
    assert all(map(torch.equal, before, after))


@cache  # the tests of a file run in the same processes
def measured(schedule: str, *, recompute: bool = False) -> tuple[list[Costs], Program]:
    """Measures before the first step and after it; a step behind each has the same bits."""
    x, y = batch()
    plain, scheduler = (made(schedule, recompute=recompute) for _ in range(2))
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-3)
    found = list[Costs]()
    for _ in range(2):
        before = state(scheduler)
        with torch.no_grad():  # whatever the caller is in
            costs = pipegrad.measure_costs(scheduler, x, target=y, optimizer=optimizer, repeats=2)
        found.append(costs)
        assert_equal(before, state(scheduler))
        report = scheduler.inputs
        torch.manual_seed(5)
        expected = plain.step(x, target=y).loss
        torch.manual_seed(5)
        assert torch.equal(expected, scheduler.step(x, target=y).loss)
        assert not report or report == scheduler.inputs
        assert_equal(state(plain), state(scheduler))
        optimizer.zero_grad()
        for stage in plain.steps.pipeline.stages:
            stage.module.zero_grad()
    for each in (plain, scheduler):
        each.close()
    return found, scheduler.program


@pytest.mark.parametrize(
    "options", [{"schedule": "1f1b"}, {"schedule": "zbv"}, {"schedule": "1f1b", "recompute": True}]
)
def test_nothing_changes_and_all_ranks_have_the_same_costs(options: dict[str, Any]) -> None:
    found, program = measured(**options)
    assert len({str(stages) for stages in gathered(found[0].stages)}) == 1
    for costs in found:
        links = {(link.source, link.target) for link in costs.network.links}
        assert links == {(c.source, c.target) for c in program.channels}
        reductions = costs.reductions(program.schedule.stage_to_rank)
        assert [c.name for c in reductions] == list(costs.collectives)
        assert len(costs.network.hosts) == 2


def test_times_and_bytes_are_those_of_each_stage_alone() -> None:
    for costs in measured("1f1b")[0]:
        fast, slow = costs.stages
        assert slow.forward_seconds > SLOW_SECONDS
        assert slow.forward_seconds > fast.forward_seconds > 0
        assert slow.forward_seconds > slow.backward_seconds > 0
        assert fast.weight_seconds == slow.weight_seconds == 0
    # Bytes are counted once for memory that tensors share.
    value = FLOAT * ROWS * WIDTH
    statistics = 2 * FLOAT * WIDTH  # of the batch
    for costs in measured("1f1b")[0]:
        first, second = costs.stages
        assert first.outputs == {"x": value}
        assert second.outputs == {}
        parameters = FLOAT * (WIDTH * WIDTH + 3 * WIDTH)
        assert first.parameter_bytes == second.parameter_bytes == parameters
        assert first.gradient_bytes >= parameters
        # Two moments, and a count for each parameter.
        assert first.optimizer_bytes == 2 * parameters + 4 * FLOAT
        # Of tanh, of dropout and its mask, which lies in floats; and the mean and deviation of
        # the norm.
        assert first.activation_bytes == 3 * value + statistics
        assert second.activation_bytes > first.activation_bytes - value
    # The factors of the linear layer's product: what went in, and the gradient of what came out.
    # What went into the first stage is the caller's own.
    for stage in measured("zbv")[0][-1].stages:
        assert stage.factor_bytes in (FLOAT * ROWS * WIDTH, 2 * FLOAT * ROWS * WIDTH)
    # The costs can be simulated and saved.
    found, program = measured("1f1b")
    costs = Costs.from_json(found[-1].to_json())
    assert costs == found[-1]
    seconds = simulate(program, costs).step_seconds
    assert seconds[0] > MICROBATCHES * SLOW_SECONDS


def test_two_optimizers_are_measured_and_mistakes_refused() -> None:
    """Muon keeps one number for an element of a matrix; AdamW two, and a count."""
    x, y = batch()
    scheduler = made("1f1b")
    optimizer = scheduler.optimizer(torch.optim.Muon, others=torch.optim.AdamW)
    costs = pipegrad.measure_costs(
        scheduler, x, target=y, optimizer=optimizer, links=False, repeats=1
    )
    scheduler.close()
    of_matrix, of_vectors = WIDTH * WIDTH, 2 * 3 * WIDTH + 3
    for stage in costs.stages:
        assert stage.optimizer_seconds > 0
        assert stage.optimizer_bytes == FLOAT * (of_matrix + of_vectors)
    # What cannot be measured is refused on all ranks.
    x, y = batch()
    scheduler, broken = made("1f1b"), made("1f1b", fails=True)
    with pytest.raises(PipegradError, match="needs target="):
        pipegrad.measure_costs(scheduler, x, repeats=1)
    with pytest.raises(PipegradError, match="repeats is 0"):
        pipegrad.measure_costs(scheduler, x, target=y, repeats=0)
    with pytest.raises(PipegradError, match="broken"):
        pipegrad.measure_costs(broken, x, target=y, repeats=1)
    costs = pipegrad.measure_costs(scheduler, x, target=y, links=False, repeats=1)
    assert costs.network.links == ()
    scheduler.close()
    broken.close()


class Model(nn.Module):
    """A model that is no chain: its stages run its own code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(0) for _ in range(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Around(Stage):
    """A stage with a forward of its own."""

    def forward(self, values: Any) -> tuple[Tensor, ...]:
        (x,) = values
        return (self.module(x),)


@pytest.mark.parametrize("kind", ["own code", "own forward"])
def test_nothing_changes_however_a_stage_calls_its_modules(kind: str) -> None:
    """Gradients of what was measured were in the first step of a cut model."""
    x, y = batch()
    topology = Topology.create(pipeline=2)
    stages: Any = pipegrad.cut(Model(), 2, example={"x": x[:4]})
    if kind == "own forward":
        index = topology.coordinate("pp")
        stages = [Around(Block(index), index)]
    scheduler = Scheduler(
        stages, topology, schedule="1f1b", num_microbatches=MICROBATCHES,
        loss_fn=nn.functional.mse_loss, handlers=[DATA],
    )  # fmt: skip
    optimizer = scheduler.optimizer(torch.optim.SGD, lr=0.1)
    before = state(scheduler)
    for _ in range(2):
        inputs: Any = {"x": x} if kind == "own code" else {}
        pipegrad.measure_costs(scheduler, *(() if inputs else (x,)), target=y, **inputs)
        assert_equal(before, state(scheduler))
        scheduler.step(*(() if inputs else (x,)), target=y, **inputs)
        optimizer.step()
        optimizer.zero_grad()
        before = state(scheduler)
