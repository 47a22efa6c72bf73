"""Communication hooks: torch's own numbers, flags that no hook sees, and what was not sent."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from tests.support.gradients.cases import Case, on, rank, replies, stage, step
from tests.support.gradients.hooks import (
    CAST,
    ONE,
    POWER,
    POWER_SGD,
    Grads,
    alone,
    averaged,
    go_on,
    model,
    ours,
    same,
    seeding,
    torchs,
    wire,
)
from tests.support.pipeline.schedulers import error
from tests.support.rounding import rounding

TWO: list[Case] = []
THREE: list[Case] = []
FOUR: list[Case] = []
two, three, four = replies(2, TWO), replies(3, THREE), replies(4, FOUR)


# Numbers.


def gradient(at: int) -> torch.Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(at))


@on(TWO)
@on(THREE)
@on(FOUR)
def compressed() -> Any:
    """What each hook makes of this rank's gradient, and what was given to all_reduce."""
    found = {}
    for hook in ("allreduce_hook", *CAST):
        module = stage(w=(40,))
        sync = averaged(module, hook)
        with wire() as log:
            step(sync, module, w=gradient(rank()))
        w = module.get_parameter("w")
        assert w.grad is not None
        found[hook] = w.grad.clone(), log, sync.statistics().reduced_bytes
        sync.close()
    return found


@pytest.mark.parametrize("hook", CAST)
@pytest.mark.parametrize("world", ["two", "three", "four"])
def test_a_cast_is_the_sum_of_rounded_parts(
    hook: str, world: str, request: pytest.FixtureRequest
) -> None:
    every = request.getfixturevalue(world)
    parts = [gradient(at).to(CAST[hook]).div_(len(every)) for at in range(len(every))]
    sums = [ways(parts) for parts in zip(*(part.unbind() for part in parts), strict=True)]
    for reply in every:
        found = reply["compressed"][hook][0]
        assert torch.equal(found, every[0]["compressed"][hook][0])
        assert all(x in some for x, some in zip(found.tolist(), sums, strict=True))


def ways(parts: tuple[torch.Tensor, ...]) -> set[float]:
    """Returns what a sum may be, in its dtype, whichever is added first."""
    if len(parts) == 1:
        return {parts[0].item()}
    dtype, found = parts[0].dtype, set[float]()
    for size in range(1, len(parts)):
        for chosen in itertools.combinations(range(len(parts)), size):
            left = ways(tuple(parts[i] for i in chosen))
            right = ways(tuple(p for i, p in enumerate(parts) if i not in chosen))
            found |= {
                torch.tensor(a, dtype=dtype).add(torch.tensor(b, dtype=dtype)).item()
                for a in left
                for b in right
            }
    return found


@pytest.mark.parametrize("hook", CAST)
def test_half_of_the_bytes_travel_and_flags_as_they_are(two: Any, hook: str) -> None:
    for reply in two:
        padded, flag = 48, 4
        _, log, reduced = reply["compressed"][hook]
        assert log == [(torch.float32, flag), (CAST[hook], 2 * padded)]
        assert reduced == 4 * padded + flag


def furthest(one: Grads, other: Grads) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, other, strict=True))


COLD = {**POWER, "warm_start": False, "batch_tensors_with_same_shape": True}
EPSILON: dict[str, Any] = {"orthogonalization_epsilon": 1e-8}


@on(TWO)
@on(THREE)
def beside_ddp() -> dict[str, tuple[list[bool], float]]:
    """Each hook here and in DistributedDataParallel, which trains the same model."""
    world, found = dist.group.WORLD, {}
    rivals: dict[str, tuple[object, Any, Any]] = {
        name: (name, getattr(default_hooks, name), lambda: world)
        for name in ("allreduce_hook", *CAST)
    }
    for name, options in {
        "rank 2": POWER,
        "rank 3": {**POWER, "matrix_approximation_rank": 3},
        "no epsilon": {**POWER, "orthogonalization_epsilon": 0},
        "no feedback": {**POWER, "use_error_feedback": False},
        "cold": COLD,
    }.items():
        theirs: dict[str, Any] = {**EPSILON, **options}
        rivals[name] = (
            {"name": "powerSGD_hook", **options},
            powerSGD_hook,
            partial(PowerSGDState, world, **theirs),
        )
    rivals["wrapped"] = (
        {**POWER_SGD, "wrapper": "fp16_compress_wrapper"},
        default_hooks.fp16_compress_wrapper(powerSGD_hook),
        lambda: PowerSGDState(world, **POWER, **EPSILON),
    )
    for name, (hook, rival, state) in rivals.items():
        mine, sync = ours(hook)
        sync.close()
        expected = torchs(rival, state())
        found[name] = same(mine, expected), furthest(mine, expected)
    return found


RIVALS = ["allreduce_hook", *CAST, "rank 2", "rank 3", "no epsilon", "no feedback", "cold"]


@pytest.mark.parametrize("name", [*RIVALS, "wrapped"])
def test_two_ranks_have_the_bits_of_distributed_data_parallel(two: Any, name: str) -> None:
    for reply in two:
        assert reply["beside_ddp"][name][0] == [True] * 5


@pytest.mark.parametrize("name", [*RIVALS, "wrapped"])
def test_three_ranks_have_its_numbers_to_rounding(three: Any, name: str) -> None:
    """Gradients lie elsewhere in DistributedDataParallel's bucket: ranks are added in turns."""
    rounding = {"bf16_compress_hook": 2**-6, "fp16_compress_hook": 2**-9, "wrapped": 2**-8}
    for reply in three:
        assert reply["beside_ddp"][name][1] <= rounding.get(name, 2e-6)


# Error feedback.


@on(TWO)
@on(FOUR)
def in_the_long_run() -> Any:
    """12 steps without an update, two comm streams: all that was delivered, and is still to be."""
    found = {}
    exact, sync = ours("allreduce_hook", 12, lr=0.0)
    sync.close()
    for name in ("powerSGD_hook", "batched_powerSGD_hook"):
        hook = {"name": name, **POWER}
        for options in ({}, {"bucket_bytes": 256, "comm_streams": 2}):
            module = model()
            sync = averaged(module, hook, **options)
            with seeding() as log:
                before = torch.get_rng_state()
                delivered = go_on(sync, module, range(12), lr=0.0)
                untouched = torch.equal(before, torch.get_rng_state())
            kept = sync.state_dict()["handlers"]["data-parallel"]["buckets"]
            owed = {
                slot.key: error[slot.offset : slot.offset + slot.numel]
                for bucket in sync.plan.buckets
                for error in kept[bucket.index, tuple(range(dist.get_world_size()))][
                    "error_dict"
                ].values()
                for slot in bucket.slots
            }
            mine = torch.cat([owed[f"0.{key}"] for key, _ in module.named_parameters()])
            dist.all_reduce(mine)
            total = torch.stack(delivered).sum(0) + mine / dist.get_world_size()
            wanted = torch.stack(exact).sum(0)
            found[name, len(sync.plan.buckets) > 2] = (
                float((total - wanted).abs().max() / wanted.abs().max()),
                float((delivered[2] - exact[2]).abs().max() / exact[2].abs().max()),
                untouched,
                log,
            )
            sync.check_replicas()
            sync.close()
    return found


@pytest.mark.parametrize("world", ["two", "four"])
def test_what_was_not_sent_is_owed(world: str, request: pytest.FixtureRequest) -> None:
    for reply in request.getfixturevalue(world):
        assert sorted(many for _, many in reply["in_the_long_run"]) == [False, False, True, True]
        for off, compressed, _, _ in reply["in_the_long_run"].values():
            assert off < rounding(12 * 40)
            assert compressed > 1e-2  # or nothing would be owed


def test_no_random_numbers_of_the_process_are_touched(two: Any) -> None:
    for reply in two:
        for _, _, untouched, log in reply["in_the_long_run"].values():
            assert (untouched, log) == (True, [])


# Gradients that are missing, zero, or too large.


INF = float("inf")


@on(TWO)
def missing() -> Any:
    mine, both = ([1.0, 2.0][rank()],) * 2, (None, None)
    first = 4.0 if rank() == 0 else None
    eager = {**ONE, "use_error_feedback": False, "warm_start": False}
    eager["start_powerSGD_iter"] = 0
    return {
        "one": {hook: alone(hook, first) for hook in ("bf16_compress_hook", "fp16_compress_hook")},
        "nobody": {
            str(hook): alone(hook, *both, *mine, None, *mine, shape=(16, 16))
            for hook in (
                "bf16_compress_hook",
                ONE,
                {**ONE, "name": "batched_powerSGD_hook"},
                eager,
                {**ONE, "orthogonalization_epsilon": 0},
            )
        },
        "zeros": alone(ONE, 1.0, 1.0, 0.0, 0.0, *mine, shape=(16, 16)),
        "zeros at once": alone(eager, 0.0, *mine, shape=(16, 16)),
        "overflow": alone("fp16_compress_hook", 1e6),
        "overflow in powerSGD": {
            name: alone({**ONE, "name": name}, 1.0, 1.0, 1.0, INF, *mine, shape=(16, 16))
            for name in ("powerSGD_hook", "batched_powerSGD_hook")
        },
    }


def test_one_rank_alone_counts_as_zeros_of_the_others(two: Any) -> None:
    for reply in two:
        assert reply["missing"]["one"] == {key: [[2.0] * 3] for key in CAST}


def test_what_nobody_has_stays_none_and_harms_no_later_step(two: Any) -> None:
    full = pytest.approx([1.5] * 256)
    assert len(two[0]["missing"]["nobody"]) == 5
    for reply in two:
        for found in reply["missing"]["nobody"].values():
            assert found == [None, None, full, full, None, full, full]


def test_zeros_are_zeros_and_end_nothing(two: Any) -> None:
    zeros, full = [0.0] * 256, pytest.approx([1.5] * 256)
    for reply in two:
        ones = pytest.approx([1.0] * 256)
        assert reply["missing"]["zeros"] == [ones, ones, zeros, zeros, full, full]
        assert reply["missing"]["zeros at once"] == [zeros, full, full]


def test_what_is_too_large_is_seen(two: Any) -> None:
    for reply in two:
        assert reply["missing"]["overflow"] == [[INF] * 3]
        for found in reply["missing"]["overflow in powerSGD"].values():
            assert not torch.tensor(found[3]).isfinite().any()


def test_a_step_that_was_not_finite_harms_no_later_one(two: Any) -> None:
    """NaN stayed in the error feedback and in Q: every later step had NaN as well."""
    for reply in two:
        for found in reply["missing"]["overflow in powerSGD"].values():
            assert found[4:] == [pytest.approx([1.5] * 256)] * 2


@on(TWO)
def owed_to_nobody() -> Any:
    """`v` is compressed and then nobody has a gradient of it; `w` goes on."""
    v = torch.randn(6, 6, generator=torch.Generator().manual_seed(rank()))
    module = stage(v=(6, 6), w=(6, 6))
    sync = averaged(module, ONE)
    found = []
    for number in range(4):
        step(sync, module, w=1.0, **({} if number == 3 else {"v": v}))
        none = module.get_parameter("v").grad is None
        module.zero_grad()
        kept = sync.state_dict()["handlers"]["data-parallel"]["buckets"][0, (0, 1)]
        slot = next(s for s in sync.plan.buckets[0].slots if s.key == "0.v")
        error = kept["error_dict"].get(0, torch.zeros(200))
        found.append((none, error[slot.offset : slot.offset + slot.numel].clone()))
    sync.close()
    return found


def test_what_is_owed_to_a_gradient_that_is_none_stays_owed(two: Any) -> None:
    for reply in two:
        third, fourth = reply["owed_to_nobody"][2:]
        assert (third[0], fourth[0]) == (False, True)
        assert third[1].abs().max() > 0.1
        assert error(fourth[1], third[1]) <= rounding(200)
