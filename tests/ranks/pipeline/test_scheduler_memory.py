"""What a Scheduler holds of a step's microbatches: as much as its proof says, on each rank.

A stage is sin between two matrices. Autograd keeps what sin is taken of for the inputs' gradients;
what the second matrix is multiplied with is kept for that matrix' gradient.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from pipegrad import Scheduler, Stage
from pipegrad.pipeline.transfers import Receive
from tests.support.gradients.cases import rank
from tests.support.pairwise import pairwise
from tests.support.pipeline.chains import INTERLEAVED, WIDTH, make, watched

pytestmark = pytest.mark.ranks(2)
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", INTERLEAVED, "zb-h1", "zbv", "v-half", "v-min")
MICROBATCHES = {2: (1, 2, 4, 7), 4: (1, 4, 8, 11)}


@dataclass
class Held:
    """Storages of a rank: what each forward saves and multiplies with, and what is received."""

    saved: list[StorageWeakRef] = field(default_factory=list)
    operands: list[StorageWeakRef] = field(default_factory=list)
    received: list[StorageWeakRef] = field(default_factory=list)
    peaks: Counter[str] = field(default_factory=Counter)

    @property
    def alive(self) -> dict[str, int]:
        kinds = {"saved": self.saved, "operands": self.operands, "received": self.received}
        return {name: sum(not ref.expired() for ref in refs) for name, refs in kinds.items()}


held = Held()  # by this process


def note(_when: str, _action: str) -> None:
    for name, number in held.alive.items():
        held.peaks[name] = max(held.peaks[name], number)


class Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x)
        out = torch.sin(found)
        if torch.is_grad_enabled():
            held.saved.append(StorageWeakRef(found.untyped_storage()))
            held.operands.append(StorageWeakRef(out.untyped_storage()))
        made: Tensor = self.second(out)
        return made


def step(scheduler: Scheduler) -> None:
    x = torch.ones(scheduler.schedule.num_microbatches, WIDTH)
    scheduler.step(x, target=x)
    for stage in scheduler._stages.values():
        stage.module.zero_grad()


def measured(
    schedule: str, microbatches: int, module: type[nn.Module] = Sine, **of_stage: Any
) -> tuple[Counter[str], Scheduler]:
    """Takes three steps; returns the peaks of the last, behind which nothing is held."""
    global held  # noqa: PLW0603 - modules of this process note what they make
    options: dict[str, Any] = {"microbatches": microbatches, "handlers": ["noop"]}
    begin = Receive.__init__

    def noted(receive: Receive, key: Any, memory: Tensor, like: Any) -> None:
        held.received.append(StorageWeakRef(memory.untyped_storage()))
        begin(receive, key, memory, like)

    with watched(note), mock.patch.object(Receive, "__init__", noted):
        scheduler = make(
            dist.get_world_size(), schedule, lambda s: Stage(module(), s, **of_stage), **options
        )
        for _ in range(3):
            held = Held()
            step(scheduler)
    scheduler.close()
    assert held.alive == {"saved": 0, "operands": 0, "received": 0}
    return held.peaks, scheduler


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [
        pytest.param(schedule, MICROBATCHES[ranks][which], marks=pytest.mark.ranks(ranks))
        for schedule, which, ranks in pairwise(
            SCHEDULES,
            range(4),
            MICROBATCHES,
            allowed=lambda schedule, which, ranks: (
                schedule != INTERLEAVED or MICROBATCHES[ranks][which] % ranks == 0
            ),
        )
    ],
)
def test_as_much_is_held_as_is_proven_and_then_nothing(schedule: str, microbatches: int) -> None:
    peaks, scheduler = measured(schedule, microbatches)
    proof = scheduler.proof
    assert peaks["saved"] == proof.live_graphs[rank()]
    assert peaks["operands"] == proof.live_activations[rank()]
    assert 0 < peaks["received"] <= proof.receive_buffers[rank()]


@pytest.mark.ranks(4)
def test_split_backward_frees_graphs_before_operands() -> None:
    """A control: the two peaks are not one."""
    peaks, _ = measured("zb-h1", 11)
    assert rank() != 3 or (peaks["saved"], peaks["operands"]) == (1, 4)


class HalfCheckpointed(Sine):
    """The second half is checkpointed, so that its operand is computed anew."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x)
        out = torch.sin(found)
        if torch.is_grad_enabled():
            held.saved.append(StorageWeakRef(found.untyped_storage()))
        made: Tensor = checkpoint(self._second, out, use_reentrant=False)
        return made

    def _second(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(x)
        return made


def test_what_is_not_checkpointed_is_freed_with_the_inputs_gradients() -> None:
    peaks, scheduler = measured("zb-h1", 7, HalfCheckpointed)
    assert peaks["saved"] == scheduler.proof.live_graphs[rank()]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_stage_that_recomputes_holds_nothing_between_forward_and_backward(schedule: str) -> None:
    peaks, _ = measured(schedule, 7, recompute=True)
    waiting = 1 + rank() if schedule == "zb-h1" else 0  # its weights' gradients are `rank` late
    assert (peaks["saved"], peaks["operands"]) == (0, waiting)


class Counts(nn.Module):
    """Two matrices, checkpointed or not; counts its forwards, and draws random numbers."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self._checkpointed = checkpointed
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self._checkpointed:
            found: Tensor = checkpoint(self._computed, x, use_reentrant=False)
            return found
        return self._computed(x)

    def _computed(self, x: Tensor) -> Tensor:
        self.calls += 1
        dropped = nn.functional.dropout(self.first(x), training=self.training)
        found: Tensor = self.second(torch.sin(dropped))
        return found


def forwards(
    schedule: str, *, times: int = 1, checkpointed: bool = False, **options: Any
) -> tuple[float, list[float]]:
    """Takes two steps of four microbatches, and an evaluation; returns loss and gradients.

    The stage's forward runs `times` in the second step for each, and the loss once.
    """
    computed: list[Tensor] = []

    def loss_fn(out: Tensor, _: Tensor) -> Tensor:
        computed.append(out)
        return out.square().sum()

    def stage(index: int) -> Stage:
        torch.manual_seed(index)
        return Stage(Counts(checkpointed=checkpointed), index, **options)

    with closing(make(2, schedule, stage, handlers=["noop"], loss_fn=loss_fn)) as scheduler:
        module: Any = scheduler._stages[rank()].module
        step(scheduler)
        x = torch.arange(4.0 * WIDTH).reshape(4, WIDTH) / 16
        torch.manual_seed(5)
        module.calls, computed[:] = 0, []
        loss = float(scheduler.step(x, target=x).loss)
        gradients = [value for p in module.parameters() for value in p.grad.flatten().tolist()]
        assert (module.calls, len(computed)) == (4 * times, rank() * 4)
        module.calls, computed[:] = 0, []
        scheduler.evaluate(x, target=x)
        assert (module.calls, len(computed)) == (4, rank() * 4)
    return loss, gradients


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_each_forward_is_run_again_once_at_most_with_the_same_random_numbers(schedule: str) -> None:
    plain = forwards(schedule)
    assert plain[0] != 0.0
    assert forwards(schedule, times=2, recompute=True) == plain
    forwards(schedule, times=2, checkpointed=True)  # nothing waits under a checkpoint
