"""A step that fails anywhere is one error on all ranks, names its place, and leaves no trace."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology, Work
from pipegrad.comm import sync_points
from pipegrad.errors import StepError
from pipegrad.pipeline.loss_message import Losses
from tests.support.gradients.cases import rank
from tests.support.pipeline import scales
from tests.support.pipeline.codecs import Fails
from tests.support.rounding import ADAM_EPS, rounding

WIDTH, ROWS, MICROBATCHES = 4, 8, 4
REPLICAS = ["pipeline-shared", "data-parallel"]
HEAD_FIRST = {"name": "zb-h1", "head_w_first": True}
# The ranks of stages, a schedule, and handlers. With fewer ranks than four there are replicas.
WAYS: dict[str, tuple[tuple[int, ...], Any, list[Any]]] = {
    "replicate": ((0, 1), "1f1b", REPLICAS),
    "owner": (
        (0, 1),
        HEAD_FIRST,
        [{"name": "pipeline-shared", "placement": "owner"}, "data-parallel"],
    ),
    "sharded": ((0, 1), "gpipe", ["pipeline-shared", "sharded"]),
    "chain": ((0, 1, 2, 3), "zb-h1", ["pipeline-shared"]),
    "skips": ((0, 1, 0, 1), "interleaved-1f1b", REPLICAS),
}
pytestmark = pytest.mark.ranks(4)


class Part(nn.Module):
    """A stage with a weight that the ends tie and one of its own, that raises where it is told to.

    The first stage of four on two ranks makes a skip, which the last one takes.
    """

    def __init__(self, stage: int, *, is_end: bool) -> None:
        super().__init__()
        self.stage = stage
        torch.manual_seed(0 if is_end else 10 + stage)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        torch.manual_seed(stage + 1)
        self.own = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.trick: tuple[str, int, BaseException] | None = None
        self.calls = Counter[str]()
        self.own.weight.register_hook(lambda _: self.play("hook"))
        self.tied.weight.register_hook(lambda _: self.play("tie"))

    def play(self, kind: str) -> None:
        """Raises if it is this call that is to fail."""
        microbatch, self.calls[kind] = self.calls[kind] % MICROBATCHES, self.calls[kind] + 1
        if self.trick is not None and self.trick[:2] == (kind, microbatch):
            raise self.trick[2]

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Any:
        self.play("F")
        out: Tensor = self.own(self.tied(x).tanh())
        if out.requires_grad:
            out.register_hook(lambda _: self.play("B"))
        return out if skip is None else out + skip


class Forks(Part):
    def forward(self, x: Tensor, skip: Tensor | None = None) -> Any:
        return super().forward(x), x.sin() * self.own.bias


class Training:
    """A pipeline, perhaps with a replica; steps that are taken and fail, without zero_grad."""

    def __init__(self, how: str = "replicate") -> None:
        places, schedule, handlers = WAYS[how]
        self.at = Topology.create(pipeline=max(places) + 1, stage_to_rank=places)
        self.replica, self.last = self.at.coordinate("dp"), len(places) - 1
        self.parts = {
            stage: (Forks if how == "skips" and stage == 0 else Part)(
                stage, is_end=stage in (0, self.last)
            )
            for stage in self.at.local_stages
        }
        skip = ["skip"] if how == "skips" else []
        self.scheduler = Scheduler(
            [
                Stage(part, s, ["x", *skip * (s == self.last)], ["x", *skip * (s == 0)])
                for s, part in self.parts.items()
            ],
            self.at,
            num_microbatches=MICROBATCHES,
            loss_fn=self.loss,
            tied=[{0: "tied.weight", self.last: "tied.weight"}],
            handlers=handlers,
            schedule=schedule,
            codecs=Fails,
        )
        self.sync, self.close = self.scheduler.sync, self.scheduler.close
        self.optimizer = torch.optim.AdamW(self.sync.optimizer_parameters(), lr=0.1, eps=ADAM_EPS)

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        self.parts[self.last].play("loss")
        return (out - target).square().mean()

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(2 * seed + self.replica)
        x, y = torch.randn(2, ROWS, WIDTH, dtype=torch.float64).unbind()
        return x, y

    def step(self, seed: int, between: Callable[[], object] = str) -> str:
        """Takes a step; returns what it raised, if it did. Gradients are zeroed behind it only."""
        for part in self.parts.values():
            part.calls.clear()
        x, y = self.batch(seed)
        try:
            float(self.scheduler.step(x, target=y).loss)
        except BaseException as error:  # noqa: BLE001 - whatever it is
            notes = getattr(error, "__notes__", [])
            return " ".join([f"{type(error).__name__}: {error}", *notes])
        between()
        self.optimizer.step()
        self.sync.publish()
        self.optimizer.zero_grad()
        return ""

    def failing(self, seed: int, stage: int, kind: str, microbatch: int, error: Any) -> str:
        """Takes a step that fails here, if a stage is given."""
        if stage >= 0:
            self.parts[stage].trick = kind, microbatch, error
            Fails.told[kind] = microbatch + 1
        said = self.step(seed)
        Fails.told.clear()
        for part in self.parts.values():
            part.trick = None
        return said

    def evaluate(self) -> None:
        x, y = self.batch(9)
        float(self.scheduler.evaluate(x, target=y).loss)

    def values(self) -> list[Tensor]:
        self.sync.wait_parameters()
        return [p.detach().clone() for part in self.parts.values() for p in part.parameters()]


def equal(one: Training, other: Training, within: float = 0.0) -> bool:
    pairs = zip(one.values(), other.values(), strict=True)
    return all((a - b).abs().max() <= within * b.abs().max() for a, b in pairs)


# Where a step fails: in a stage's forward or backward, in a hook of a weight of its own or of the
# tie, in a codec, or in the loss.
SENDS, RECEIVES = (
    [f"{one} activations", f"{other} gradients"]
    for one, other in (("encode", "decode"), ("decode", "encode"))
)
KINDS = ["F", "B", "hook", "tie", "loss", *SENDS, *RECEIVES]


def stages_that_can(kind: str, num_stages: int) -> list[int]:
    first, last = kind in RECEIVES, num_stages - (kind in SENDS)
    return [num_stages - 1] if kind == "loss" else [*range(first, last)]


@pytest.mark.parametrize("how", WAYS)
def test_random_failures_are_one_error_on_all_ranks_and_training_goes_on(how: str) -> None:
    """Among good steps, compared with a training that never fails. Each kind comes once.

    The error is what was raised, and names the action.
    """
    choose = random.Random(16)  # the same on all ranks
    places, schedule, _ = WAYS[how]
    is_split, num_replicas = "zb-h1" in str(schedule), 4 // (max(places) + 1)
    letters = {"F": "F", "loss": "F", "B": "BI"[is_split], "hook": "BW"[is_split]}
    training, twin = Training(how), Training(how)
    for number, kind in enumerate(choose.sample(KINDS, len(KINDS))):
        if number or how == "owner":  # else it fails in the first step
            for one in (training, twin):
                one.step(number)
        stage, microbatch = choose.choice(stages_that_can(kind, len(places))), choose.randrange(4)
        where = num_replicas * places[stage] + choose.randrange(num_replicas)
        error = choose.choice([ValueError("wrong"), OSError("lost"), MemoryError()])
        here = stage if rank() == where else -1
        said = training.failing(number, here, kind, microbatch, error)
        why = type(error).__name__
        if kind in SENDS + RECEIVES:
            why = f"ValueError: no {kind}"
        assert said.startswith(why if rank() == where else "StepError: "), (number, kind)
        assert rank() == where or f"rank {where}: {why}" in said, (number, kind)
        if kind in letters:
            action = f"{stage}{letters[kind]}{microbatch}"
            assert said.endswith(f"In {action} on pipeline rank {places[stage]}."), (number, kind)
        assert [one.step(-1 - number) for one in (training, twin)] == ["", ""]
        # A split backward may go another way behind a failed one, whose error holds its graph:
        # through autograd's node, not by addmm_, and on some processors that rounds otherwise.
        limit = rounding(2 * ROWS * (2 * number + 2))  # of both replicas
        assert equal(training, twin, limit if is_split else 0.0), (number, kind)
    training.sync.check_replicas()
    training.close()
    twin.close()


class Interrupting(sync_points.Backend):
    """Raises KeyboardInterrupt in the main thread, right behind a wait, a send or a receive."""

    def __init__(self, what: str, number: int) -> None:
        self._what = what
        self._number = number

    def _count(self, what: str) -> None:
        if what == self._what and threading.current_thread() is threading.main_thread():
            self._number -= 1
            if self._number < 0:
                self._what = ""
                raise KeyboardInterrupt

    def wait_work(self, work: Work) -> None:
        super().wait_work(work)
        self._count("wait")

    def send(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, tag: int) -> Work:
        work = super().send(group, tensor, peer, tag)
        self._count("send")
        return work

    def receive(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, tag: int) -> Work:
        work = super().receive(group, tensor, peer, tag)
        self._count("receive")
        return work


def interrupted(training: Training, seed: int, what: str, number: int) -> str:
    with sync_points.using(Interrupting(what, number)):
        return training.step(seed)


# A rank may meet the connection that was cut before it reads that nobody can go on.
REFUSALS = "ReduceError: ", "StepError: ", "StallError: "


@pytest.mark.ranks(4, ends_world=True)  # a StallError ends the job of these ranks
@pytest.mark.parametrize("what", ["send", "receive", "wait"])
def test_an_interrupt_is_final(what: str) -> None:
    """Ctrl-C behind the start of a transfer, before it is noted, or behind its end."""
    with closing(Training()) as training:
        training.step(0)
        if rank() == 1:
            assert interrupted(training, 1, what, 1).startswith("KeyboardInterrupt")
        else:
            assert "rank 1: KeyboardInterrupt" in training.step(1)
        for seed in (2, 3):
            assert training.step(seed).startswith(REFUSALS)


@pytest.mark.ranks(4, ends_world=True)
@pytest.mark.parametrize("kind", ["F", "B"])
@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError()], ids=repr)
def test_an_exit_in_a_stage_is_final(kind: str, error: BaseException) -> None:
    with closing(Training()) as training:
        training.step(0)
        said = training.failing(1, 1 if rank() == 3 else -1, kind, 1, error)
        why = type(error).__name__
        assert said.startswith(why) if rank() == 3 else f"rank 3: {why}" in said
        assert training.step(2).startswith(REFUSALS)


@pytest.mark.ranks(4, ends_world=True)
@pytest.mark.parametrize("number", [0, 3, 6])  # in the first step, and later
def test_behind_an_interrupt_of_all_ranks_another_scheduler_goes_on(number: int) -> None:
    """gloo waits for ever with a message that has come: Ctrl-C on all ranks never ended."""
    with closing(Training()) as training:
        if number:
            training.step(0)
        # A connection may be cut before the wait of this rank ends.
        assert "KeyboardInterrupt" in interrupted(training, 1, "wait", number)
        assert training.step(2).startswith(REFUSALS)
    with closing(Training()) as training, closing(Training()) as twin:
        assert [one.step(0) for one in (training, twin)] == ["", ""]
        assert equal(training, twin)


@pytest.mark.ranks(1)
def test_an_interrupt_in_a_job_of_one_rank_leaves_the_scheduler() -> None:
    part = Part(0, is_end=True)
    scheduler = Scheduler(
        [Stage(part, 0)],
        Topology.create(pipeline=1),
        schedule="gpipe",
        num_microbatches=MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
    )
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    with closing(scheduler):
        loss = scheduler.step(x, target=x).loss
        for kind in ("F", "B"):
            scheduler.sync.drop_gradients()
            part.calls.clear()
            part.trick = kind, 1, KeyboardInterrupt()
            with pytest.raises(KeyboardInterrupt):
                scheduler.step(x, target=x)
            part.trick = None
            assert scheduler.step(x, target=x).loss == loss


@pytest.mark.ranks(4, ends_world=True)
def test_an_interrupt_before_the_loss_is_sent_is_final() -> None:
    """This rank sent no loss, and the sums of all later steps had that of a step before."""
    with closing(Training()) as training:
        training.step(0)
        interrupt = mock.patch.object(Losses, "send", side_effect=KeyboardInterrupt)
        with interrupt if rank() == 1 else nullcontext():
            x, y = training.batch(1)
            with pytest.raises(KeyboardInterrupt) if rank() == 1 else nullcontext():
                training.scheduler.step(x, target=y)
        training.sync.drop_gradients()
        assert training.step(2).startswith(REFUSALS)


@pytest.mark.ranks(4, ends_world=True)
def test_an_interrupt_while_the_transfers_of_a_failed_step_end_is_final() -> None:
    with closing(Training()) as training:
        training.step(0)
        with sync_points.using(Interrupting("wait", 0) if rank() == 1 else sync_points.in_use):
            said = training.failing(1, 0 if rank() == 1 else -1, "F", 1, ValueError("wrong"))
        assert said.startswith("KeyboardInterrupt" if rank() == 1 else "StepError: ")
        assert training.step(2).startswith(REFUSALS)


def test_replicas_have_batches_of_their_own_size() -> None:
    """Issue 16, point 10 (runtime, 1): SIGABRT, and outputs of memory that nobody had written."""

    at = Topology.create(pipeline=2)
    scheduler = Scheduler(
        [Stage(scales.Scale(0), at.coordinate("pp"))],
        at,
        schedule="gpipe",
        num_microbatches=2,
        loss_fn=lambda out, y: (out * y).mean(),
        tied=(),
        handlers=["data-parallel"],
        allow_unsynced=["*"],
    )
    x = torch.full((8 if at.coordinate("dp") else 4, 2), 3.0)
    assert float(scheduler.step(x, target=x).loss) == 9.0
    outputs = [o.shape for o in scheduler.evaluate(x).outputs]
    assert outputs == ([x.shape] if at.coordinate("pp") else [])
    scheduler.close()


@pytest.mark.parametrize("how", ["owner", "sharded"])
def test_a_step_behind_a_read_of_parameters_is_refused_and_training_goes_on(how: str) -> None:
    """On all ranks: publish() was refused then, on the owner alone."""
    with closing(Training(how)) as twin:
        for number in range(1, 3):
            twin.step(number)
        for name in ("evaluate", "check_replicas", "wait_parameters"):
            with closing(Training(how)) as training:
                read = getattr(training if name == "evaluate" else training.sync, name)
                with pytest.raises(StepError, match="and the evaluation"):
                    training.step(0, read)
                training.optimizer.zero_grad()
                assert [training.step(number) for number in range(1, 3)] == ["", ""], name
                assert equal(training, twin), name
