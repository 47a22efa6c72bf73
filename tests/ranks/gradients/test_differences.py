"""Ranks that differ, in any way: an error on all of them, soon; and the next meeting succeeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public

from pipegrad import GradientSync, Scheduler, Stage, Topology
from pipegrad.comm.agreement import agree, store
from pipegrad.errors import PipegradError
from pipegrad.testing import run_ranks

AGREE_SECONDS = 0.5
GROUP_SECONDS = 4.0
EXAMPLES = 60
MOST_SECONDS = 20.0  # of an example, on a busy machine


class Setup(NamedTuple):
    """What a rank gives to its GradientSync. Ranks are replicas, so all must give the same."""

    width: int = 2
    layers: int = 1
    has_bias: bool = True
    is_frozen: bool = False
    dtype: torch.dtype = torch.float32
    tied: bool = False
    handlers: tuple[str, ...] = ("data-parallel",)
    bucket_bytes: int = 2**20
    comm_streams: int = 1


SETUPS = st.builds(
    Setup,
    width=st.sampled_from([2, 3]),
    layers=st.sampled_from([1, 2]),
    has_bias=st.booleans(),
    is_frozen=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    tied=st.booleans(),
    handlers=st.sampled_from([("data-parallel",), ("sharded",), ("noop",), ("absent",)]),
    bucket_bytes=st.sampled_from([0, 2**20]),
    comm_streams=st.sampled_from([1, 2]),
)
# What a rank does: agreements, constructions, and what goes wrong on one rank alone.
VERBS = st.sampled_from(["one", "two", "sync", "optimizer", "raise", "late"])
SCRIPTS = st.lists(VERBS, max_size=4).map(tuple)
Script = tuple[str, ...]
Example = Sequence[Setup] | Sequence[Script]


def differing(base: st.SearchStrategy[Any], num_ranks: int) -> st.SearchStrategy[Any]:
    """Returns what each rank has; all ranks but one have the same, or each has its own."""
    one = st.builds(
        lambda common, own, rank: [own if r == rank else common for r in range(num_ranks)],
        base,
        base,
        st.integers(0, num_ranks - 1),
    )
    return st.one_of(one, st.lists(base, min_size=num_ranks, max_size=num_ranks))


def drawn(base: st.SearchStrategy[Any], num_ranks: int) -> list[Any]:
    """Returns examples, the same ones in each run of the test."""
    found: list[Any] = []

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(differing(base, num_ranks))
    def draw(example: Any) -> None:
        found.append(example)

    draw()
    return found


def sync_of(setup: Setup, topology: Topology) -> GradientSync:
    torch.manual_seed(0)
    layers = [nn.Linear(setup.width, setup.width, bias=setup.has_bias) for _ in range(setup.layers)]
    module = nn.Sequential(*layers).to(setup.dtype)
    if setup.tied:
        module.append(layers[0])
    module[0].weight.requires_grad_(not setup.is_frozen)
    return GradientSync(
        {0: module},
        topology,
        handlers=list(setup.handlers),
        bucket_bytes=setup.bucket_bytes,
        comm_streams=setup.comm_streams,
        agree_seconds=AGREE_SECONDS,
    )


def outcome(function: Callable[[], object]) -> tuple[str, float]:
    """Returns the message of an error, or "", and how long it took."""
    begin = time.monotonic()
    try:
        function()
    except PipegradError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "", time.monotonic() - begin


def constructed(setup: Setup, topology: Topology) -> None:
    sync_of(setup, topology).close()


def played(script: Script, topology: Topology) -> None:
    """Calls one verb after the other; all ranks end with the same one."""
    meet = partial(agree, timeout_seconds=AGREE_SECONDS)
    sync = sync_of(Setup(), topology)
    verbs: dict[str, Callable[[], object]] = {
        "one": lambda: meet("one", int),
        "two": lambda: meet("two", int),
        "sync": lambda: sync_of(Setup(), topology).close(),
        "optimizer": lambda: sync.optimizer(torch.optim.SGD, lr=0.1),
        "raise": lambda: meet("one", lambda: 1 // 0),
        "late": lambda: time.sleep(2 * AGREE_SECONDS),
    }
    try:
        for verb in script:
            verbs[verb]()
        meet("the end", int)
    except ZeroDivisionError as error:  # all ranks raised it
        raise PipegradError(str(error)) from error
    finally:
        sync.close()


def with_short_timeout() -> None:
    """Makes the default process group anew, with a short timeout."""
    rank, size, own = dist.get_rank(), dist.get_world_size(), store()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=PrefixStore("short", own),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=GROUP_SECONDS),
    )


def run(examples: Sequence[Example], play: Callable[[Any, Topology], None]) -> list[Any]:
    """Returns for each example what this rank said; then all ranks have met again."""
    with_short_timeout()
    topology = Topology.create(pipeline=1)
    said = []
    for number, example in enumerate(examples):
        said.append(outcome(partial(play, example[dist.get_rank()], topology)))
        # Ranks give up at different times, so they are given time here.
        meeting = f"between {number}"
        assert len(agree(meeting, int, timeout_seconds=60, meeting=meeting)) == len(example)
    return said


def check(examples: Sequence[Example], replies: Sequence[Sequence[tuple[str, float]]]) -> int:
    """Asserts that all ranks failed, or none; returns how many examples failed."""
    failed = 0
    for example, said in zip(examples, zip(*replies, strict=True), strict=True):
        messages, seconds = zip(*said, strict=True)
        assert all(messages) or not any(messages), (example, messages)
        assert max(seconds) < MOST_SECONDS, (example, said)
        failed += all(messages)
    return failed


def test_setups_that_differ_are_refused_on_all_ranks() -> None:
    examples = drawn(SETUPS, 2)
    replies = run_ranks(run, 2, examples, constructed, timeout_seconds=500)
    failed = check(examples, replies)
    alike = [example for example in examples if len(set(example)) == 1]
    # Alike ranks fail if no plug-in has the name of their handler. All others fail.
    absent = [example for example in alike if "absent" in example[0].handlers]
    assert failed == len(examples) - len(alike) + len(absent)
    assert 0 < failed < len(examples)


def test_verbs_in_another_order_or_number_are_refused_on_all_ranks() -> None:
    examples = drawn(SCRIPTS, 3)
    replies = run_ranks(run, 3, examples, played, timeout_seconds=500)
    assert 0 < check(examples, replies) < len(examples)


def one_makes_an_optimizer() -> tuple[str, float]:
    """Rank 0 makes its optimizer again while rank 1 begins a step."""
    with_short_timeout()
    torch.manual_seed(0)
    topology = Topology.create(pipeline=2)
    stage = dist.get_rank()
    scheduler = Scheduler(
        [Stage(nn.Linear(2, 2), stage)],
        topology,
        schedule="1f1b",
        num_microbatches=2,
        loss_fn=lambda output, target: (output - target).square().mean(),
        handlers=["pipeline-shared"],
        agree_seconds=AGREE_SECONDS,
    )
    x = torch.ones(4, 2)
    inputs = (x,) if stage == 0 else ()
    target = x if stage == 1 else None
    scheduler.step(*inputs, target=target)
    if stage == 0:
        return outcome(lambda: scheduler.optimizer(torch.optim.SGD, lr=0.1))
    begin = time.monotonic()
    try:
        scheduler.step(*inputs, target=target)
    except Exception as error:  # noqa: BLE001 - a transfer fails as its backend says
        return repr(error), time.monotonic() - begin
    return "", time.monotonic() - begin


def test_a_verb_of_one_rank_alone_ends_the_step_of_the_other_in_time() -> None:
    first, second = run_ranks(one_makes_an_optimizer, 2, timeout_seconds=200)
    assert "the optimizer: nothing heard from ranks [1]" in first[0]
    assert second[0]
    assert max(first[1], second[1]) < 10 * GROUP_SECONDS
