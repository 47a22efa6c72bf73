"""Communication hooks beside everything else: ties, shards, schedules, other comm streams."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipegrad import (
    FlatBucket,
    GradientSync,
    Placement,
    ReductionStep,
    Topology,
    Work,
)
from pipegrad.comm.process_groups import Groups
from pipegrad.testing import OrderChecker
from tests.support.gradients.cases import give, grads, rank, stage, step, tied
from tests.support.gradients.hooks import HERE, ONE, POWER_SGD, alone, averaged, hooked, ours
from tests.support.gradients.placements import By, compute, mesh, stepped
from tests.support.pipeline.schedulers import error
from tests.support.ranked import gathered
from tests.support.rounding import rounding

pytestmark = pytest.mark.ranks(2)


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


def test_every_access_is_ordered() -> None:
    with OrderChecker() as checker:
        _, sync = ours(POWER_SGD, bucket_bytes=512, comm_streams=2)
        sync.close()
    assert list(map(str, checker.violations)) == []
