"""Communication hooks: torch's own numbers, what was not sent, and all that they go with."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from pipegrad import (
    FlatBucket,
    GradientSync,
    Placement,
    ReductionStep,
    Topology,
    Work,
    handlers,
)
from pipegrad.comm.process_groups import Groups
from pipegrad.errors import PluginError
from pipegrad.gradients.reductions import StepBucket
from pipegrad.plan.buckets import Slot
from pipegrad.testing import OrderChecker
from pipegrad_handlers import power_sgd
from pipegrad_handlers.communication_hook import CommunicationHook, TorchBucket
from tests.support.gradients.cases import give, grads, outcome, rank, stage, step, tied
from tests.support.gradients.hooks import (
    CAST,
    HERE,
    ONE,
    POWER,
    POWER_SGD,
    alone,
    averaged,
    go_on,
    hooked,
    model,
    ours,
    same,
    torchs,
)
from tests.support.gradients.placements import By, compute, mesh, stepped
from tests.support.gradients.placements import alone as placed
from tests.support.pipeline.schedulers import error
from tests.support.ranked import gathered
from tests.support.rounding import rounding


def on_ranks(*numbers: int) -> pytest.MarkDecorator:
    """Runs a test on each of these numbers of ranks."""
    worlds = [pytest.param(n, marks=pytest.mark.ranks(n)) for n in numbers]
    return pytest.mark.parametrize("num_ranks", worlds)


def gradient(at: int) -> torch.Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(at))


@pytest.mark.parametrize("hook", CAST)
@on_ranks(2, 3)
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


def compressed(**options: Any) -> tuple[object, Any, Callable[[], object]]:
    theirs: dict[str, Any] = {**EPSILON, **POWER, **options}
    state = lambda: PowerSGDState(dist.group.WORLD, **theirs)  # noqa: E731
    return {**POWER_SGD, **options}, powerSGD_hook, state


def plain(name: str) -> tuple[object, Any, Callable[[], object]]:
    return name, getattr(default_hooks, name), lambda: dist.group.WORLD


# Each hook here and in DistributedDataParallel, its state there, and how far apart they may be.
RIVALS: dict[str, tuple[tuple[object, Any, Callable[[], object]], float]] = {
    "bf16_compress_hook": (plain("bf16_compress_hook"), 2**-6),
    "fp16_compress_hook": (plain("fp16_compress_hook"), 2**-9),
    "rank 2": (compressed(), 2e-6),
    "no epsilon": (compressed(orthogonalization_epsilon=0), 2e-6),
    "no feedback": (compressed(use_error_feedback=False), 2e-6),
    "cold": (compressed(warm_start=False, batch_tensors_with_same_shape=True), 2e-6),
    "wrapped": (
        (
            {**POWER_SGD, "wrapper": "fp16_compress_wrapper"},
            default_hooks.fp16_compress_wrapper(powerSGD_hook),
            compressed()[2],
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


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 256, "comm_streams": 2}], ids=str)
@pytest.mark.parametrize("name", ["powerSGD_hook", "batched_powerSGD_hook"])
@on_ranks(2, 3)
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
def test_zeros_are_zeros_and_what_is_too_large_is_seen() -> None:
    mine, zeros = 1.0 + rank(), [0.0] * 256
    found = square(ONE, 1.0, 1.0, 0.0, 0.0, mine, mine)
    assert found == [ONES, ONES, zeros, zeros, FULL, FULL]
    assert square(EAGER, 0.0, mine, mine) == [zeros, FULL, FULL]
    # What is too large for a cast is seen.
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
    step(sync, module)  # nobody has anything, so the hook does not run
    kept = sync.state_dict()["handlers"]["data-parallel"]["buckets"][0, (0, 1)]
    assert kept["iter"] == 4
    sync.close()


# What communication hooks keep, and what is refused of them. Jobs go on in ranks/train/test_kept.


@pytest.mark.ranks(2)
def test_the_state_of_a_hook_of_ones_own_goes_on_to_the_bit() -> None:
    hook = {"name": f"{HERE}:halving", "state": f"{HERE}:Half"}
    whole, sync = ours(hook, 4)
    sync.close()
    module, state, found = model(), dict[str, Any](), list[torch.Tensor]()
    for steps in (range(1), range(1, 4)):
        told = dict(reversed(hook.items())) if steps.start else hook  # in any order
        sync = averaged(module, told)
        sync.load_state_dict(state)
        assert bool(sync.state_dict()) == bool(steps.start)  # also before the first step
        found += go_on(sync, module, steps)
        state = sync.state_dict()
        sync.load_state_dict({})
        assert sync.state_dict() == {}
        sync.close()
    assert same(found, whole) == [True] * 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"plan": ""}, "rank 1: PlanError: the state of handlers is of another plan"),
        ({"handlers": {"nobody": {}}}, "rank 1: PlanError: what is to be loaded is of handlers"),
        ({}, "ranks disagree on what handler 'data-parallel' goes on from: "),
    ],
)
def test_what_was_kept_of_something_else_or_differs_is_refused(
    change: dict[str, Any], refused: str
) -> None:
    _, sync = ours(POWER_SGD, 3)
    state = sync.state_dict()
    sync.close()
    sync = averaged(model(), POWER_SGD)
    odd = {**state, **change} if change else {}
    said = outcome(lambda: sync.load_state_dict(odd if rank() else state))
    assert said.startswith(f"PlanError: {refused}")
    assert ".py:" not in said  # which line of pipegrad says so is of no use
    assert sync.state_dict() == {}
    sync.load_state_dict(state)  # ranks still are in one place
    sync.close()


@pytest.mark.ranks(2)
def test_misused_hooks_end_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = averaged(model(), "bf16_compress_hook")
    sync.prepare()
    assert outcome(sync.state_dict).startswith("StepError: state_dict() inside a step")
    sync.abort(ValueError("over"))
    sync.close()
    # A hook of two syncs ends the step.
    instance = handlers.resolve(hooked(POWER_SGD)).plugin
    modules = stage(w=(3,)), stage(w=(3,))
    step(placed(modules[0], instance), modules[0], w=1.0)
    sync = placed(modules[1], instance)
    refused = outcome(lambda: step(sync, modules[1], w=1.0))
    assert refused.startswith("ReduceError: ")
    assert "belongs to one GradientSync, and was given to two" in refused

    # A hook that leaves its memory ends the step.
    def forgetful(state: Any, bucket: Any) -> Any:
        state.p_memory_dict.clear()
        return powerSGD_hook(state, bucket)

    monkeypatch.setattr(power_sgd, "powerSGD_hook", forgetful)
    refused = outcome(lambda: alone(POWER_SGD, 1.0, 1.0, 1.0, shape=(16, 16)))
    assert refused.startswith("ReduceError: ")
    assert "does not use the memory that pipegrad lays out for it" in refused


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("too_short", "gave torch.Size([1]), expected a tensor of 16 elements: the mean"),
        ("no_future", "expected a Future"),
        ("steps_parameters", "has gradients(), not parameters()"),
        ("fails_later", "a callback gave up"),
    ],
)
def test_a_hook_that_fails_ends_the_step_in_words(name: str, says: str) -> None:
    refused = outcome(lambda: alone(f"{HERE}:{name}", 1.0))
    assert refused.startswith("ReduceError: ")
    assert says in refused


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        ("bf16_compres_hook", "known, closest first: bf16_compress_hook, fp16_compress_hook"),
        ({"matrix_approximation_rank": 1}, "lacks 'name'"),
        ({"name": "powerSGD_hook", "rank": 1}, "has no option 'rank'; allowed, closest first"),
        ({"name": f"{HERE}:scaled"}, "needs the option 'by'"),
        ({"name": "powerSGD_hook", "wrapper": "fp16"}, "no wrapper is called 'fp16'; known"),
        ({"name": "powerSGD_hook", "start_powerSGD_iter": 1}, "Expect `start_powerSGD_iter` > 1"),
        ({**POWER_SGD, "matrix_approximation_rank": 1.5}, "matrix_approximation_rank = 1.5"),
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("op", "placement"), [("sum", Placement.REPLICATE), ("mean", Placement.SHARD)]
)
def test_only_means_that_live_everywhere_have_hooks(op: Any, placement: Placement) -> None:
    handler = By("dp", placement, op)
    handler.hook = CommunicationHook("bf16_compress_hook")
    refused = outcome(lambda: placed(stage(w=(3,)), handler))
    assert refused.startswith("PlanError: handler 'tests.support.gradients.placements:By'")
    how = f"{placement.value}-{op}, all-reduce"
    assert f"reduces '0.w' by {how}: expected replicate-mean" in refused


def test_torch_sees_gradients_as_they_lie_in_memory() -> None:
    buffer = torch.arange(20.0)
    slots = [Slot("t", 0, (2, 3), (1, 2)), Slot("s", 8, (), ()), Slot("none", 9, (0, 2), (2, 1))]
    bucket = StepBucket(buffer, 3, index=7, slots=slots, scattered=(17,))
    seen = TorchBucket(bucket)
    assert (seen.index(), seen.is_last()) == (7, True)
    assert bucket.flags.tolist() == [17.0, 18.0, 19.0]
    assert [g.tolist() for g in bucket.gradients] == [[[0, 2, 4], [1, 3, 5]], 8.0, []]
    assert [g.tolist() for g in seen.gradients()] == [[[0, 1], [2, 3], [4, 5]], [8]]
    seen.set_buffer(seen.buffer().to(torch.float16))
    assert {g.dtype for g in seen.gradients()} == {torch.float16}
    seen.take([seen.buffer() + 1])
    assert buffer.tolist() == [*range(1, 18), 17, 18, 19]
    # A square has gradients and zeros.
    buffer = torch.full((8,), 9.0)
    slots = [Slot("a", 1, (2,), (1,)), Slot("b", 4, (1,), (1,))]
    square = power_sgd._Square(
        TorchBucket(StepBucket(buffer, 2, index=0, slots=slots, scattered=(6,)))
    )
    assert square.buffer().tolist() == [0, 9, 9, 0, 9, 0, 0, 0, 0]
    assert [tuple(g.shape) for g in square.gradients()] == [(3, 3)]


# Beside everything else: ties, shards, schedules, other comm streams.


@pytest.mark.ranks(2)
def test_hooks_go_with_settings_layouts_and_launches() -> None:
    assert alone("bf16_compress_hook", 1.0 + rank(), reduce_dtype=torch.float64) == [[1.5] * 3]
    assert alone({"name": f"{HERE}:scaled", "by": 4.0}, 1.0 + rank()) == [[6.0] * 3]
    module = stage(w=(3,))
    sync = averaged(module, "fp16_compress_hook")
    with sync.accumulate(), mock.patch.object(dist, "all_reduce") as sent:
        step(sync, module, w=1.0 + rank())
    sent.assert_not_called()
    assert step(sync, module, w=10.0)["w"] == [11.5] * 3
    sync.close()
    # It goes with parameters that do not lie row by row.
    c, t = torch.zeros(4, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(8, 6).t()
    module = stage(c=c, t=t, s=())
    sync = averaged(module, ONE)
    found: dict[str, Any] = {}
    for _ in range(4):
        module.zero_grad()
        found = step(sync, module, **shapes(1.0 + rank()))
    kept = sync.state_dict()["handlers"]["data-parallel"]["buckets"][0, (0, 1)]
    sizes = kept["p_memory_dict"][0].numel(), kept["q_memory_dict"][0].numel()
    assert sizes == (4 + 8, 48 + 6)  # both matrices were compressed, as they lie
    for name, expected in shapes(1.5).items():
        assert error(torch.tensor(found[name]), expected) <= rounding(48)
    sync.close()
    # A launch says anew that it leaves the mean.
    module, at = stage(w=(3,)), Topology.create(pipeline=1)
    handler = InTurns("dp", Placement.REPLICATE, "mean")
    sync = GradientSync({0: module}, at, handlers=[handler])
    for _ in range(4):
        assert step(sync, module, w=1.0 + rank())["w"] == [1.5] * 3
        module.zero_grad()
    sync.close()
    # Nobody who launches waits for another rank. The host read summed flags in the launch: ranks in
    # other orders waited for each other.
    module, store = stage(w=(16, 16)), dist.distributed_c10d._get_default_store()
    with mock.patch.object(Groups, "block_host", return_value=False):
        sync = averaged(module, ONE)
        for number in range(4):
            sync.prepare()
            if rank() == 1:  # its gradient leaves when the other one's already has
                store.wait([f"{number} left"], timedelta(seconds=60))
            give(module, w=1.0 + rank())
            sync.stage_final(0)
            store.set(f"{number} left", "")
            sync.finish()
            assert grads(module)["w"][0] == pytest.approx([1.5] * 16)
            module.zero_grad()
        sync.close()


def shapes(scale: float) -> dict[str, torch.Tensor]:
    """Gradients of rank one, of parameters that do not lie row by row."""
    c = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 4, 4)
    return {"c": scale * c, "t": scale * torch.ones(6, 8), "s": torch.tensor(scale)}


class InTurns(By):
    """Leaves the mean in every other step, the sum in the others."""

    calls = 0

    def launch(self, bucket: FlatBucket, reduction: ReductionStep, group: Any) -> Work:
        self.calls += 1
        if self.calls % 2:
            bucket.is_mean = True
            bucket.payload.div_(len(reduction.ranks))
        return bucket.reduce(reduction, group)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("hook", ["bf16_compress_hook", POWER_SGD], ids=str)
def test_rows_are_averaged_like_anything_else(hook: object) -> None:
    """Rows of a mean over "dp", averaged over an outer dimension by a hook."""
    module = stage(a=(3, 3), b=(5,))
    handlers: Any = [By("dp", Placement.SHARD), {**hooked(hook), "axis": "out"}]
    sync = GradientSync({0: module}, mesh(out=2, dp=2), handlers=handlers)
    sync.optimizer_parameters()
    for _ in range(4):
        for one in sync.main_parameters():
            one.tensor.grad = None
        compute(sync, lambda: give(module, a=1.0 + rank(), b=10.0 * (1 + rank())))
    found = {key: set(part.tolist()) for key, (_, part) in stepped(sync).items()}
    assert {(key, x) for one in gathered(found) for key, values in one.items() for x in values} == {
        ("0.a", 5.0),
        ("0.b", 50.0),
    }
    sync.close()


@pytest.mark.ranks(4)
def test_ranks_of_a_frozen_stage_go_on_beside_ranks_with_a_state() -> None:
    at = mesh(pp=2, dp=2)
    module = stage(w=(16, 16)).requires_grad_(0 in at.local_stages)
    sync = GradientSync(dict.fromkeys(at.local_stages, module), at, handlers=[hooked(ONE)])
    for _ in range(3):
        step(sync, module, **({"w": 1.0 + rank()} if 0 in at.local_stages else {}))
        module.zero_grad()
    state = sync.state_dict()
    assert gathered(bool(state)) == [True, True, False, False]
    sync.load_state_dict(state)
    assert sync.state_dict().keys() == state.keys()
    sync.close()


@pytest.mark.ranks(4)
def test_what_follows_a_hook_waits_for_it() -> None:
    """A tie over two stages of two replicas: comm streams as on devices give the same bits."""
    chosen: Any = ["pipeline-shared", hooked(POWER_SGD)]
    found: list[Any] = []
    for threaded in (True, False):
        with mock.patch.object(Groups, "block_host", return_value=threaded):
            module = stage(w=(16, 16))
            sync = tied(module, "w", handlers=chosen)
            generator = torch.Generator().manual_seed(rank())
            for _ in range(5):
                found.append(step(sync, module, w=torch.randn(16, 16, generator=generator)))
                module.zero_grad()
            sync.close()
    assert found[:5] == found[5:]


@pytest.mark.ranks(2)
def test_every_access_is_ordered() -> None:
    with OrderChecker() as checker:
        _, sync = ours(POWER_SGD, bucket_bytes=512, comm_streams=2)
        sync.close()
    assert list(map(str, checker.violations)) == []
