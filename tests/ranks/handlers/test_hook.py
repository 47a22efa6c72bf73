"""Communication hooks: torch's own numbers, and all that they go with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

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
from pipegrad.gradients.bucket_memory import BucketMemory
from pipegrad.gradients.reductions import StepBucket
from pipegrad.plan.buckets import Slot
from pipegrad.plan.plan import Launch
from pipegrad.testing import OrderChecker
from pipegrad_handlers.communication_hook import TorchBucket
from pipegrad_handlers.data_parallel import DataParallel
from tests.support.gpu.programs import BUCKET
from tests.support.gradients.cases import give, outcome, rank, stage, step, tied
from tests.support.gradients.hooks import (
    CAST,
    HERE,
    alone,
    averaged,
    hooked,
    ours,
    same,
    torchs,
)
from tests.support.gradients.placements import By, compute, mesh, stepped
from tests.support.gradients.placements import alone as placed
from tests.support.ranked import gathered


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
    assert sync.plan.reduced_bytes == 2 * halves.nbytes + flags.nbytes
    true = torch.zeros_like(halves)  # of the same size: so gloo adds in the same order
    true[:40] = gradient(rank()).to(CAST[hook]).div_(num_ranks)
    dist.all_reduce(true)
    assert torch.equal(found, true[:40].float())
    assert true.numel() == 48 or num_ranks > 2
    sync.close()


# Each hook here and in DistributedDataParallel, and how far apart they may be.
RIVALS = {"bf16_compress_hook": 2**-6, "fp16_compress_hook": 2**-9}


@pytest.mark.parametrize(("hook", "most"), RIVALS.items())
@on_ranks(2, 3)
def test_numbers_are_those_of_distributed_data_parallel(
    num_ranks: int, hook: str, most: float
) -> None:
    """To the bit, or to rounding: gradients lie elsewhere in its bucket, so ranks add in turns."""
    mine, sync = ours(hook)
    sync.close()
    theirs = torchs(getattr(default_hooks, hook), dist.group.WORLD)
    if num_ranks == 2:
        assert same(mine, theirs) == [True] * 5
    for a, b in zip(mine, theirs, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) <= most


# Gradients that are missing, zero, or too large.


@pytest.mark.ranks(2)
def test_what_nobody_has_stays_none_and_what_is_too_large_is_seen() -> None:
    mine, full = 1.0 + rank(), [1.5] * 3
    found = alone("bf16_compress_hook", None, None, mine, mine, None, mine, 0.0)
    assert found == [None, None, full, full, None, full, [0.0] * 3]
    assert alone("fp16_compress_hook", 1e6, mine) == [[float("inf")] * 3, full]


# What handlers keep, and what is refused of them. Jobs go on in ranks/train/test_resume.


class Counts(By):
    """Keeps how often it has sent."""

    calls = 0

    def launch(self, bucket: FlatBucket, reduction: ReductionStep, group: Any) -> Work:
        self.calls += 1
        return super().launch(bucket, reduction, group)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls} if self.calls else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = state.get("calls", 0)


def counting(*values: float) -> GradientSync:
    module = stage(w=(3,))
    sync = placed(module, Counts("dp", Placement.REPLICATE, "mean"))
    for value in values:
        step(sync, module, w=value)
        module.zero_grad()
    return sync


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"plan": ""}, "rank 1: PlanError: the state of handlers is of another plan"),
        (
            {},
            "ranks disagree on what handler 'tests.ranks.handlers.test_hook:Counts' goes on from: ",
        ),
    ],
)
def test_what_was_kept_of_something_else_or_differs_is_refused(
    change: dict[str, Any], refused: str
) -> None:
    sync = counting(1.0, 1.0)
    state = sync.state_dict()
    sync.close()
    sync = counting()
    odd = {**state, **change} if change else {}
    said = outcome(lambda: sync.load_state_dict(odd if rank() else state))
    assert said.startswith(f"PlanError: {refused}")
    assert ".py:" not in said  # which line of pipegrad says so is of no use
    assert sync.state_dict() == {}
    sync.load_state_dict(state)  # ranks still are in one place
    assert sync.state_dict() == state
    sync.close()


@pytest.mark.ranks(2)
def test_a_state_is_of_no_use_inside_a_step() -> None:
    sync = counting()
    sync.prepare()
    assert outcome(sync.state_dict).startswith("StepError: state_dict() inside a step")
    sync.abort(ValueError("over"))
    sync.close()


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
        ({"name": f"{HERE}:scaled", "to": 1}, "has no option 'to', needs the option 'by'; allowed"),
        (f"{HERE}:nothing", "cannot be imported"),
        (f"{HERE}:CAST", "expected a function"),
        (3, "the hook 3"),
    ],
)
def test_hooks_that_are_not_there_are_refused_by_name(hook: Any, says: str) -> None:
    with pytest.raises(PluginError) as caught:
        DataParallel(hook=hook)
    assert says in str(caught.value)
    with pytest.raises(PluginError, match="plug-in 'data-parallel'"):
        handlers.resolve(hooked(hook))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("op", "placement"), [("sum", Placement.REPLICATE), ("mean", Placement.SHARD)]
)
def test_only_means_that_live_everywhere_have_hooks(op: Any, placement: Placement) -> None:
    handler = By("dp", placement, op)
    handler.leaves = "mean"
    refused = outcome(lambda: placed(stage(w=(3,)), handler))
    assert refused.startswith("PlanError: handler 'tests.support.gradients.placements:By'")
    how = f"{placement.value}-{op}, all-reduce"
    assert f"reduces '0.w' by {how}: expected replicate-mean" in refused


def test_torch_sees_gradients_as_they_lie_in_memory() -> None:
    slots = Slot("t", 0, (2, 3), (1, 2)), Slot("s", 8, (), ()), Slot("none", 9, (0, 2), (2, 1))
    route = (ReductionStep("dp", (0, 1), "mean", Placement.REPLICATE, "data-parallel"),)
    planned = replace(BUCKET, index=7, slots=slots, payload_numel=17, route=route)
    bucket = StepBucket(BucketMemory(planned, torch.device("cpu")), Launch(7, 0, 0, 0))
    buffer = bucket.buffer.copy_(torch.arange(20.0))
    seen = TorchBucket(bucket)
    assert (seen.index(), seen.is_last()) == (7, True)
    assert bucket.flags.tolist() == [17.0, 18.0, 19.0]
    assert [g.tolist() for g in bucket.gradients] == [[[0, 2, 4], [1, 3, 5]], 8.0, []]
    assert [g.tolist() for g in seen.gradients()] == [[[0, 1], [2, 3], [4, 5]], [8]]
    seen.set_buffer(seen.buffer().to(torch.float16))
    assert {g.dtype for g in seen.gradients()} == {torch.float16}
    seen.take([seen.buffer() + 1])
    assert buffer.tolist() == [*range(1, 18), 17, 18, 19]


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
    # A launch says anew that it leaves the mean.
    module, at = stage(w=(3,)), Topology.create(pipeline=1)
    handler = InTurns("dp", Placement.REPLICATE, "mean")
    sync = GradientSync({0: module}, at, handlers=[handler])
    for _ in range(4):
        assert step(sync, module, w=1.0 + rank())["w"] == [1.5] * 3
        module.zero_grad()
    sync.close()


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
def test_rows_are_averaged_like_anything_else() -> None:
    """Rows of a mean over "dp", averaged over an outer dimension by a hook."""
    module = stage(a=(3, 3), b=(5,))
    handlers: Any = [By("dp", Placement.SHARD), {**hooked("bf16_compress_hook"), "axis": "out"}]
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
    handler = Counts("dp", Placement.REPLICATE, "mean")
    sync = GradientSync(dict.fromkeys(at.local_stages, module), at, handlers=[handler])
    for _ in range(3):
        step(sync, module, **({"w": 1.0 + rank()} if 0 in at.local_stages else {}))
        module.zero_grad()
    state = sync.state_dict()
    assert gathered(bool(state)) == [True, True, False, False]
    sync.load_state_dict(state)
    assert sync.state_dict() == state
    sync.close()


@pytest.mark.ranks(4)
def test_what_follows_a_hook_waits_for_it() -> None:
    """A tie over two stages of two replicas: comm streams as on devices give the same bits."""
    chosen: Any = ["pipeline-shared", hooked("bf16_compress_hook")]
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
        _, sync = ours("bf16_compress_hook", bucket_bytes=512, comm_streams=2)
        sync.close()
    assert list(map(str, checker.violations)) == []
