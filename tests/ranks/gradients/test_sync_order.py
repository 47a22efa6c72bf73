"""When collectives leave, by recorded events and a gate that opens on command."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipegrad import (
    FlatBucket,
    GradientSync,
    ReductionStep,
    Topology,
    Work,
)
from pipegrad.comm.process_groups import Groups
from pipegrad.gradients import param_sync
from pipegrad.gradients.reductions import sync_parameters
from pipegrad.plugins.handler import Done
from pipegrad.testing import OrderChecker
from tests.support.gradients.cases import (
    SHARED,
    give,
    grads,
    rank,
    replicated,
    stage,
    tied,
)
from tests.support.gradients.placements import REPLICATE, SHARD, By, mesh
from tests.support.ordering.programs import OWNED, trained, updated

pytestmark = pytest.mark.ranks(2)


class Gate(By):
    """Reduces over the data dimension; a launch is recorded, then waits until it is let go."""

    def __init__(self) -> None:
        super().__init__("dp", REPLICATE)
        self.events: list[str] = []
        self._changed = threading.Condition()
        self._allowed = 0

    def launch(self, bucket: FlatBucket, reduction: ReductionStep, group: Any) -> Work:
        with self._changed:
            self.events.append(f"launch {bucket.buffer[0]:g}")
            mine = len(self.events)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._allowed >= mine, timeout=60)
        return Done()

    def allow(self, number: int) -> None:
        with self._changed:
            self._allowed = number
            self._changed.notify_all()

    def wait_for(self, number: int) -> bool:
        """Waits until as many launches have begun."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.events) >= number, timeout=60)


def gated(modules: Mapping[int, nn.Module], **options: Any) -> tuple[Gate, GradientSync]:
    gate = Gate()
    topology = Topology.create(pipeline=1, stage_to_rank=[0] * len(modules))
    sync = GradientSync(modules, topology, handlers=[gate], bucket_bytes=0, **options)
    return gate, sync


def test_launches_leave_in_the_order_of_the_plan_and_beside_each_other() -> None:
    """Stages become final 0, 2, 1; the plan says 2, 1, 0. Stage k's gradient is k + 1."""
    modules = {s: stage(w=(1,)) for s in range(3)}
    gate, sync = gated(modules, comm_streams=1)
    sync.prepare()
    for s in (0, 2, 1):
        give(modules[s], w=s + 1.0)
    sync.stage_final(0)
    assert gate.events == []
    sync.stage_final(2)
    assert gate.wait_for(1)
    assert gate.events == ["launch 3"]
    sync.stage_final(1)
    gate.allow(2)
    assert gate.wait_for(3)
    assert gate.events == ["launch 3", "launch 2", "launch 1"]
    gate.allow(3)
    sync.finish()
    assert len(gate.events) == 3
    # One comm stream does not hold up another. The first launch is held back in its comm stream;
    # the second leaves in the other.
    modules = {s: stage(w=(1,)) for s in range(2)}
    gate, sync = gated(modules, comm_streams=2)
    sync.prepare()
    for s in (1, 0):
        give(modules[s], w=s + 1.0)
        sync.stage_final(s)
    assert gate.wait_for(1)
    gate.allow(2)
    sync.finish()
    assert sorted(gate.events) == ["launch 1", "launch 2"]


def test_parameters_leave_one_by_one_inside_the_last_backward() -> None:
    """A chain of three factors: from the second step on, one leaves at the hook of the next."""
    module = stage(p0=torch.tensor([2.0]), p1=torch.tensor([3.0]), p2=torch.tensor([5.0]))
    gate, sync = gated({0: module}, comm_streams=1)
    gate.allow(99)
    for number, microbatches in enumerate((1, 2, 2)):
        sync.prepare()
        seen: list[int] = []
        for left in reversed(range(microbatches)):
            hidden = module.get_parameter("p0") * 1.0

            def look(_: torch.Tensor, late: bool = number > 0 and not left) -> None:
                if late:
                    gate.wait_for(1)
                seen.append(len(gate.events))  # noqa: B023

            hidden.register_hook(look)
            if not left:
                sync.stage_last_backward(0)
            (hidden * module.get_parameter("p1") * module.get_parameter("p2")).backward()
        # Nothing in the first microbatch; p2 before p0, when p1 is there.
        assert seen == ([0, 1] if number else [0])
        sync.stage_final(0)
        sync.finish()
        assert gate.events == [f"launch {microbatches * g}" for g in (6, 10, 15)]
        assert sync.statistics().early == (3 if number else 0)
        factors = {"p0": 15.0, "p1": 10.0, "p2": 6.0}
        assert grads(module) == {name: [g * microbatches] for name, g in factors.items()}
        gate.events.clear()
        module.zero_grad()
    # A partial sum does not leave. Reentrant checkpointing fires a hook twice: the second one
    # decides, as it did in the step before.
    module = stage(w=torch.tensor([2.0]))
    w = module.get_parameter("w")
    sync = replicated(module)
    for number in range(3):
        sync.prepare()
        sync.stage_last_backward(0)
        inner = checkpoint(lambda x: x * w, w * 1.0, use_reentrant=True)
        (inner + w).backward()
        sync.stage_final(0)
        sync.finish()
        assert grads(module) == {"w": [5.0]}  # of w * w + w: 2 w + 1
        assert sync.statistics().early == (number > 0)
        module.zero_grad()


def test_communicators_are_connected_before_comm_streams_begin_in_different_orders() -> None:
    """NCCL, played on gloo: a group's first collective waits for its members, no other does."""
    connected: set[str] = set()
    running: list[dist.Work] = []
    all_reduce = dist.all_reduce

    def lazily(tensor: torch.Tensor, *, group: dist.ProcessGroup, **_: object) -> Any:
        if group.group_name not in connected:
            connected.add(group.group_name)
            dist.barrier(group)
        work = all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        running.append(work)
        return work if group.group_desc == "pipegrad host" else Done()

    names = ("u", "v", "w")[:: 1 - 2 * rank()]  # each rank is ready with another comm stream first
    module = stage(**dict.fromkeys(names, (1,)))
    with (
        mock.patch.object(Groups, "block_host", return_value=False),
        mock.patch.object(dist, "all_reduce", lazily),
    ):
        # `lazily` does not wait, so copies cannot be compared.
        sync = tied(
            module, *"uvw", handlers=[SHARED], bucket_bytes=0, comm_streams=3, check_every=0
        )
        assert len(connected) == 3
        for _ in range(2):  # in the second step they leave as they come
            module.zero_grad()
            sync.prepare()
            sync.stage_last_backward(rank())
            give(module, **dict.fromkeys(names, 1.0))
            sync.stage_final(rank())
            for work in running:
                work.wait()
            sync.finish()
    assert sync.statistics().early == 3
    assert grads(module) == {"u": [2.0], "v": [2.0], "w": [2.0]}


# Gradients that are placed elsewhere, and parameters that come back under the next step's forward.

# Placements, with streams, with a host that runs ahead of them, and with threads alone.
PLACED: dict[str, tuple[dict[str, Any], str]] = {
    "small buckets": ({"bucket_bytes": 0, "comm_streams": 3}, "streams"),
    "wide sums": ({"reduce_dtype": torch.bfloat16, "sum_dtype": torch.float32}, "inline"),
    "master copies": ({"master_dtype": torch.float64}, "threads"),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("options", "mode"), PLACED.values(), ids=PLACED)
def test_whole_steps_of_a_placement_are_right_and_ordered(
    options: dict[str, Any], mode: str
) -> None:
    """Two stages, two copies of each; one parameter on both, one that nobody uses."""
    module = stage(w=(4,), own=(6,), idle=(3,))
    numbers = (1,) * 4 if mode == "threads" else (1, 2, 3, 3)
    host = mock.patch.object(Groups, "block_host", return_value=False)
    with (
        OrderChecker(virtual_streams=mode != "threads") as checker,
        host if mode == "inline" else nullcontext(),
    ):
        sync = tied(module, "w", handlers=[OWNED, "sharded"], **options)
        # Means over two ranks and sums of those come out whole.
        given = lambda step: {"w": rank() + 1.0 + step, "own": 2.0 * (rank() % 2) + step}  # noqa: E731
        found = trained(checker, sync, module, given, numbers)
    assert list(map(str, checker.violations)) == []
    steps = [{"w": 5.0 + 2 * k, "own": 1.0 + k, "idle": 0.0} for k in range(4)]
    assert found == updated(steps)


def test_a_stage_waits_for_its_own_parameters_alone() -> None:
    """Stage 0 has its own while those of stage 1 are held back; waiting for both would fail."""
    modules = {s: stage(w=torch.full((4,), 10.0 * s)) for s in range(2)}
    topology = Topology.create(pipeline=1, stage_to_rank=[0, 0])
    sync = GradientSync(modules, topology, handlers=["sharded"], bucket_bytes=0, comm_streams=2)
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
    gates = [threading.Event(), threading.Event()]

    def held_back(parameters: torch.Tensor, *where: Any, **numels: Any) -> None:
        assert gates[int(parameters[0] > 5)].wait(30)
        sync_parameters(parameters, *where, **numels)

    with mock.patch.object(param_sync, "sync_parameters", held_back):
        sync.prepare()
        for s, module in modules.items():
            give(module, w=1.0)
            sync.stage_final(s)
        sync.finish()
        optimizer.step()
        sync.publish()
        for s, module in modules.items():
            gates[s].set()
            sync.stage_first_use(s)
            assert module.get_parameter("w").tolist() == [[-1.0] * 4, [9.0] * 4][s]
    sync.close()


# A bucket's reduce-scatter runs beside another's all-reduce, and so do their ways back.


WAIT_SECONDS = 30.0


class Meeting:
    """Two collectives, one of rows, that wait for each other: in turns they would never begin."""

    def __init__(self) -> None:
        self.begun = threading.Event(), threading.Event()
        self.met: list[bool] = []

    def begin(self, *, is_rows: bool) -> None:
        self.begun[is_rows].set()
        self.met.append(self.begun[not is_rows].wait(WAIT_SECONDS))


class Meets(By):
    """The second bucket's reduce-scatter and the first one's all-reduce wait for each other."""

    meeting: Meeting

    def launch(self, bucket: FlatBucket, reduction: ReductionStep, group: Any) -> Work:
        is_rows, numel = self._axis == "dp", bucket.buffer.numel()
        if (numel > 100) if is_rows else (numel < 40):
            self.meeting.begin(is_rows=is_rows)
        return super().launch(bucket, reduction, group)


@pytest.mark.ranks(4)
def test_hops_of_successive_buckets_overlap_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = stage(late=(128,), early=(32,))
    rows, sums = Meets("dp", SHARD, "mean"), Meets("outer", REPLICATE, "mean")
    rows.meeting = sums.meeting = Meeting()
    options: dict[str, Any] = {"bucket_bytes": 0, "comm_streams": 2}
    sync = GradientSync({0: module}, mesh(outer=2, dp=2), handlers=[rows, sums], **options)
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
    sync.prepare()
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, float(rank()))
    sync.stage_final(0)
    sync.finish()
    optimizer.step()
    assert rows.meeting.met == [True, True], sync.plan

    back = Meeting()

    def gathered(parameters: torch.Tensor, *where: Any, **numels: Any) -> None:
        back.begin(is_rows=len(parameters) > 100)
        sync_parameters(parameters, *where, **numels)

    monkeypatch.setattr(param_sync, "sync_parameters", gathered)
    sync.publish()
    sync.wait_parameters()
    assert back.met == [True, True], sync.plan
    assert [p.unique().tolist() for p in module.parameters()] == [[-1.5], [-1.5]]
    sync.close()
