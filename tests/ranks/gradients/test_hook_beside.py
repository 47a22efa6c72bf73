"""Communication hooks beside everything else: ties, shards, schedules, other comm streams."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrad import (
    FlatBucket,
    GradientSync,
    Placement,
    ReductionStep,
    Scheduler,
    Stage,
    Topology,
    Work,
    cut,
)
from pipegrad.comm.process_groups import Groups
from pipegrad.testing import OrderChecker
from tests.support.gradients.cases import Case, give, grads, on, rank, replies, stage, step, tied
from tests.support.gradients.hooks import (
    CAST,
    HERE,
    ONE,
    POWER_SGD,
    Grads,
    alone,
    averaged,
    hooked,
    ours,
    same,
    wire,
)
from tests.support.gradients.placements import By, mesh
from tests.support.pipeline.schedulers import error
from tests.support.rounding import rounding

TWO: list[Case] = []
FOUR: list[Case] = []
two, four = replies(2, TWO), replies(4, FOUR)


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
            assert error(mean, expected) <= rounding(48)


class InTurns(By):
    """Leaves the mean in every other step, the sum in the others."""

    calls = 0

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
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
        at, halves = Topology.create(pipeline=2), cut(tied_model(), 2, boundaries=[2])
        local = [Stage(halves.modules[index], index) for index in at.local_stages]
        chosen: Any = ["pipeline-shared", hooked(hook)]
        scheduler = Scheduler(
            local,
            at,
            schedule="1f1b",
            num_microbatches=2,
            loss_fn=cross_entropy,
            tied=halves.tied,
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
        low = torch.finfo(torch.bfloat16).eps
        assert bf16 == pytest.approx(exact, rel=16**0.5 * low)  # of 16 steps
        assert bf16 != exact
        most = rounding(3 * 32)
        assert power[:3] == pytest.approx(exact[:3], rel=most)  # the third update is the first
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
            for one in sync.main_parameters():
                one.tensor.grad = None
            sync.prepare()
            sync.stage_first_use(0)
            give(module, a=1.0 + rank(), b=10.0 * (1 + rank()))
            sync.stage_final(0)
            sync.finish()
        found[name] = {
            one.record.name: set(one.tensor.grad.tolist())
            for one in sync.main_parameters()
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
    """Comm streams as on devices; one rank's gradient leaves when the other one's already has."""
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
    """A tie over two stages of two replicas: comm streams as on devices give the same bits."""
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
                _, sync = ours(hook, bucket_bytes=512, comm_streams=2)
                sync.close()
            found.append(list(map(str, checker.violations)))
    return found


def test_every_access_is_ordered(two: Any) -> None:
    for reply in two:
        assert reply["watched"] == [[]] * 10
