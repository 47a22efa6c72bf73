"""Communication hooks: torch's own numbers, flags that no hook sees, and state that goes on."""

from __future__ import annotations

import itertools
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from pipegrad import (
    CommunicationHook,
    FlatBucket,
    GradientSync,
    Hop,
    Placement,
    PlanError,
    PluginError,
    ReduceError,
    Scheduler,
    Stage,
    Topology,
    Work,
    handlers,
    split,
)
from pipegrad.gradients import power_sgd
from pipegrad.gradients.bucket import Slot
from pipegrad.gradients.groups import Groups
from pipegrad.gradients.hook import TorchBucket
from pipegrad.gradients.placement import HopBucket
from pipegrad.testing import OrderChecker
from tests.gradients.cases import Case, give, grads, on, outcome, rank, replies, stage, step, tied
from tests.gradients.hooks import (
    POWER,
    POWER_SGD,
    Grads,
    averaged,
    go_on,
    hooked,
    model,
    ours,
    seeding,
    torchs,
    wire,
)
from tests.gradients.placements import By, mesh

HERE = "tests.gradients.hooks"
CAST = {"bf16_compress_hook": torch.bfloat16, "fp16_compress_hook": torch.float16}
TWO: list[Case] = []
THREE: list[Case] = []
FOUR: list[Case] = []
two, three, four = replies(2, TWO), replies(3, THREE), replies(4, FOUR)


def alone(hook: object, *given: float | None, shape: tuple[int, ...] = (3,), **options: Any) -> Any:
    """One parameter's gradient after each step, of a rank that gives these."""
    module = stage(w=shape)
    sync = averaged(module, hook, **options)
    found = []
    for value in given:
        w = step(sync, module, **({} if value is None else {"w": value}))["w"]
        found.append(None if w is None else torch.tensor(w).flatten().tolist())
        module.zero_grad()
    sync.close()
    return found


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


def same(one: Grads, other: Grads) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


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
    """12 steps without an update, over two lanes: all that was delivered, and is still to be."""
    found = {}
    exact, sync = ours("allreduce_hook", 12, lr=0.0)
    sync.close()
    for name in ("powerSGD_hook", "batched_powerSGD_hook"):
        hook = {"name": name, **POWER}
        for options in ({}, {"bucket_bytes": 256, "lanes": 2}):
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
            assert off < 1e-5
            assert compressed > 1e-2  # or nothing would be owed


def test_no_random_numbers_of_the_process_are_touched(two: Any) -> None:
    for reply in two:
        for _, _, untouched, log in reply["in_the_long_run"].values():
            assert (untouched, log) == (True, [])


# Gradients that are missing, zero, or too large.


ONE = {**POWER_SGD, "matrix_approximation_rank": 1}  # as gradients here: so nothing is lost
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
        torch.testing.assert_close(third[1], fourth[1], rtol=0, atol=1e-6)


# Beside everything else.


@on(TWO)
def settings() -> Any:
    found = {"wider": alone("bf16_compress_hook", 1.0 + rank(), reduce_dtype=torch.float64)}
    module = stage(w=(3,))
    sync = averaged(module, "fp16_compress_hook")
    with sync.accumulate(), wire() as log:
        step(sync, module, w=1.0 + rank())
    found["accumulated"] = step(sync, module, w=10.0)["w"], len(log)
    sync.close()
    found["scale"] = alone({"name": f"{HERE}:scaled", "by": 4.0}, 1.0 + rank())
    c, t = torch.zeros(4, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(8, 6).t()
    module = stage(c=c, t=t, s=())
    sync = averaged(module, ONE)
    shown: dict[str, Any] = {}
    for _ in range(4):
        module.zero_grad()
        shown = step(sync, module, **shapes(1.0 + rank()))
    kept = sync.state_dict()["handlers"]["data-parallel"]["buckets"][0, (0, 1)]
    sizes = kept["p_memory_dict"][0].numel(), kept["q_memory_dict"][0].numel()
    sync.close()
    return {**found, "shapes": shown, "sizes": sizes}


def shapes(scale: float) -> dict[str, torch.Tensor]:
    """Gradients of rank one, of parameters that do not lie row by row."""
    c = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 4, 4)
    return {"c": scale * c, "t": scale * torch.ones(6, 8), "s": torch.tensor(scale)}


def test_it_goes_with_every_other_setting(two: Any) -> None:
    for reply in two:
        found = reply["settings"]
        assert (found["wider"], found["scale"]) == ([[1.5] * 3], [[6.0] * 3])
        assert found["accumulated"] == ([11.5] * 3, 0)
        assert found["sizes"] == (4 + 8, 48 + 6)  # both matrices were compressed, as they lie
        for name, expected in shapes(1.5).items():
            mean = torch.tensor(found["shapes"][name])
            torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-5)


class InTurns(By):
    """Leaves the mean in every other step, the sum in the others."""

    calls = 0

    def launch(self, bucket: FlatBucket, reduction: Hop, group: dist.ProcessGroup) -> Work:
        self.calls += 1
        if self.calls % 2:
            bucket.is_mean = True
            bucket.payload.div_(len(reduction.ranks))
        return bucket.reduce(reduction, group)


@on(TWO)
def in_turns() -> list[Any]:
    module, at = stage(w=(3,)), Topology.create(pipeline=1)
    handler = InTurns("dp", Placement.REPLICATE, "mean")
    sync, found = GradientSync({0: module}, at, handlers=[handler]), []
    for _ in range(4):
        found.append(step(sync, module, w=1.0 + rank())["w"])
        module.zero_grad()
    sync.close()
    return found


def test_a_launch_says_anew_that_it_leaves_the_mean(two: Any) -> None:
    for reply in two:
        assert reply["in_turns"] == [[1.5] * 3] * 4


def tied_model() -> nn.Sequential:
    torch.manual_seed(5)
    embedding, head = nn.Embedding(20, 12), nn.Linear(12, 20, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), head)


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, target)


@on(FOUR)
def pipelined() -> dict[str, list[float]]:
    """Two stages by two replicas, a tie over both: losses, whichever hook averages."""
    found = {}
    for name, hook in {"none": None, "bf16": "bf16_compress_hook", "powerSGD": POWER_SGD}.items():
        at, cut = Topology.create(pipeline=2), split(tied_model(), 2, boundaries=[2])
        local = [Stage(cut.modules[index], index) for index in at.local_stages]
        chosen: Any = ["pipeline-shared", hooked(hook)]
        scheduler = Scheduler(
            local,
            at,
            schedule="1f1b",
            num_microbatches=2,
            loss_fn=cross_entropy,
            shared=cut.shared,
            handlers=chosen,
        )
        sync = scheduler.sync
        optimizer = torch.optim.AdamW(sync.optimizer_parameters(), lr=0.02)
        x = torch.arange(20).roll(at.coordinate("dp"))[:16]
        first, last = 0 in at.local_stages, 1 in at.local_stages
        losses = []
        for _ in range(16):
            result = scheduler.step(x if first else None, target=(x + 7) % 20 if last else None)
            losses.append(result.loss.item())
            optimizer.step()
            optimizer.zero_grad()
        sync.check_replicas()
        scheduler.close()
        found[name] = losses
    return found


def test_a_tied_pipeline_learns_with_any_hook(four: Any) -> None:
    for reply in four:
        found = reply["pipelined"]
        assert found == four[0]["pipelined"]
        exact, bf16, power = found["none"], found["bf16"], found["powerSGD"]
        assert exact[-1] < 0.3 * exact[0]
        assert bf16 == pytest.approx(exact, rel=2e-2)
        assert bf16 != exact
        assert power[:3] == pytest.approx(exact[:3], rel=1e-5)  # the third update is the first
        assert power[3:] != exact[3:]
        assert power[-1] < 0.4 * exact[0]


@on(FOUR)
def behind_a_shard() -> Any:
    """Rows of a mean over "dp", averaged over an outer dimension by a hook."""
    at, module = mesh(out=2, dp=2), stage(a=(3, 3), b=(5,))
    found = {}
    for name, hook in (("bf16", "bf16_compress_hook"), ("powerSGD", POWER_SGD)):
        over = {**hooked(hook), "axis": "out"}
        sync = GradientSync({0: module}, at, handlers=[By("dp", Placement.SHARD), over])
        sync.optimizer_parameters()
        for _ in range(4):
            sync.prepare()
            sync.stage_first_use(0)
            give(module, a=1.0 + rank(), b=10.0 * (1 + rank()))
            sync.stage_final(0)
            sync.finish()
        found[name] = {
            one.record.name: set(one.tensor.grad.tolist())
            for one in sync.stepped()
            if one.tensor.grad is not None
        }
        sync.close()
    return found


def test_rows_are_averaged_like_anything_else(four: Any) -> None:
    for name in ("bf16", "powerSGD"):
        found: dict[str, set[float]] = {}
        for reply in four:
            for key, values in reply["behind_a_shard"][name].items():
                found[key] = found.get(key, set()) | values
        assert found == {"a": {5.0}, "b": {50.0}}


@on(TWO)
def ahead() -> list[list[float]]:
    """Lanes as on devices; one rank's gradient leaves when the other one's already has."""
    module, store = stage(w=(16, 16)), dist.distributed_c10d._get_default_store()
    found = []
    with mock.patch.object(Groups, "block_host", return_value=False):
        sync = averaged(module, ONE)
        for number in range(4):
            sync.prepare()
            if rank() == 1:
                store.wait([f"{number} left"], timedelta(seconds=10))
            give(module, w=1.0 + rank())
            sync.stage_final(0)
            store.set(f"{number} left", "")
            sync.finish()
            found.append(grads(module)["w"][0])
            module.zero_grad()
        sync.close()
    return found


def test_nobody_who_launches_waits_for_another_rank(two: Any) -> None:
    """The host read summed flags in the launch: ranks in other orders waited for each other."""
    for reply in two:
        assert reply["ahead"] == [pytest.approx([1.5] * 16)] * 4


@on(FOUR)
def tied_ahead() -> list[bool]:
    """A tie over two stages of two replicas: whether lanes as on devices give the same bits."""
    chosen: Any = ["pipeline-shared", hooked(POWER_SGD)]
    found: list[Grads] = []
    for threaded in (True, False):
        with mock.patch.object(Groups, "block_host", return_value=threaded):
            module = stage(w=(16, 16))
            sync = tied(module, "w", handlers=chosen)
            generator, mine = torch.Generator().manual_seed(rank()), []
            for _ in range(5):
                shown = step(sync, module, w=torch.randn(16, 16, generator=generator))
                mine.append(torch.tensor(shown["w"]))
                module.zero_grad()
            sync.close()
            found.append(mine)
    return same(*found)


def test_what_follows_a_hook_waits_for_it(four: Any) -> None:
    for reply in four:
        assert reply["tied_ahead"] == [True] * 5


@on(TWO)
def watched() -> list[list[str]]:
    found = []
    for virtual in (True, False):
        for hook in ("allreduce_hook", *CAST, POWER_SGD, {**POWER_SGD, "warm_start": False}):
            with OrderChecker(virtual_streams=virtual) as checker:
                _, sync = ours(hook, bucket_bytes=512, lanes=2)
                sync.close()
            found.append(list(map(str, checker.violations)))
    return found


def test_every_access_is_ordered(two: Any) -> None:
    for reply in two:
        assert reply["watched"] == [[]] * 10


# What is kept.


@on(TWO)
def continued() -> Any:
    found: dict[str, Any] = {}
    state: dict[str, Any] = {}
    lanes: dict[str, Any] = {"bucket_bytes": 512, "lanes": 2}
    own = {"name": f"{HERE}:halving", "state": f"{HERE}:Half"}
    cold = {**POWER_SGD, "warm_start": False}
    batched = {**POWER_SGD, "name": "batched_powerSGD_hook", "wrapper": f"{HERE}:wrapped"}
    for name, hook in {"warm": POWER_SGD, "cold": cold, "own": own, "batched": batched}.items():
        whole, sync = ours(hook, 7, **lanes)
        sync.close()
        module = model()
        late: Grads = []
        for steps in (range(1), range(1, 4), range(4, 7)):
            told = dict(reversed(hook.items())) if steps.start == 1 else hook  # in any order
            sync = averaged(module, told, **lanes)
            sync.load_state_dict(state if steps.start else {})
            assert bool(sync.state_dict()) == bool(steps.start)  # also before the first step
            late += go_on(sync, module, steps)
            state = sync.state_dict()
            sync.close()
        found[name] = same(late, whole)
        _, sync = ours(hook, 4, **lanes)
        sync.load_state_dict({})
        assert sync.state_dict() == {}
        sync.close()
    sync = averaged(model(), POWER_SGD, **lanes)
    sync.load_state_dict({**state, "handlers": {}})
    found["nothing"] = sync.state_dict()
    sync.close()
    return found


def test_what_is_kept_goes_on_to_the_bit(two: Any) -> None:
    for reply in two:
        found = dict(reply["continued"])
        assert found.pop("nothing") == {}
        assert found == dict.fromkeys(("warm", "cold", "own", "batched"), [True] * 7)


@on(TWO)
def of_something_else() -> Any:
    _, sync = ours(POWER_SGD, 3)
    state = sync.state_dict()
    sync.close()
    found = {}
    for name, hook, options in (
        ("buckets", POWER_SGD, {"bucket_bytes": 512}),
        ("rank", {**POWER_SGD, "matrix_approximation_rank": 1}, {}),
        ("none", None, {}),
    ):
        sync = averaged(model(), hook, **options)
        said = outcome(partial(sync.load_state_dict, state))
        found[name] = said, sync.state_dict()
        sync.close()
    own = {**state, "plan": "another"} if rank() else state
    for name, mine in {"one afresh": {} if rank() else state, "one refused": own}.items():
        sync = averaged(model(), POWER_SGD)
        said = outcome(partial(sync.load_state_dict, mine))
        found[name] = said, sync.state_dict()
        sync.load_state_dict(state)  # ranks still are in one place
        sync.close()
    sync = averaged(model(), "bf16_compress_hook")
    sync.prepare()
    found["open"] = outcome(sync.state_dict), {}
    sync.abort(ValueError("over"))
    sync.close()
    return found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("buckets", "PlanError: what handlers kept is of another plan"),
        ("rank", "PlanError: handler 'data-parallel' cannot go on: ValueError(\"what is to be"),
        ("none", "PlanError: handler 'data-parallel' cannot go on: ValueError('it has no comm"),
        (
            "one afresh",
            "PlanError: ranks disagree on what handler 'data-parallel' goes on from; make them the",
        ),
        (
            "one refused",
            "PlanError: load_state_dict: 1 of 2 ranks failed, so all stop:\n  rank 1: PlanError: w",
        ),
        ("open", "StepError: state_dict() inside a step"),
    ],
)
def test_what_was_kept_of_something_else_is_refused(two: Any, name: str, says: str) -> None:
    for reply in two:
        said, kept = reply["of_something_else"][name]
        assert said.startswith(says)
        assert kept == {}


# What is refused.


@on(TWO)
def failing() -> Any:
    found = {}
    for name in ("too_short", "no_future", "steps_parameters", "fails_later"):
        found[name] = outcome(partial(alone, f"{HERE}:{name}", 1.0))

    def forgetful(state: Any, bucket: Any) -> Any:
        state.p_memory_dict.clear()
        return powerSGD_hook(state, bucket)

    with mock.patch.object(power_sgd, "powerSGD_hook", forgetful):
        found["layout"] = outcome(partial(alone, POWER_SGD, 1.0, 1.0, 1.0, shape=(16, 16)))
    instance = handlers.resolve(hooked(POWER_SGD)).plugin
    for _ in range(2):
        module = stage(w=(3,))
        sync = GradientSync({0: module}, Topology.create(pipeline=1), handlers=[instance])
        found["twice"] = outcome(partial(step, sync, module, w=1.0))
    return found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("too_short", "gave torch.Size([1]), expected a tensor of 16 elements: the mean"),
        ("no_future", "expected a Future"),
        ("steps_parameters", "has gradients(), not parameters()"),
        ("fails_later", "a callback gave up"),
        ("layout", "does not use the memory that pipegrad lays out for it"),
        ("twice", "belongs to one GradientSync, and was given to two"),
    ],
)
def test_a_hook_that_fails_ends_the_step_in_words(two: Any, name: str, says: str) -> None:
    for reply in two:
        said = reply["failing"][name]
        assert said.startswith(ReduceError.__name__)
        assert says in said


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        ("bf16_compres_hook", "known, closest first: bf16_compress_hook, fp16_compress_hook"),
        ({"matrix_approximation_rank": 1}, "lacks 'name'"),
        ({"name": "powerSGD_hook", "rank": 1}, "has no option 'rank'; allowed, closest first"),
        ({"name": "bf16_compress_hook", "by": 1}, "has no option 'by'"),
        ({"name": f"{HERE}:scaled"}, "needs the option 'by'"),
        ({"name": f"{HERE}:halving", "state": f"{HERE}:Half", "group": 1}, "no option 'group'"),
        ({"name": "powerSGD_hook", "wrapper": "fp16"}, "no wrapper is called 'fp16'; known"),
        ({"name": "powerSGD_hook", "start_powerSGD_iter": 1}, "Expect `start_powerSGD_iter` > 1"),
        ({**POWER_SGD, "matrix_approximation_rank": 1.5}, "matrix_approximation_rank = 1.5"),
        ({**POWER_SGD, "matrix_approximation_rank": 0}, "matrix_approximation_rank = 0"),
        ({**POWER_SGD, "warm_start": 1}, "warm_start = 1"),
        ({**POWER_SGD, "random_seed": -1}, "random_seed = -1"),
        ({**POWER_SGD, "process_group": None}, "has no option 'process_group'"),
        (f"{HERE}:nothing", "cannot be imported"),
        (f"{HERE}:POWER", "expected a function"),
        (3, "the hook 3"),
    ],
)
def test_hooks_that_are_not_there_are_refused_by_name(hook: Any, says: str) -> None:
    with pytest.raises(PluginError) as caught:
        CommunicationHook(hook)
    assert says in str(caught.value)
    with pytest.raises(PluginError, match="plug-in 'data-parallel'"):
        handlers.resolve(hooked(hook))


@on(TWO)
def placed() -> Any:
    def hooks(op: Any, placement: Placement) -> GradientSync:
        handler = By("dp", placement, op)
        handler.hook = CommunicationHook("bf16_compress_hook")
        return GradientSync({0: stage(w=(3,))}, Topology.create(pipeline=1), handlers=[handler])

    return [
        outcome(partial(hooks, "sum", Placement.REPLICATE)),
        outcome(partial(hooks, "mean", Placement.SHARD)),
    ]


def test_only_means_that_live_everywhere_have_hooks(two: Any) -> None:
    for reply in two:
        for said, how in zip(reply["placed"], ("replicate-sum", "shard-mean"), strict=True):
            assert said.startswith(f"{PlanError.__name__}: handler 'tests.gradients.placements:By'")
            assert f"reduces '0.w' by {how}, all-reduce: expected replicate-mean" in said


def test_a_square_has_gradients_and_zeros() -> None:
    buffer = torch.full((8,), 9.0)
    slots = [Slot("a", 1, (2,), (1,)), Slot("b", 4, (1,), (1,))]
    square = power_sgd._Square(TorchBucket(HopBucket(buffer, 2, index=0, slots=slots)))
    assert square.buffer().tolist() == [0, 9, 9, 0, 9, 0, 0, 0, 0]
    assert [tuple(g.shape) for g in square.gradients()] == [(3, 3)]


def test_torch_sees_gradients_as_they_lie_in_memory() -> None:
    buffer = torch.arange(20.0)
    slots = [Slot("t", 0, (2, 3), (1, 2)), Slot("s", 8, (), ()), Slot("none", 9, (0, 2), (2, 1))]
    bucket = HopBucket(buffer, 3, index=7, slots=slots)
    seen = TorchBucket(bucket)
    assert (seen.index(), seen.is_last()) == (7, True)
    assert bucket.flags.tolist() == [17.0, 18.0, 19.0]
    assert [g.tolist() for g in bucket.gradients] == [[[0, 2, 4], [1, 3, 5]], 8.0, []]
    assert [g.tolist() for g in seen.gradients()] == [[[0, 1], [2, 3], [4, 5]], [8]]
    seen.set_buffer(seen.buffer().to(torch.float16))
    assert {g.dtype for g in seen.gradients()} == {torch.float16}
    seen.take([seen.buffer() + 1])
    assert buffer.tolist() == [*range(1, 18), 17, 18, 19]
