"""A rank that stays away ends the job on all ranks, with one report. tests/faults has real runs."""

from __future__ import annotations

import gc
import io
import pdb
import threading
import time
import weakref
from contextlib import closing, redirect_stderr, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad import Scheduler
from pipegrad.comm import activity
from pipegrad.comm.activity import Activity, Details, activities, failed_at, give_back
from pipegrad.comm.store import store
from pipegrad.comm.watch import State, Watch, watch
from pipegrad.errors import AgreementError, StallError, StepError
from tests.support.gradients.cases import rank, scheduled
from tests.support.ranked import gathered

LIMIT = 120.0  # seconds for a step; nobody waits for so long


class Sleeper(nn.Module):
    """A stage that is slow in one forward, and away in another: all time for the step is over."""

    slow = away = 0  # numbers of forwards

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(rank())
        self.linear = nn.Linear(4, 4)
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        if self.number == self.slow:
            time.sleep(1.0)  # the watch looks at it meanwhile
        if self.number == self.away:
            time.sleep(3.0)  # a rank that was at another item a second ago is slow, not stuck
            give_back(-LIMIT, before=time.monotonic())
            own_watch()._comes_to(State.REPORTED)
        return self.linear(x)  # type: ignore[no-any-return]


def own_watch() -> Watch:
    own = watch()
    assert own is not None
    return own


def scheduler(module: Sleeper, limit: float = LIMIT, **options: Any) -> Scheduler:
    ranks = dist.get_world_size()
    return scheduled(module, pipeline=ranks, step_timeout_seconds=limit, **options)


def step(made: Scheduler) -> float:
    return made.step(torch.ones(4, 4), target=torch.zeros(4, 4)).loss.item()


@pytest.mark.ranks(3, ends_world=True)
def test_a_rank_that_stays_away_ends_the_job_on_all_ranks_with_one_report() -> None:
    """Rank 1 is slow in step 2, and does not come back in step 3."""
    module, shown = Sleeper(), io.StringIO()
    made = scheduler(module)
    if rank() == 1:
        module.slow, module.away = 4, 5
    losses = [step(made), step(made)]
    assert gathered(losses) == [losses] * 3  # a slow rank ended nothing
    own_watch().show = lambda report: shown.write(f"{report.text}\n")
    began = time.monotonic()
    with pytest.raises(StallError) as caught:
        step(made)
    assert time.monotonic() - began < LIMIT / 2  # an alarm, and not the limit
    with pytest.raises(StallError):
        step(made)
    cause = str(caught.value)
    assert cause.startswith("rank 1 was in scheduler.step() 3, compute 1F0, for ")
    assert "(test_watch.py:" in cause
    assert "in forward); other ranks wait for it." in cause
    board = store()  # the groups of a job that has ended are of no use
    board.set(f"shown {rank()}", shown.getvalue())
    board.raw.wait([f"shown {at}" for at in range(3)])
    (text,) = filter(None, (board.text(f"shown {at}") for at in range(3)))
    lines = text.splitlines()
    assert lines[0] == cause
    assert [line.split("(")[0] for line in lines[1:4]] == ["  rank 1 ", "  rank 0 ", "  rank 2 "]
    assert "wait-receive gradient of x of 0F0 from rank 1" in lines[2]
    assert "wait-receive x of 1F0 from rank 1" in lines[3]
    assert [line.split()[2:] for line in lines[5:]] == [
        ["0F0", ">0F1<", "0B0", "0B1"],
        [">1F0<", "1F1", "1B0", "1B1"],
        ["2F0", "2B0", "2F1", "2B1"],
    ]


@pytest.mark.ranks(2, ends_world=True)
def test_the_job_ends_also_if_nobody_can_read_the_report() -> None:
    module = Sleeper()
    made = scheduler(module)
    module.away = 3 * rank()
    step(made)

    def broken(_: object) -> None:
        raise BrokenPipeError

    own_watch().show = broken
    with pytest.raises(StallError, match=r"^rank 1 was in scheduler\.step\(\) 2, compute 1F0"):
        step(made)


@pytest.mark.ranks(2, ends_world=True)
def test_the_job_ends_also_if_the_loop_is_in_a_thread() -> None:
    """And a Scheduler that has failed goes away with its threads."""
    found = list[object]()

    def loop() -> None:
        made = scheduler(Sleeper())
        step(made)
        with suppress(StepError):
            made.step(torch.ones(1, 4), target=torch.zeros(1, 4))  # one row, two microbatches
        weak = weakref.ref(made)
        del made
        gc.collect()
        found.append(weak())
        module = Sleeper()
        made = scheduler(module)
        module.away = 3 * rank()
        step(made)
        try:
            step(made)
        except StallError as error:
            found.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    left, ended = found
    assert left is None
    assert str(ended).startswith("rank 1 was in scheduler.step() 2, compute 1F0")


@pytest.mark.ranks(2, ends_world=True)
def test_a_verb_that_one_rank_alone_calls_is_named_within_the_limit() -> None:
    """It took minutes: the agreement's time, and on the other rank that of the process group."""
    made, began = scheduler(Sleeper(), limit=2.0), time.monotonic()
    verbs = partial(made.optimizer, torch.optim.SGD, lr=0.1), partial(step, made)
    words = "different points of the program: {0: 'the optimizer', 1: 'the batch of step 1'}"
    with pytest.raises((AgreementError, StallError), match=words):
        verbs[rank()]()
    assert time.monotonic() - began < 30


@pytest.mark.ranks(2)
def test_activities_are_gone_when_they_have_ended_and_threads_when_a_rank_leaves() -> None:
    own = own_watch()
    assert watch() is own
    with Activity("outer"), Activity("inner", (0, 1), details=lambda: Details("item")):
        (stack,) = [s for s in activities().values() if s and s[0].what == "outer"]
        assert [a.what for a in stack] == ["outer", "inner"]
    error = RuntimeError()
    try:
        with Activity("outer"), Activity("inner", details=lambda: Details("at")):
            raise ValueError
    except ValueError as raised:
        error.__cause__ = raised
    failed = failed_at(error)
    assert failed is not None
    assert (failed.doing, failed.item) == (("outer", "inner"), "at")
    assert failed_at(OSError()) is None
    with Activity("suspended") as suspended:
        began = suspended.since
        give_back(5.0, before=time.monotonic())
        give_back(7.0, before=began - 1)
        assert round(suspended.since - began, 3) == 5.0
    assert [s for s in activities().values() if s] == []
    with redirect_stderr(io.StringIO()) as shown:
        own.leave()
    assert [t.name for t in threading.enumerate() if "pipegrad watch" in t.name] == []
    assert shown.getvalue() == ""


def test_one_rank_alone_has_no_watch() -> None:
    assert watch() is None


# Debuggers.


class Prompt(io.StringIO):
    """What someone types, who thinks for some seconds before each line."""

    def readline(self, *_: Any) -> str:  # type: ignore[override]
        time.sleep(3.0)
        return "continue\n"


def look(by_debugger: bool) -> None:
    """Takes three seconds, in a debugger or not."""
    prompt = Prompt()
    if by_debugger:
        pdb.Pdb(stdin=prompt, stdout=io.StringIO()).set_trace()
    else:
        prompt.readline()


class Examined(Sleeper):
    """A stage in whose second step someone looks at one rank: in its forward, or in the loss."""

    def __init__(self, place: str, *, by_debugger: bool) -> None:
        super().__init__()
        self.place, self.by_debugger = place if rank() == 1 else "", by_debugger

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        if self.number == 4 and self.place == "forward":
            look(self.by_debugger)
        return self.linear(x)  # type: ignore[no-any-return]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.number == 4 and self.place == "loss":
            look(self.by_debugger)
        return nn.functional.mse_loss(output, target)


@pytest.mark.ranks(2, ends_world=True)  # its store keeps the last sign of a debugger
@pytest.mark.parametrize("place", ["forward", "loss", "between"])
def test_time_in_a_debugger_does_not_count(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_STILL_SECONDS", 0.5)
    module = Examined(place, by_debugger=True)
    with closing(scheduler(module, limit=2.0, loss_fn=module.loss)) as made:
        step(made)
        if module.place == "between":
            look(by_debugger=True)
        for _ in range(2):
            step(made)


@pytest.mark.ranks(2, ends_world=True)
def test_time_out_of_a_debugger_counts() -> None:
    made = scheduler(Examined("forward", by_debugger=False), limit=2.0)
    step(made)
    with pytest.raises(StallError, match=r"^rank 1 was in scheduler\.step\(\) 2"):
        step(made)


# The process is its user's.


@pytest.mark.ranks(2, ends_world=True)
def test_a_rank_in_code_of_its_user_is_left_alone_until_its_next_verb() -> None:
    """A checkpoint that rank 1 wrote was cut off in the middle, when the other rank was late."""
    made = scheduler(Sleeper(), limit=2.0)
    step(made)
    if rank() == 1:
        assert own_watch()._comes_to(State.REPORTED, 60.0)
        time.sleep(6.0)  # what has been written so far stands
    with pytest.raises(StallError, match=r"^rank 1 "):
        step(made)
