"""A rank that stays away ends the job on all ranks, with one report. tests/faults has real runs."""

from __future__ import annotations

import gc
import io
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
from pipegrad.comm.watch.watch import Watch, watch
from pipegrad.errors import AgreementError, StallError, StepError
from pipegrad.testing import run_ranks

LIMIT = 2.0  # seconds for a step
SLOW = 1.0


class Sleeper(nn.Module):
    """A stage that sleeps in one forward."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.linear = nn.Linear(4, 4)
        self.sleeps: dict[int, float] = {}  # by number of the forward
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        time.sleep(self.sleeps.get(self.number, 0.0))
        return self.linear(x)  # type: ignore[no-any-return]


def scheduler(rank: int, **options: Any) -> tuple[Scheduler, Sleeper]:
    module = Sleeper(rank)
    made = Scheduler(
        [Stage(module, rank)],
        Topology.create(pipeline=dist.get_world_size()),
        schedule="1f1b",
        num_microbatches=2,
        loss_fn=lambda output, target: (output - target).square().mean(),
        step_timeout_seconds=LIMIT,
        **options,
    )
    return made, module


def step(made: Scheduler) -> float:
    return made.step(torch.ones(4, 4), target=torch.zeros(4, 4)).loss.item()


def stalled() -> dict[str, Any]:
    """Rank 1 of three is slow in step 2, and does not come back in time in step 3."""
    rank = dist.get_rank()
    made, module = scheduler(rank)
    if rank == 1:
        module.sleeps = {4: SLOW, 5: 3 * LIMIT}
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


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return run_ranks(stalled, 3, timeout_seconds=60)


def test_a_slow_rank_that_comes_back_in_time_ends_nothing(three: list[dict[str, Any]]) -> None:
    assert len({tuple(found["losses"]) for found in three}) == 1


def test_a_rank_that_stays_away_is_named_on_all_ranks(three: list[dict[str, Any]]) -> None:
    causes = {found["error"] for found in three}
    assert len(causes) == 1
    (cause,) = causes
    assert cause.startswith("rank 1 was in scheduler.step() 3, compute 1F0, for ")
    assert "(test_watch.py:" in cause
    assert "in forward); other ranks wait for it." in cause


def test_the_report_is_shown_once_with_waits_and_grid(three: list[dict[str, Any]]) -> None:
    (text,) = [found["shown"] for found in three if found["shown"]]
    lines = text.splitlines()
    assert lines[0] == three[0]["error"]
    assert [line.split("(")[0] for line in lines[1:4]] == ["  rank 1 ", "  rank 0 ", "  rank 2 "]
    assert "wait-receive gradient of x of 0F0 from rank 1" in lines[2]
    assert "wait-receive x of 1F0 from rank 1" in lines[3]
    assert [line.split()[2:] for line in lines[5:]] == [
        ["0F0", ">0F1<", "0B0", "0B1"],
        [">1F0<", "1F1", "1B0", "1B1"],
        ["2F0", "2B0", "2F1", "2B1"],
    ]


def test_it_ends_in_time_and_no_step_goes_on_after_it(three: list[dict[str, Any]]) -> None:
    assert [found for found in three if "went on" in found] == []
    # The time until the limit, some polls, and the sleep of rank 1, which nothing can end.
    assert min(found["seconds"] for found in three) >= LIMIT / 2
    assert three[0]["seconds"] < 3 * LIMIT + 5


def unheard() -> str:
    """Rank 1 of two stays away, and nobody can read the report."""
    rank = dist.get_rank()
    made, module = scheduler(rank)
    if rank == 1:
        module.sleeps = {3: 3 * LIMIT}
    step(made)

    def broken(_: str) -> None:
        raise BrokenPipeError

    watched = watch()
    assert watched is not None
    watched.show = broken
    try:
        step(made)
    except StallError as error:
        return str(error)
    return ""


def test_the_job_ends_also_if_nobody_can_read_the_report() -> None:
    for cause in run_ranks(unheard, 2, timeout_seconds=50):
        assert cause.startswith("rank 1 was in scheduler.step() 2, compute 1F0")


def in_a_thread() -> dict[str, Any]:
    """The loop runs in a thread; and a Scheduler that has failed goes away with its threads."""
    rank, found = dist.get_rank(), dict[str, Any]()

    def loop() -> None:
        made, module = scheduler(rank)
        step(made)
        with suppress(StepError):
            made.step(torch.ones(1, 4), target=torch.zeros(1, 4))  # one row, two microbatches
        weak = weakref.ref(made)
        del made
        gc.collect()
        found["gone"] = weak() is None
        made, module = scheduler(rank)
        if rank == 1:
            module.sleeps = {3: 3 * LIMIT}
        try:
            step(made)
            step(made)
        except StallError as error:
            found["error"] = str(error)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    return found


def test_a_loop_in_a_thread_is_seen_and_a_failed_step_keeps_nothing() -> None:
    for found in run_ranks(in_a_thread, 2, timeout_seconds=50):
        assert found["gone"]
        assert found["error"].startswith("rank 1 was in scheduler.step() 2, compute 1F0")


def verb_of_one_rank() -> str:
    """Rank 0 makes an optimizer, rank 1 begins a step: each waits for the other."""
    rank = dist.get_rank()
    made, _ = scheduler(rank)
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
    with pytest.raises(RuntimeError, match="rank 0 ended without a result: exit code 3"):
        run_ranks(verb_of_one_rank, 2, timeout_seconds=50)
    assert time.monotonic() - began < 40


def tidy() -> dict[str, Any]:
    """What is noted, and what is left of it."""
    found: dict[str, Any] = {}
    own: Watch | None = watch()
    found["same"] = watch() is own
    with Activity("outer"), Activity("inner", (0, 1), details=lambda: Details("item")):
        (stack,) = [s for s in activities().values() if s and s[0].what == "outer"]
        found["stack"] = [a.what for a in stack]
    error: BaseException | None = None
    try:
        with Activity("outer"), Activity("inner", details=lambda: Details("at")):
            raise ValueError
    except ValueError as raised:
        error = RuntimeError()
        error.__cause__ = raised
    failed = failed_at(error)
    assert failed is not None
    found["failed"] = failed.doing, failed.details.item
    found["unknown"] = failed_at(OSError())
    with Activity("suspended") as suspended:
        began = suspended.since
        give_back(5.0, before=time.monotonic())
        give_back(7.0, before=began - 1)
        found["suspended"] = round(suspended.since - began, 3)
    found["left"] = [s for s in activities().values() if s]
    assert own is not None
    shown = io.StringIO()
    with redirect_stderr(shown):
        own.leave()
    found["threads"] = [t.name for t in threading.enumerate() if "pipegrad watch" in t.name]
    found["shown"] = shown.getvalue()
    return found


def test_activities_are_gone_when_they_have_ended_and_threads_when_a_rank_leaves() -> None:
    for found in run_ranks(tidy, 2, timeout_seconds=30):
        assert found == {
            "same": True,
            "stack": ["outer", "inner"],
            "failed": (("outer", "inner"), "at"),
            "unknown": None,
            "suspended": 5.0,
            "left": [],
            "threads": [],
            "shown": "",
        }


def test_one_rank_alone_has_no_watch() -> None:
    assert watch() is None
