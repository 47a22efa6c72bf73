"""A rank that stays away ends the job on all ranks, with one report. tests/faults has real runs."""

from __future__ import annotations

import gc
import io
import pdb
import threading
import time
import weakref
from contextlib import redirect_stderr, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology
from pipegrad.comm.activity import Activity, Details, activities, failed_at, give_back
from pipegrad.comm.watch import State, watch
from pipegrad.errors import AgreementError, StallError, StepError
from pipegrad.testing import run_ranks

LIMIT = 120.0  # seconds for a step; nobody waits for so long


class Sleeper(nn.Module):
    """A stage that is slow in one forward, and away in another: all time for the step is over."""

    slow = away = 0  # numbers of forwards

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.linear = nn.Linear(4, 4)
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        if self.number == self.slow:
            time.sleep(1.0)  # the watch looks at it meanwhile
        if self.number == self.away:
            time.sleep(3.0)  # a rank that was at another item a second ago is slow, not stuck
            give_back(-LIMIT, before=time.monotonic())
            own = watch()
            assert own is not None
            own._comes_to(State.REPORTED)
        return self.linear(x)  # type: ignore[no-any-return]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def scheduler(
    rank: int, limit: float = LIMIT, module: Sleeper | None = None, loss_fn: Any = mean_square
) -> tuple[Scheduler, Sleeper]:
    module = module or Sleeper(rank)
    made = Scheduler(
        [Stage(module, rank)],
        Topology.create(pipeline=dist.get_world_size()),
        schedule="1f1b",
        num_microbatches=2,
        loss_fn=loss_fn,
        step_timeout_seconds=limit,
    )
    return made, module


def step(made: Scheduler) -> float:
    return made.step(torch.ones(4, 4), target=torch.zeros(4, 4)).loss.item()


def stalled() -> dict[str, Any]:
    """Rank 1 of three is slow in step 2, and does not come back in step 3."""
    rank = dist.get_rank()
    made, module = scheduler(rank)
    if rank == 1:
        module.slow, module.away = 4, 5
    found: dict[str, Any] = {"losses": [step(made), step(made)]}
    began, shown = time.monotonic(), io.StringIO()
    watched = watch()
    assert watched is not None
    watched.show = lambda text: shown.write(f"{text}\n")
    try:
        step(made)
    except StallError as error:
        found["error"] = str(error)
    found["seconds"], found["shown"] = time.monotonic() - began, shown.getvalue()
    with suppress(StallError):
        step(made)
        found["went on"] = True
    return found


def test_a_rank_that_stays_away_ends_the_job_on_all_ranks_with_one_report() -> None:
    three = run_ranks(stalled, 3)
    assert len({tuple(found["losses"]) for found in three}) == 1  # a slow rank ended nothing
    (cause,) = {found["error"] for found in three}
    assert cause.startswith("rank 1 was in scheduler.step() 3, compute 1F0, for ")
    assert "(test_watch.py:" in cause
    assert "in forward); other ranks wait for it." in cause
    (text,) = [found["shown"] for found in three if found["shown"]]
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
    assert [found for found in three if "went on" in found] == []
    assert max(found["seconds"] for found in three) < LIMIT / 2  # an alarm, and not the limit


def unheard() -> str:
    """Rank 1 of two stays away, and nobody can read the report."""
    rank = dist.get_rank()
    made, module = scheduler(rank)
    module.away = 3 * rank
    step(made)

    def broken(_: str) -> None:
        raise BrokenPipeError

    watched = watch()
    assert watched is not None
    watched.show = broken
    with pytest.raises(StallError) as caught:
        step(made)
    return str(caught.value)


def in_a_thread() -> str:
    """The loop runs in a thread; and a Scheduler that has failed goes away with its threads."""
    rank, found = dist.get_rank(), list[object]()

    def loop() -> None:
        made, module = scheduler(rank)
        step(made)
        with suppress(StepError):
            made.step(torch.ones(1, 4), target=torch.zeros(1, 4))  # one row, two microbatches
        weak = weakref.ref(made)
        del made
        gc.collect()
        found.append(weak())
        made, module = scheduler(rank)
        module.away = 3 * rank
        try:
            step(made)
            step(made)
        except StallError as error:
            found.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert found.pop(0) is None
    return str(*found)


@pytest.mark.parametrize("function", [unheard, in_a_thread])
def test_the_job_ends_also_if_nobody_can_read_the_report_or_the_loop_is_in_a_thread(
    function: Any,
) -> None:
    for cause in run_ranks(function, 2):
        assert cause.startswith("rank 1 was in scheduler.step() 2, compute 1F0")


def verb_of_one_rank() -> str:
    """Rank 0 makes an optimizer, rank 1 begins a step: each waits for the other."""
    rank = dist.get_rank()
    made, _ = scheduler(rank, limit=2.0)
    try:
        if rank == 0:
            made.optimizer(torch.optim.SGD, lr=0.1)
        step(made)
    except (AgreementError, StallError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_verb_that_one_rank_alone_calls_is_named_within_the_limit() -> None:
    """It took minutes: the agreement's time, and on the other rank that of the process group."""
    began = time.monotonic()
    found = run_ranks(verb_of_one_rank, 2)
    words = "rank 0 waits for rank 1: the optimizer; rank 1 waits for rank 0: the message"
    assert all(words in text for text in found)
    assert time.monotonic() - began < 30


@pytest.mark.ranks(2)
def test_activities_are_gone_when_they_have_ended_and_threads_when_a_rank_leaves() -> None:
    own = watch()
    assert own is not None
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
    assert (failed.doing, failed.details.item) == (("outer", "inner"), "at")
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

    def __init__(self, rank: int, place: str, *, by_debugger: bool) -> None:
        super().__init__(rank)
        self.place, self.by_debugger = place if rank == 1 else "", by_debugger

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        if self.number == 4 and self.place == "forward":
            look(self.by_debugger)
        return self.linear(x)  # type: ignore[no-any-return]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.number == 4 and self.place == "loss":
            look(self.by_debugger)
        return mean_square(output, target)


def examined(place: str, by_debugger: bool) -> str:
    rank = dist.get_rank()
    module = Examined(rank, place, by_debugger=by_debugger)
    made, _ = scheduler(rank, limit=2.0, module=module, loss_fn=module.loss)
    try:
        step(made)
        if module.place == "between":
            look(by_debugger)
        losses = [step(made) for _ in range(2)]
    except StallError as error:
        return str(error)
    made.close()
    return f"{len(losses)} more steps"


@pytest.mark.parametrize("place", ["forward", "loss", "between"])
def test_time_in_a_debugger_does_not_count(place: str) -> None:
    assert run_ranks(examined, 2, place, True) == ["2 more steps"] * 2


def test_time_out_of_a_debugger_counts() -> None:
    found = run_ranks(examined, 2, "forward", False)
    assert all(text.startswith("rank 1 was in scheduler.step() 2") for text in found)


# The process is its user's.


def busy() -> tuple[str, bool]:
    """Rank 1 does not come back from its own code, in the second step, before the time is over."""
    rank = dist.get_rank()
    made, _ = scheduler(rank, limit=2.0)
    step(made)
    comes_late = rank == 1
    try:
        while comes_late:
            time.sleep(0.05)
        step(made)
    except StallError as error:
        return str(error), comes_late
    return "", comes_late


def test_a_rank_that_stays_in_its_own_code_gets_the_error_there() -> None:
    found = run_ranks(busy, 2)
    assert [was_busy for _, was_busy in found] == [False, True]
    (cause,) = {cause for cause, _ in found}
    assert cause.startswith("rank 1 ")
