"""Steps of a pipeline with replicas that fail: one cause on all ranks, and then exact training."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology, Work
from pipegrad.comm import sync_points
from tests.support.gradients.cases import Case, Replies, on, outcome, rank, replies
from tests.support.rounding import ADAM_EPS, rounding

FOUR: list[Case] = []
four = replies(4, FOUR)

WIDTH, ROWS, MICROBATCHES = 4, 8, 4
TIE = [{0: "tied.weight", 1: "tied.weight"}]
HANDLERS: dict[str, list[Any]] = {
    "replicate": ["pipeline-shared", "data-parallel"],
    "owner": [{"name": "pipeline-shared", "placement": "owner"}, "data-parallel"],
    "sharded": ["pipeline-shared", "sharded"],
}
SECONDS = 60.0  # far more than any step takes, and far less than a time-out


class Part(nn.Module):
    """A stage with a tied weight and one of its own, that raises where it is told to."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        torch.manual_seed(stage + 1)
        self.own = nn.Linear(WIDTH, WIDTH)
        self.trick: tuple[str, int, BaseException] | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.own(self.tied(x).tanh())
        microbatch, self.calls = self.calls % MICROBATCHES, self.calls + 1
        if self.trick is not None and self.trick[1] == microbatch:
            kind, _, error = self.trick
            if kind == "F":
                raise error
            out.register_hook(lambda _: fail(error))
        return out


def fail(error: BaseException) -> None:
    raise error


class Training:
    """Two stages, two replicas; steps that are taken, and those that fail, without zero_grad."""

    def __init__(self, how: str, **options: Any) -> None:
        self.at = Topology.create(pipeline=2)
        self.stage, self.replica = self.at.coordinate("pp"), self.at.coordinate("dp")
        self.module = Part(self.stage)
        self.loss_error: BaseException | None = None
        self.scheduler = Scheduler(
            [Stage(self.module, self.stage)],
            self.at,
            num_microbatches=MICROBATCHES,
            loss_fn=self.loss,
            tied=TIE,
            handlers=HANDLERS[how],
            **{"schedule": "1f1b", **options},
        )
        self.sync = self.scheduler.sync
        self.optimizer = torch.optim.AdamW(self.sync.optimizer_parameters(), lr=0.1, eps=ADAM_EPS)

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        if self.loss_error is not None:
            raise self.loss_error
        return (out - target).square().mean()

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(2 * seed + self.replica)
        x, y = torch.randn(2, ROWS, WIDTH).unbind()
        return x, y

    def step(self, seed: int, between: Callable[[], object] = str) -> str:
        """Takes a step; returns what it raised, if it did. Gradients are zeroed behind it only."""
        self.module.calls = 0
        x, y = self.batch(seed)
        try:
            float(self.scheduler.step(x, target=y).loss)
        except BaseException as error:  # noqa: BLE001 - whatever it is
            return f"{type(error).__name__}: {error}"
        between()
        self.optimizer.step()
        self.sync.publish()
        self.optimizer.zero_grad()
        return ""

    def failing(self, seed: int, where: int, kind: str, microbatch: int, error: Any) -> str:
        if rank() == where:
            if kind == "loss":
                self.loss_error = error
            self.module.trick = kind, microbatch, error
        said = self.step(seed)
        self.module.trick = self.loss_error = None
        return said

    def evaluate(self) -> None:
        x, y = self.batch(9)
        float(self.scheduler.evaluate(x, target=y).loss)

    def values(self) -> list[Tensor]:
        self.sync.wait_parameters()
        return [p.detach().clone() for p in self.module.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def near(one: list[Tensor], other: list[Tensor], num_steps: int) -> bool:
    limit = rounding(2 * ROWS * num_steps)  # of both replicas
    return all(
        (a - b).abs().max() <= limit * b.abs().max() for a, b in zip(one, other, strict=True)
    )


# Random failures.


def random_failures(seed: int, num: int) -> list[tuple[str, int, str, bool, float]]:
    """Fails in random places, among good steps, and compares with a training that never fails.

    Returns:
        For each failure: the cause, its rank, what this rank said, whether parameters are right
        after the next good step, and how long it took.
    """
    choose = random.Random(seed)  # the same on all ranks
    found = []
    for how in HANDLERS:
        schedule = choose.choice(["1f1b", "gpipe", "zb-h1"])
        training = Training(how, schedule=schedule)
        twin = Training(how, schedule=schedule)
        for number in range(num // len(HANDLERS)):
            if number or choose.random() < 0.5:  # else it fails in the first step
                for one in (training, twin):
                    one.step(number)
            for _ in range(choose.choice([1, 1, 2])):
                where = choose.randrange(4)
                last = training.at.num_stages - 1 == where // 2
                kind = choose.choice(["F", "B", *(["loss"] if last else [])])
                why = f"{how} {number} {kind} on {where}"
                began = time.monotonic()
                said = training.failing(
                    number, where, kind, choose.randrange(MICROBATCHES), OSError(why)
                )
                found.append((why, where, said, True, time.monotonic() - began))
            for one in (training, twin):
                assert one.step(-1 - number) == ""
            values = training.values(), twin.values()
            # A split backward may go another way behind a failed one, whose error holds its graph:
            # through autograd's node, not by addmm_, and on some processors that rounds otherwise.
            splits = schedule == "zb-h1"
            if not (near(*values, 2 * number + 2) if splits else equal(*values)):
                found[-1] = (*found[-1][:3], False, found[-1][4])
        training.sync.check_replicas()
        for one in (training, twin):
            one.scheduler.close()
    return found


@on(FOUR)
def fuzz() -> Any:
    return random_failures(16, 18)


def test_random_failures_are_one_error_on_all_ranks_and_training_goes_on(four: Replies) -> None:
    """Issue 16, point 10: they ended in time-outs, or never, in a quarter of random failures.

    A retry without zero_grad added to what the failed step had left (runtime, 4).
    """
    assert_told([reply["fuzz"] for reply in four])


def assert_told(answers: list[list[tuple[str, int, str, bool, float]]]) -> None:
    for here, found in enumerate(answers):
        for why, where, said, is_right, seconds in found:
            assert why in said, (here, why, said)
            if here == where:
                assert said == f"OSError: {why}"
            else:
                assert f"rank {where}: OSError: {why}" in said, (here, why, said)
                assert said.startswith("StepError: ")
            assert is_right, (here, why)
            assert seconds < SECONDS, (here, why)


# What no `except Exception` catches.


@on(FOUR)
def interrupts() -> Any:
    training, twin = Training("replicate"), Training("replicate")
    found = {}
    for number, error in enumerate((KeyboardInterrupt(), SystemExit(0), asyncio.CancelledError())):
        for kind in ("F", "B", "loss"):
            said = training.failing(number, 2 if kind == "loss" else 1, kind, 2, error)
            right = [one.step(number) for one in (training, twin)] == ["", ""]
            same = equal(training.values(), twin.values())
            found[type(error).__name__, kind] = said, right and same
    for one in (training, twin):
        one.scheduler.close()
    return found


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit", "CancelledError"])
@pytest.mark.parametrize("kind", ["F", "B", "loss"])
def test_an_interrupt_is_told_and_raised_as_it_is(kind: str, error: str, four: Replies) -> None:
    """Issue 16, point 9 (runtime, 9): nobody was told, and the other ranks waited."""
    for here, reply in enumerate(four):
        said, is_right = reply["interrupts"][error, kind]
        where = 2 if kind == "loss" else 1
        if here == where:
            assert said.startswith(error)
        else:
            assert f"rank {where}: {error}" in said
        assert is_right


class Interrupting(sync_points.Backend):
    """Raises KeyboardInterrupt in the main thread, right behind a wait, a send or a receive."""

    def __init__(self, what: str, number: int, *, times: int = 1) -> None:
        self._what = what
        self._number = number
        self._times = times

    def _count(self, what: str) -> None:
        if what == self._what and threading.current_thread() is threading.main_thread():
            self._number -= 1
            if self._number < 0:
                self._times -= 1
                self._what = self._what if self._times else ""
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


def interrupted(training: Training, seed: int, what: str, number: int, *, times: int = 1) -> str:
    with sync_points.using(Interrupting(what, number, times=times)):
        return training.step(seed)


@on(FOUR)
def between_lines() -> Any:
    """Ctrl-C behind a transfer's end, on one rank and on all, in the first step and later."""
    training, twin = Training("replicate"), Training("replicate")
    found = []
    for seed, number in enumerate((0, 3, 6)):
        for where in ([1], [0, 1, 2, 3]):
            if rank() in where:
                said = interrupted(training, seed, "wait", number)
            else:
                said = training.step(seed)
            right = [one.step(seed) for one in (training, twin)] == ["", ""]
            found.append((where, said, right and equal(training.values(), twin.values())))
    for one in (training, twin):
        one.scheduler.close()
    return found


def test_an_interrupt_behind_a_transfer_is_no_hang(four: Replies) -> None:
    """gloo waits for ever with a message that has come: Ctrl-C on all ranks never ended."""
    for here, reply in enumerate(four):
        for where, said, is_right in reply["between_lines"]:
            if here in where:
                assert said.startswith("KeyboardInterrupt")
            else:
                assert "rank 1: KeyboardInterrupt" in said
            assert is_right


@on(FOUR)
def in_doubt() -> Any:
    """Ctrl-C behind the start of a transfer, before it is noted."""
    found = []
    # The third: a second Ctrl-C, while the transfers of the failed step end.
    for what, times in (("send", 1), ("receive", 1), ("wait", 2)):
        training = Training("replicate")
        training.step(0)
        began = time.monotonic()
        here = rank() == 1
        said = [interrupted(training, 1, what, 1, times=times) if here else training.step(1)]
        said += [training.step(2), training.step(3)]
        found.append((said, time.monotonic() - began))
        training.scheduler.close()
    return found


def test_what_nobody_can_know_is_final(four: Replies) -> None:
    for here, reply in enumerate(four):
        for said, seconds in reply["in_doubt"]:
            if here == 1:
                assert said[0].startswith("KeyboardInterrupt")
            else:
                assert "rank 1: KeyboardInterrupt" in said[0]
            assert all(later.startswith(("ReduceError: ", "StepError: ")) for later in said[1:]), (
                said
            )
            assert seconds < SECONDS


# Replicas whose batches differ, in the first step.


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@on(FOUR)
def rows() -> Any:
    at = Topology.create(pipeline=2)
    scheduler = Scheduler(
        [Stage(Wide(), at.coordinate("pp"))],
        at,
        schedule="gpipe",
        num_microbatches=2,
        loss_fn=lambda out, y: (out * y).mean(),
        tied=(),
        handlers=["data-parallel"],
        allow_unsynced=["*"],
    )
    x = torch.full((8 if at.coordinate("dp") else 4, 2), 3.0)
    losses = [float(scheduler.step(x, target=x).loss)]
    outputs = [tuple(o.shape) for o in scheduler.evaluate(x).outputs]
    scheduler.close()
    return losses, outputs, at.coordinate("pp"), at.coordinate("dp")


def test_replicas_may_have_batches_of_their_own_size(four: Replies) -> None:
    """Issue 16, point 10 (runtime, 1): SIGABRT, and outputs of memory that nobody had written."""
    for reply in four:
        losses, outputs, stage, replica = reply["rows"]
        assert losses == [9.0]
        assert outputs == ([(8 if replica else 4, 2)] if stage else [])


# Readers between the step and the optimizer's.


@on(FOUR)
def readers() -> Any:
    found = {}
    for how in ("owner", "sharded"):
        twin = Training(how)
        for number in range(3):
            twin.step(number)
        for name in ("evaluate", "check_replicas", "wait_parameters"):
            training = Training(how)
            read: Callable[[], object] = {
                "evaluate": training.evaluate,
                "check_replicas": training.sync.check_replicas,
                "wait_parameters": training.sync.wait_parameters,
            }[name]
            said = [training.step(number, read) for number in range(3)]
            found[how, name] = said, equal(training.values(), twin.values())
            training.scheduler.close()
        twin.scheduler.close()
    return found


@pytest.mark.parametrize("name", ["evaluate", "check_replicas", "wait_parameters"])
@pytest.mark.parametrize("how", ["owner", "sharded"])
def test_parameters_may_be_read_before_the_optimizer_steps(
    how: str, name: str, four: Replies
) -> None:
    """Issue 16, point 10 (2.3; runtime, 2): publish() was refused then, on the owner alone."""
    for reply in four:
        assert reply["readers"][how, name] == (["", "", ""], True)


# Verbs that one rank alone is refused.


@on(FOUR)
def alone() -> Any:
    """Rank 0 alone waits before it saves; then all ranks load, and make replicas equal."""
    training = Training("sharded")
    training.step(0)
    if rank() == 0:
        training.sync.wait_parameters()
    said = outcome(training.sync.synchronize_parameters)
    training.sync.wait_parameters()
    training.scheduler.close()
    return said


def test_what_one_rank_is_refused_all_are(four: Replies) -> None:
    """Issue 16, point 10 (2.3): the others waited in a broadcast."""
    for reply in four:
        assert reply["alone"].startswith("AgreementError: rank 1: StepError: ")
        assert "(synchronize_parameters: 3 of 4 ranks failed" in reply["alone"]
        assert "call wait_parameters() before" in reply["alone"]
