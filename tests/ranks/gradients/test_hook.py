"""Communication hooks: torch's own numbers, flags that no hook sees, and what was not sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from tests.support.gradients.cases import rank, stage, step
from tests.support.gradients.hooks import (
    CAST,
    ONE,
    POWER,
    POWER_SGD,
    alone,
    averaged,
    go_on,
    model,
    ours,
    same,
    torchs,
)
from tests.support.pipeline.schedulers import error
from tests.support.rounding import rounding


def on_ranks(*numbers: int) -> pytest.MarkDecorator:
    """Runs a test on each of these numbers of ranks."""
    worlds = [pytest.param(n, marks=pytest.mark.ranks(n)) for n in numbers]
    return pytest.mark.parametrize("num_ranks", worlds)


# Numbers.


def gradient(at: int) -> torch.Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(at))


@pytest.mark.parametrize("hook", CAST)
@on_ranks(2, 3, 4)
def test_a_cast_is_the_sum_of_rounded_parts(num_ranks: int, hook: str) -> None:
    module = stage(w=(40,))
    sync = averaged(module, hook)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:
        step(sync, module, w=gradient(rank()))
    found = module.get_parameter("w").grad
    assert found is not None
    # Half of the bytes travel, and flags as they are.
    flags, halves = (call.args[0] for call in sent.call_args_list)
    assert (flags.dtype, flags.nbytes, halves.dtype) == (torch.float32, 4, CAST[hook])
    assert sync.statistics().reduced_bytes == 2 * halves.nbytes + flags.nbytes
    true = torch.zeros_like(halves)  # of the same size: so gloo adds in the same order
    true[:40] = gradient(rank()).to(CAST[hook]).div_(num_ranks)
    dist.all_reduce(true)
    assert torch.equal(found, true[:40].float())
    assert true.numel() == 48 or num_ranks > 2
    sync.close()


EPSILON: dict[str, Any] = {"orthogonalization_epsilon": 1e-8}


def power_sgd(**options: Any) -> tuple[object, Any, Callable[[], object]]:
    theirs: dict[str, Any] = {**EPSILON, **POWER, **options}
    state = lambda: PowerSGDState(dist.group.WORLD, **theirs)  # noqa: E731
    return {**POWER_SGD, **options}, powerSGD_hook, state


def plain(name: str) -> tuple[object, Any, Callable[[], object]]:
    return name, getattr(default_hooks, name), lambda: dist.group.WORLD


# Each hook here and in DistributedDataParallel, its state there, and how far apart they may be.
RIVALS: dict[str, tuple[tuple[object, Any, Callable[[], object]], float]] = {
    "allreduce_hook": (plain("allreduce_hook"), 2e-6),
    "bf16_compress_hook": (plain("bf16_compress_hook"), 2**-6),
    "fp16_compress_hook": (plain("fp16_compress_hook"), 2**-9),
    "rank 2": (power_sgd(), 2e-6),
    "rank 3": (power_sgd(matrix_approximation_rank=3), 2e-6),
    "no epsilon": (power_sgd(orthogonalization_epsilon=0), 2e-6),
    "no feedback": (power_sgd(use_error_feedback=False), 2e-6),
    "cold": (power_sgd(warm_start=False, batch_tensors_with_same_shape=True), 2e-6),
    "wrapped": (
        (
            {**POWER_SGD, "wrapper": "fp16_compress_wrapper"},
            default_hooks.fp16_compress_wrapper(powerSGD_hook),
            power_sgd()[2],
        ),
        2**-8,
    ),
}


@pytest.mark.parametrize(("rivals", "most"), RIVALS.values(), ids=RIVALS)
@on_ranks(2, 3)
def test_numbers_are_those_of_distributed_data_parallel(
    num_ranks: int, rivals: tuple[object, Any, Callable[[], object]], most: float
) -> None:
    """To the bit, or to rounding: gradients lie elsewhere in its bucket, so ranks add in turns."""
    hook, rival, state = rivals
    mine, sync = ours(hook)
    sync.close()
    theirs = torchs(rival, state())
    if num_ranks == 2:
        assert same(mine, theirs) == [True] * 5
    for a, b in zip(mine, theirs, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) <= most


# Error feedback.


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 256, "comm_streams": 2}], ids=str)
@pytest.mark.parametrize("name", ["powerSGD_hook", "batched_powerSGD_hook"])
@on_ranks(2, 4)
def test_what_was_not_sent_is_owed(num_ranks: int, name: str, options: dict[str, Any]) -> None:
    """12 steps without an update: all that was delivered, and is still to be."""
    exact, sync = ours("allreduce_hook", 12, lr=0.0)
    sync.close()
    module = model()
    sync = averaged(module, {"name": name, **POWER}, **options)
    with (
        mock.patch.object(torch, "manual_seed") as seed,
        mock.patch("torch.random.fork_rng") as fork,
    ):
        before = torch.get_rng_state()
        delivered = go_on(sync, module, range(12), lr=0.0)
        assert torch.equal(before, torch.get_rng_state())
    assert seed.call_count + fork.call_count == 0  # no random numbers of the process are touched
    kept = sync.state_dict()["handlers"]["data-parallel"]["buckets"]
    owed = {
        slot.key: error[slot.offset : slot.offset + slot.numel]
        for bucket in sync.plan.buckets
        for error in kept[bucket.index, tuple(range(num_ranks))]["error_dict"].values()
        for slot in bucket.slots
    }
    assert (len(sync.plan.buckets) > 2) == bool(options)
    mine = torch.cat([owed[f"0.{key}"] for key, _ in module.named_parameters()])
    dist.all_reduce(mine)
    total, wanted = torch.stack(delivered).sum(0) + mine / num_ranks, torch.stack(exact).sum(0)
    assert float((total - wanted).abs().max() / wanted.abs().max()) < rounding(12 * 40)
    # What is compressed differs, or nothing would be owed.
    assert float((delivered[2] - exact[2]).abs().max() / exact[2].abs().max()) > 1e-2
    sync.check_replicas()
    sync.close()


# Gradients that are missing, zero, or too large.


INF = float("inf")
EAGER = {**ONE, "use_error_feedback": False, "warm_start": False, "start_powerSGD_iter": 0}
ONES, FULL = pytest.approx([1.0] * 256), pytest.approx([1.5] * 256)
square = partial(alone, shape=(16, 16))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hook", CAST)
def test_one_rank_alone_counts_as_zeros_of_the_others(hook: str) -> None:
    assert alone(hook, 4.0 if rank() == 0 else None) == [[2.0] * 3]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "hook",
    [
        "bf16_compress_hook",
        ONE,
        {**ONE, "name": "batched_powerSGD_hook"},
        EAGER,
        {**ONE, "orthogonalization_epsilon": 0},
    ],
    ids=str,
)
def test_what_nobody_has_stays_none_and_harms_no_later_step(hook: Any) -> None:
    mine = 1.0 + rank()
    found = square(hook, None, None, mine, mine, None, mine, mine)
    assert found == [None, None, FULL, FULL, None, FULL, FULL]


@pytest.mark.ranks(2)
def test_zeros_are_zeros_and_end_nothing() -> None:
    mine, zeros = 1.0 + rank(), [0.0] * 256
    found = square(ONE, 1.0, 1.0, 0.0, 0.0, mine, mine)
    assert found == [ONES, ONES, zeros, zeros, FULL, FULL]
    assert square(EAGER, 0.0, mine, mine) == [zeros, FULL, FULL]


@pytest.mark.ranks(2)
def test_what_is_too_large_for_a_cast_is_seen() -> None:
    assert alone("fp16_compress_hook", 1e6) == [[INF] * 3]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["powerSGD_hook", "batched_powerSGD_hook"])
def test_a_step_that_was_not_finite_is_seen_and_harms_no_later_one(name: str) -> None:
    """NaN stayed in the error feedback and in Q: every later step had NaN as well."""
    mine = 1.0 + rank()
    found = square({**ONE, "name": name}, 1.0, 1.0, 1.0, INF, mine, mine)
    assert not torch.tensor(found[3]).isfinite().any()
    assert found[4:] == [FULL] * 2


@pytest.mark.ranks(2)
def test_what_is_owed_to_a_gradient_that_is_none_stays_owed() -> None:
    """`v` is compressed and then nobody has a gradient of it; `w` goes on."""
    v = torch.randn(6, 6, generator=torch.Generator().manual_seed(rank()))
    module = stage(v=(6, 6), w=(6, 6))
    sync = averaged(module, ONE)
    owed = []
    for number in range(4):
        step(sync, module, w=1.0, **({} if number == 3 else {"v": v}))
        assert (module.get_parameter("v").grad is None) == (number == 3)
        module.zero_grad()
        kept = sync.state_dict()["handlers"]["data-parallel"]["buckets"][0, (0, 1)]
        slot = next(s for s in sync.plan.buckets[0].slots if s.key == "0.v")
        all_owed = kept["error_dict"].get(0, torch.zeros(200))
        owed.append(all_owed[slot.offset : slot.offset + slot.numel].clone())
    assert owed[2].abs().max() > 0.1
    assert error(owed[3], owed[2]) <= rounding(200)
    sync.close()
