"""measure_costs: times, bytes and names of real stages and links, and nothing else changes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegrad
from pipegrad import Scheduler, Stage, Topology, schedules
from pipegrad.errors import PipegradError
from pipegrad.simulation.costs import Costs
from pipegrad.simulation.simulator import simulate
from tests.support.gradients.cases import DATA, Case, Replies, on, replies

FOUR: list[Case] = []
four = replies(4, FOUR)
ROWS, WIDTH, MICROBATCHES = 8, 16, 4
SLOW_SECONDS = 0.02
FLOAT = 4


class Block(nn.Module):
    """Everything that a forward may leave behind: batch statistics, random numbers, a gradient."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.stage = stage
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.stage == 1:
            time.sleep(SLOW_SECONDS)
        out: Tensor = self.dropout(self.norm(torch.tanh(self.linear(x))))
        return out


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(out, target)


def made(schedule: str, block: Any = Block, **options: Any) -> Scheduler:
    topology = Topology.create(pipeline=2)
    built = schedules.build(schedule, num_ranks=2, num_microbatches=MICROBATCHES)
    own = topology.with_stages(built.stage_to_rank).local_stages
    stages = [Stage(block(i), i, **options) for i in own]
    return Scheduler(stages, topology, schedule=built, loss_fn=loss_of, handlers=[DATA])


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = ROWS * MICROBATCHES, WIDTH
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def state(scheduler: Scheduler) -> list[Tensor]:
    modules = [stage.module for stage in scheduler._stages.values()]
    tensors = [t for m in modules for t in m.state_dict().values()]
    tensors += [p.grad for m in modules for p in m.parameters() if p.grad is not None]
    return [torch.get_rng_state(), *(t.clone() for t in tensors)]


def measured(schedule: str, **options: Any) -> Any:
    """Measures before the first step and after it; takes a step behind each."""
    x, y = batch()
    plain, scheduler = made(schedule, **options), made(schedule, **options)
    optimizer = scheduler.optimizer(torch.optim.AdamW, lr=1e-3)
    found, equal = list[Costs](), list[bool]()
    for _ in range(2):
        before = state(scheduler)
        with torch.no_grad():  # whatever the caller is in
            costs = pipegrad.measure_costs(scheduler, x, target=y, optimizer=optimizer, repeats=2)
        found.append(costs)
        after = state(scheduler)
        equal += [len(before) == len(after), *map(torch.equal, before, after)]
        report = scheduler.inputs
        torch.manual_seed(5)
        expected = plain.step(x, target=y).loss
        torch.manual_seed(5)
        equal.append(torch.equal(expected, scheduler.step(x, target=y).loss))
        equal.append(not report or report == scheduler.inputs)
        equal += map(torch.equal, state(plain), state(scheduler))
        optimizer.zero_grad()
        for stage in plain._stages.values():
            stage.module.zero_grad()
    program = scheduler.program
    for each in (plain, scheduler):
        each.close()
    return found, equal, program


@on(FOUR)
def whole() -> Any:
    return measured("1f1b")


@on(FOUR)
def split() -> Any:
    return measured("zbv")


@on(FOUR)
def recomputed() -> Any:
    return measured("1f1b", recompute=True)


@on(FOUR)
def of_two_optimizers() -> list[int]:
    x, y = batch()
    scheduler = made("1f1b")
    optimizer = scheduler.optimizer(torch.optim.Muon, others=torch.optim.AdamW)
    costs = pipegrad.measure_costs(
        scheduler, x, target=y, optimizer=optimizer, links=False, repeats=1
    )
    assert all(stage.optimizer_seconds > 0 for stage in costs.stages)
    scheduler.close()
    return [stage.optimizer_bytes for stage in costs.stages]


class Broken(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.stage == 1:
            raise RuntimeError("broken")
        return super().forward(x)


@on(FOUR)
def refusals() -> list[str]:
    x, y = batch()
    scheduler, broken = made("1f1b"), made("1f1b", Broken)
    messages = list[str]()
    for which, target, repeats in ((scheduler, None, 1), (scheduler, y, 0), (broken, y, 1)):
        with pytest.raises(PipegradError) as caught:
            pipegrad.measure_costs(which, x, target=target, repeats=repeats)
        messages.append(str(caught.value))
    costs = pipegrad.measure_costs(scheduler, x, target=y, links=False, repeats=1)
    assert costs.network.links == ()
    scheduler.close()
    broken.close()
    return messages


CASES = pytest.mark.parametrize("case", ["whole", "split", "recomputed"])


@CASES
def test_nothing_changes_and_the_next_step_has_the_same_bits(case: str, four: Replies) -> None:
    for reply in four:
        _, equal, _ = reply[case]
        assert all(equal)
        assert len(equal) > 20


@CASES
def test_all_ranks_of_a_pipeline_have_the_same_costs_of_each_stage_and_link(
    case: str, four: Replies
) -> None:
    costs = [reply[case][0] for reply in four]
    assert all(each[0].stages == costs[0][0].stages for each in costs)
    for found, _, program in (reply[case] for reply in four):
        for each in found:
            links = {(link.source, link.target) for link in each.network.links}
            assert links == {(c.source, c.target) for c in program.channels}
            assert set(each.collectives) == {c.name for c in program.collectives}
            assert len(each.network.hosts) == 2


def test_times_are_those_of_each_stage_alone(four: Replies) -> None:
    (found, *_), *_ = four[0]["whole"], None
    for costs in found:
        fast, slow = costs.stages
        assert slow.forward_seconds > SLOW_SECONDS > fast.forward_seconds > 0
        assert SLOW_SECONDS > slow.backward_seconds > 0
        assert fast.weight_seconds == slow.weight_seconds == 0


def test_a_split_backward_has_a_part_that_waits_and_factors_that_it_needs(four: Replies) -> None:
    found, *_ = four[0]["split"]
    for stage in found[-1].stages:
        assert stage.backward_seconds > stage.weight_seconds > 0
        # The factors of the linear layer's product: what went in, and the gradient of what came
        # out. What went into the first stage is the caller's own.
        assert stage.factor_bytes in (FLOAT * ROWS * WIDTH, 2 * FLOAT * ROWS * WIDTH)


def test_a_stage_that_recomputes_keeps_nothing_of_its_own_and_runs_forward_twice(
    four: Replies,
) -> None:
    found, *_ = four[0]["recomputed"]
    first, second = found[-1].stages
    # The first one's input is the caller's, the second one's is in receive buffers.
    assert first.activation_bytes == second.activation_bytes == 0
    assert second.backward_seconds > SLOW_SECONDS


def test_bytes_are_counted_once_for_memory_that_tensors_share(four: Replies) -> None:
    found, *_ = four[0]["whole"]
    value = FLOAT * ROWS * WIDTH
    statistics = 2 * FLOAT * WIDTH  # of the batch
    for costs in found:
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


def test_two_optimizers_as_one_are_measured_together(four: Replies) -> None:
    """Muon keeps one number for an element of a matrix; AdamW two, and a count."""
    of_matrix, of_vectors = WIDTH * WIDTH, 2 * 3 * WIDTH + 3
    assert four[0]["of_two_optimizers"] == [FLOAT * (of_matrix + of_vectors)] * 2


def test_the_costs_can_be_simulated_and_saved(four: Replies) -> None:
    found, _, program = four[0]["whole"]
    costs = Costs.from_json(found[-1].to_json())
    assert costs == found[-1]
    seconds = simulate(program, costs).step_seconds
    assert seconds[0] > MICROBATCHES * SLOW_SECONDS


def test_what_cannot_be_measured_is_refused_on_all_ranks(four: Replies) -> None:
    for reply in four:
        no_target, repeats, broken = reply["refusals"]
        assert "needs target=" in no_target
        assert "repeats is 0" in repeats
        assert "broken" in broken
