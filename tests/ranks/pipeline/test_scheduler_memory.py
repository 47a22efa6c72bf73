"""What a Scheduler holds of a step's microbatches: as much as its proof says, on each rank.

A stage is sin between two matrices. Autograd keeps what sin is taken of for the inputs' gradients;
what the second matrix is multiplied with is kept for that matrix' gradient.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from pipegrad import Scheduler, Stage
from tests.support.gradients.cases import Case, Replies, on, replies
from tests.support.pipeline.chains import INTERLEAVED, WIDTH, make, watched

Tensor = torch.Tensor

FOUR: list[Case] = []
TWO: list[Case] = []
four = replies(4, FOUR)
two = replies(2, TWO)

# Peaks.

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", INTERLEAVED, "zb-h1", "zbv")
MICROBATCHES = {2: (1, 2, 4, 7), 4: (1, 4, 8, 11)}


@dataclass
class Held:
    """Storages that a rank's stages have made: what each forward saves, and multiplies with."""

    saved: list[StorageWeakRef] = field(default_factory=list)
    operands: list[StorageWeakRef] = field(default_factory=list)
    peaks: Counter[str] = field(default_factory=Counter)

    @property
    def alive(self) -> dict[str, int]:
        kinds = {"saved": self.saved, "operands": self.operands}
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


def sine(stage: int) -> Stage:
    return Stage(Sine(), stage)


def recomputed_sine(stage: int) -> Stage:
    return Stage(Sine(), stage, recompute=True)


def step(scheduler: Scheduler) -> None:
    x = torch.ones(scheduler.schedule.num_microbatches, WIDTH)
    scheduler.step(x, target=x)
    for stage in scheduler._stages.values():
        stage.module.zero_grad()


@dataclass(frozen=True)
class Found:
    """What a rank held, and what its proof says."""

    live_graphs: int
    live_activations: int
    alive_afterwards: dict[str, int]
    proven_graphs: int
    proven_activations: int
    receive_buffers: int
    proven_buffers: int


def measured(schedule: str, microbatches: int, **options: Any) -> Found:
    """Takes three steps; returns the peaks of the last."""
    global held  # noqa: PLW0603 - modules of this process note what they make
    with watched(note):
        options = {"make_stage": sine, "handlers": ["noop"], **options}
        scheduler = make(dist.get_world_size(), schedule, microbatches=microbatches, **options)
        for _ in range(3):
            held = Held()
            step(scheduler)
    scheduler.close()
    place, proof = dist.get_rank(), scheduler.proof
    return Found(
        held.peaks["saved"],
        held.peaks["operands"],
        held.alive,
        proof.live_graphs[place],
        proof.live_activations[place],
        scheduler.receive_buffers,
        proof.receive_buffers[place],
    )


def peaks() -> dict[tuple[str, int], Found]:
    num_ranks = dist.get_world_size()
    return {
        (schedule, number): measured(schedule, number)
        for schedule in SCHEDULES
        for number in MICROBATCHES[num_ranks]
        if schedule != INTERLEAVED or number % num_ranks == 0
    }


@on(TWO)
def peaks_of_two() -> Any:
    return peaks()


@on(FOUR)
def peaks_of_four() -> Any:
    return peaks()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_as_much_is_held_as_is_proven_and_nothing_afterwards(
    schedule: str, two: Replies, four: Replies
) -> None:
    for replies_, case in ((two, "peaks_of_two"), (four, "peaks_of_four")):
        cells = [cell for cell in replies_[0][case] if cell[0] == schedule]
        assert len(cells) >= 2
        for cell in cells:
            for at, reply in enumerate(replies_):
                found: Found = reply[case][cell]
                where = f"{cell}, rank {at} of {len(replies_)}"
                assert found.live_graphs == found.proven_graphs, where
                assert found.live_activations == found.proven_activations, where
                assert found.alive_afterwards == {"saved": 0, "operands": 0}, where
                assert 0 < found.receive_buffers <= found.proven_buffers, where


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


def half_checkpointed(stage: int) -> Stage:
    return Stage(HalfCheckpointed(), stage)


@on(TWO)
def half() -> Found:
    return measured("zb-h1", 7, make_stage=half_checkpointed)


def test_what_is_not_checkpointed_is_freed_with_the_inputs_gradients(two: Replies) -> None:
    for reply in two:
        found: Found = reply["half"]
        assert found.live_graphs == found.proven_graphs


def test_split_backward_frees_graphs_before_operands(four: Replies) -> None:
    """A control: the two peaks are not one."""
    last: Found = four[3]["peaks_of_four"]["zb-h1", 11]
    assert (last.live_graphs, last.live_activations) == (1, 4)


# Forwards that are run again.


@on(TWO)
def recomputed() -> dict[str, Found]:
    return {s: measured(s, 7, make_stage=recomputed_sine) for s in ("gpipe", "1f1b", "zb-h1")}


def test_a_stage_that_recomputes_holds_nothing_between_forward_and_backward(two: Replies) -> None:
    for at, reply in enumerate(two):
        for schedule, found in reply["recomputed"].items():
            waiting = 1 + at if schedule == "zb-h1" else 0  # its weights' gradients are `at` late
            assert (found.live_graphs, found.live_activations) == (0, waiting), (at, schedule)
            assert found.alive_afterwards == {"saved": 0, "operands": 0}


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


@dataclass(frozen=True)
class Forwards:
    """How often a stage's forward and the loss ran in a step and an evaluation; what came out."""

    step: int
    losses: int
    evaluation: int
    evaluated_losses: int
    loss: float
    gradients: list[float]


def forwards(schedule: str, *, recompute: bool = False, checkpointed: bool = False) -> Forwards:
    """Takes two steps of four microbatches, and an evaluation; the second step is reported."""
    losses: list[Tensor] = []

    def loss_fn(out: Tensor, _: Tensor) -> Tensor:
        losses.append(out)
        return out.square().sum()

    def stage(index: int) -> Stage:
        torch.manual_seed(index)
        return Stage(Counts(checkpointed=checkpointed), index, recompute=recompute)

    scheduler = make(2, schedule, stage, handlers=["noop"], loss_fn=loss_fn)
    module: Any = scheduler._stages[dist.get_rank()].module
    step(scheduler)
    x = torch.arange(4.0 * WIDTH).reshape(4, WIDTH) / 16
    torch.manual_seed(5)
    module.calls, losses[:] = 0, []
    loss = float(scheduler.step(x, target=x).loss)
    gradients = [value for p in module.parameters() for value in p.grad.flatten().tolist()]
    counts = module.calls, len(losses)
    module.calls, losses[:] = 0, []
    scheduler.evaluate(x, target=x)
    scheduler.close()
    return Forwards(*counts, module.calls, len(losses), loss, gradients)


@on(TWO)
def counted() -> dict[Any, Forwards]:
    return {
        (schedule, way): forwards(schedule, **{way: True} if way else {})
        for schedule in ("1f1b", "zb-h1")
        for way in ("", "recompute", "checkpointed")
    }


def test_each_forward_is_run_again_once_at_most(two: Replies) -> None:
    times = {"": 1, "recompute": 2, "checkpointed": 2}  # nothing waits under a checkpoint
    for at, reply in enumerate(two):
        for (schedule, way), found in reply["counted"].items():
            assert found.step == 4 * times[way], (schedule, way)
            assert found.losses == at * 4 * (1 + (way == "recompute"))
            assert (found.evaluation, found.evaluated_losses) == (4, at * 4)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_is_run_again_draws_the_same_random_numbers(schedule: str, two: Replies) -> None:
    for reply in two:
        plain, again = (reply["counted"][schedule, way] for way in ("", "recompute"))
        assert plain.loss == again.loss != 0.0
        assert plain.gradients == again.gradients
