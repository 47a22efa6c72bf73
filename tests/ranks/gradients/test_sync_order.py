"""When collectives leave, by recorded events and a gate that opens on command."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    GradientHandler,
    GradientSync,
    ParameterRecord,
    Reduction,
    ReductionStep,
    Topology,
    Work,
)
from pipegrad.comm.process_groups import Groups
from pipegrad.optimizer import param_sync
from pipegrad.reduce.reductions import sync_parameters
from pipegrad.testing import OrderChecker
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.gradients.cases import (
    DATA,
    SHARED,
    Case,
    Done,
    Replies,
    give,
    grads,
    on,
    rank,
    replicated,
    replies,
    stage,
    tied,
)
from tests.support.ordering.programs import OWNED, trained, updated

FOUR: list[Case] = []
TWO: list[Case] = []


four = replies(4, FOUR)
two = replies(2, TWO)


class Gate(GradientHandler):
    """Reduces over the data dimension; a launch is recorded, then waits until it is let go."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._changed = threading.Condition()
        self._allowed = 0

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        return [Reduction(p, topology.ranks_along("dp")) for p in parameters]

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        with self._changed:
            self.events.append(f"launch {bucket.buffer[0]:g}")
            mine = sum(event.startswith("launch") for event in self.events)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._allowed >= mine, timeout=60)
        return Done()

    def note(self, event: str) -> None:
        with self._changed:
            self.events.append(event)

    def allow(self, number: int) -> None:
        with self._changed:
            self._allowed = number
            self._changed.notify_all()

    def wait_for(self, number: int) -> bool:
        """Waits until as many launches have begun."""
        with self._changed:
            return self._changed.wait_for(
                lambda: sum(e.startswith("launch") for e in self.events) >= number, timeout=60
            )


def gated(modules: Mapping[int, nn.Module], **options: Any) -> tuple[Gate, GradientSync]:
    gate = Gate()
    topology = Topology.create(pipeline=1, stage_to_rank=[0] * len(modules))
    sync = GradientSync(modules, topology, handlers=[gate], bucket_bytes=0, **options)
    return gate, sync


@on(TWO)
def order_of_stages() -> Any:
    """Stages become final 0, 2, 1; the plan says 2, 1, 0. Stage k's gradient is k + 1."""
    modules = {s: stage(w=(1,)) for s in range(3)}
    gate, sync = gated(modules, comm_streams=1)
    sync.prepare()
    for s in (0, 2, 1):
        give(modules[s], w=s + 1.0)
    gate.note("final 0")
    sync.stage_final(0)
    gate.note("final 2")
    sync.stage_final(2)
    begun = gate.wait_for(1)
    gate.note("final 1")
    sync.stage_final(1)
    gate.allow(2)
    begun = gate.wait_for(3) and begun
    gate.note("finish")
    gate.allow(3)
    sync.finish()
    return begun, gate.events


def test_launches_leave_before_finish_in_the_order_of_the_plan(two: list[dict[str, Any]]) -> None:
    events = [
        "final 0", "final 2", "launch 3", "final 1", "launch 2", "launch 1", "finish",
    ]  # fmt: skip
    assert [reply["order_of_stages"] for reply in two] == [(True, events)] * 2


@on(TWO)
def comm_streams_run_beside_each_other() -> Any:
    """The first launch is held back in its comm stream; the second leaves in the other."""
    modules = {s: stage(w=(1,)) for s in range(2)}
    gate, sync = gated(modules, comm_streams=2)
    sync.prepare()
    for s in (1, 0):
        give(modules[s], w=s + 1.0)
        sync.stage_final(s)
    begun = gate.wait_for(2)
    gate.allow(2)
    sync.finish()
    return begun, sorted(gate.events)


def test_one_comm_stream_does_not_hold_up_another(two: list[dict[str, Any]]) -> None:
    right = (True, ["launch 1", "launch 2"])
    assert [reply["comm_streams_run_beside_each_other"] for reply in two] == [right] * 2


@on(TWO)
def early() -> Any:
    """A chain of three factors: from the second step on, the last leaves inside backward."""
    module = stage(p0=torch.tensor([2.0]), p1=torch.tensor([3.0]), p2=torch.tensor([5.0]))
    gate, sync = gated({0: module}, comm_streams=1)
    gate.allow(99)
    found: list[Any] = []
    for microbatches in (1, 2, 2):
        sync.prepare()
        seen: list[int] = []
        for microbatch in range(microbatches):
            last = microbatch == microbatches - 1
            hidden = module.get_parameter("p0") * 1.0

            def look(gradient: torch.Tensor, last: bool = last, seen: list[int] = seen) -> None:
                del gradient
                if last and found:
                    gate.wait_for(2)
                seen.append(sum(e.startswith("launch") for e in gate.events))

            hidden.register_hook(look)
            if last:
                sync.stage_last_backward(0)
            (hidden * module.get_parameter("p1") * module.get_parameter("p2")).backward()
        inside = seen[:]
        sync.stage_final(0)
        sync.finish()
        found.append((inside, gate.events[:], sync.statistics().early, grads(module)))
        gate.events.clear()
        module.zero_grad()
    return found


def test_parameters_leave_one_by_one_inside_the_last_backward(two: list[dict[str, Any]]) -> None:
    def launched(factor: int) -> list[str]:
        return [f"launch {factor * g}" for g in (6, 10, 15)]

    def gradients(factor: int) -> dict[str, list[float]]:
        return {"p0": [15.0 * factor], "p1": [10.0 * factor], "p2": [6.0 * factor]}

    for found in (reply["early"] for reply in two):
        assert found[0] == ([0], launched(1), 0, gradients(1))
        for inside, events, number, values in found[1:]:
            assert (events, values) == (launched(2), gradients(2))
            assert inside == [0, 2]  # nothing in the first microbatch; p2 and p1 before p0
            assert number == 3


@on(TWO)
def partial_sums() -> Any:
    """Reentrant checkpointing fires a hook twice: then the end of the stage decides."""
    module = stage(w=torch.tensor([2.0]))
    w = module.get_parameter("w")
    sync = replicated(module)
    found = []
    for _ in range(3):
        sync.prepare()
        sync.stage_last_backward(0)
        inner = checkpoint(lambda x: x * w, w * 1.0, use_reentrant=True)
        (inner + w).backward()
        sync.stage_final(0)
        sync.finish()
        found.append((grads(module), sync.statistics().early))
        module.zero_grad()
    return found


def test_a_partial_sum_does_not_leave(two: list[dict[str, Any]]) -> None:
    """w * w + w has the gradient 2 w + 1 = 5."""
    assert [reply["partial_sums"] for reply in two] == [[({"w": [5.0]}, 0)] * 3] * 2


@on(TWO)
def connected_lazily() -> Any:
    """NCCL, played on gloo: a group's first collective waits for its members, no other does."""
    connected: set[str] = set()
    running: list[dist.Work] = []
    all_reduce = dist.all_reduce

    def lazily(tensor: torch.Tensor, *, group: dist.ProcessGroup, **_: object) -> Done:
        if group.group_name not in connected:
            connected.add(group.group_name)
            dist.barrier(group)
        work = all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        running.append(work)
        return Done()

    names = ("u", "v", "w")[:: 1 - 2 * rank()]  # each rank is ready with another comm stream first
    module = stage(**dict.fromkeys(names, (1,)))
    with (
        mock.patch.object(Groups, "block_host", return_value=False),
        mock.patch.object(dist, "all_reduce", lazily),
    ):
        # `lazily` does not wait, so copies cannot be compared.
        options = {"bucket_bytes": 0, "comm_streams": 3, "check_every": 0}
        sync = tied(module, "u", "v", "w", handlers=[PipelineShared], **options)
        connected_first = len(connected)
        for _ in range(2):  # in the second step they leave as they come
            module.zero_grad()
            sync.prepare()
            sync.stage_last_backward(rank())
            give(module, **dict.fromkeys(names, 1.0))
            sync.stage_final(rank())
            for work in running:
                work.wait()
            sync.finish()
    return connected_first, sync.statistics().early, grads(module)


def test_communicators_are_connected_before_comm_streams_begin_in_different_orders(
    two: list[dict[str, Any]],
) -> None:
    right = (3, 3, {"u": [2.0], "v": [2.0], "w": [2.0]})
    assert [reply["connected_lazily"] for reply in two] == [right] * 2


# Gradients that are placed elsewhere, and parameters that come back under the next step's forward.

PLACED: dict[str, dict[str, Any]] = {
    "owner": {"handlers": [OWNED, DATA]},
    "shard": {"handlers": [SHARED, "sharded"]},
    "both": {"handlers": [OWNED, "sharded"]},
    "both, small buckets": {"handlers": [OWNED, "sharded"], "bucket_bytes": 0, "comm_streams": 3},
    "both, wire of its own": {"handlers": [OWNED, "sharded"], "reduce_dtype": torch.float64},
    "both, wide sums": {
        "handlers": [OWNED, "sharded"],
        "reduce_dtype": torch.bfloat16,
        "sum_dtype": torch.float32,
    },
    "both, master copies": {"handlers": [OWNED, "sharded"], "master_dtype": torch.float64},
}
# Comm streams are streams, behind threads or with a host that runs ahead; or there are threads
# alone.
MODES = ("streams", "inline", "threads")
PRODUCERS = (1, 2, 3, 3)


def used(step: int) -> dict[str, float]:
    """Gradients of this rank, one of four: means over two and sums of those come out whole."""
    return {"w": rank() + 1.0 + step, "own": 2.0 * (rank() % 2) + step}


def watched(
    mode: str,
    make: Callable[[nn.Module], GradientSync],
    module: nn.Module,
    given: Callable[[int], Mapping[str, float]] = used,
) -> tuple[Any, list[str]]:
    """Trains a module under a checker; returns its parameters at each forward, and violations."""
    host = mock.patch.object(Groups, "block_host", return_value=False)
    with (
        OrderChecker(virtual_streams=mode != "threads") as checker,
        host if mode == "inline" else nullcontext(),
    ):
        numbers = (1,) * len(PRODUCERS) if mode == "threads" else PRODUCERS
        found = trained(checker, make(module), module, given, numbers)
    return found, list(map(str, checker.violations))


@on(FOUR)
def placed() -> Any:
    """Two stages, two copies of each; one parameter on both, one that nobody uses."""
    return {
        (name, mode): watched(
            mode,
            lambda module, options=options: tied(module, "w", **options),  # type: ignore[misc]
            stage(w=(4,), own=(6,), idle=(3,)),
        )
        for name, options in PLACED.items()
        for mode in MODES
    }


@on(FOUR)
def chain() -> Any:
    """Four stages: the ranks in between pass gradients down and parameters up."""

    def owned(module: nn.Module) -> GradientSync:
        topology = Topology.create(pipeline=4)
        return GradientSync({rank(): module}, topology, tied=[["w"]], handlers=[OWNED])

    def given(step: int) -> dict[str, float]:
        return {"w": used(step)["w"]}

    return {mode: watched(mode, owned, stage(w=(4,)), given) for mode in MODES}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PLACED)
def test_whole_steps_of_a_placement_are_right_and_ordered(
    name: str, mode: str, four: Replies
) -> None:
    steps = [{"w": 5.0 + 2 * k, "own": 1.0 + k, "idle": 0.0} for k in range(len(PRODUCERS))]
    for reply in four:
        assert reply["placed"][name, mode] == (updated(steps), [])


@pytest.mark.parametrize("mode", MODES)
def test_a_chain_of_ranks_is_right_and_ordered(mode: str, four: Replies) -> None:
    steps = [{"w": 10.0 + 4 * k} for k in range(len(PRODUCERS))]
    assert [reply["chain"][mode] for reply in four] == [(updated(steps), [])] * 4


@on(TWO)
def first_uses() -> Any:
    """What moves back is held back; each stage is let go, then waits for its own parameters."""
    modules = {s: stage(w=torch.full((4,), 10.0 * s)) for s in range(2)}
    topology = Topology.create(pipeline=1, stage_to_rank=[0, 0])
    sync = GradientSync(modules, topology, handlers=["sharded"], bucket_bytes=0, comm_streams=2)
    optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
    gates = [threading.Event(), threading.Event()]

    def held_back(parameters: torch.Tensor, *where: Any, **numels: Any) -> None:
        assert gates[int(parameters[0] > 5)].wait(30)
        sync_parameters(parameters, *where, **numels)

    found = []
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
            found.append(module.get_parameter("w").tolist())
    sync.close()
    return found


def test_a_stage_waits_for_its_own_parameters_alone(two: Replies) -> None:
    """Stage 0 has its own while those of stage 1 are held back; waiting for both would fail."""
    assert [reply["first_uses"] for reply in two] == [[[-1.0] * 4, [9.0] * 4]] * 2
