"""What the tests of placements share: handlers that place anything, trained models, plain sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pipegrad import GradientHandler, GradientSync, ParameterRecord, Placement, Reduction, Topology
from pipegrad.plugins.handler import Op
from tests.support.gradients import cases

OWNER, WHOLE = Placement.OWNER, Placement.WHOLE
SHARD, REPLICATE = Placement.SHARD, Placement.REPLICATE
Placed = Placement | Mapping[str, Placement]


class By(GradientHandler):
    """Sums along one mesh dimension, ``"pp"`` over a tie's holders; placed alike or by name."""

    def __init__(self, axis: str, placed: Placed, op: Op = "sum") -> None:
        self._axis, self._placed, self._op = axis, placed, op

    def reductions(self, parameters: Any, topology: Topology) -> Iterable[Reduction]:
        for p in parameters:
            placed = self._placed
            placement = placed if isinstance(placed, Placement) else placed.get(p.name)
            if placement is not None and (p.shared or self._axis != "pp"):
                yield Reduction(p, members(topology, self._axis, p), self._op, placement)


def members(topology: Topology, axis: str, record: ParameterRecord) -> tuple[int, ...]:
    """Returns the ranks that a reduction along `axis` is over."""
    return topology.ranks_of(record.holders) if axis == "pp" else topology.ranks_along(axis)


def mesh(**axes: int) -> Topology:
    """A topology of real ranks with these dimensions, outermost first."""
    sizes = {"pp": 1, "dp": 1, **axes}
    made = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return Topology.from_mesh(made)


def alone(module: nn.Module, handler: GradientHandler | str, **options: Any) -> GradientSync:
    """One stage, held by all ranks along "dp"."""
    topology = Topology.create(pipeline=1)
    return GradientSync({0: module}, topology, handlers=[handler], **options)


def compute(
    sync: GradientSync,
    backward: Callable[[], object],
    *,
    divisor: float | None = 1.0,
    late: torch.Tensor | None = None,
) -> None:
    """Runs a step as far as its gradients; one backward for all of this rank's stages.

    Args:
        sync: Whose step it is.
        backward: Adds to the gradients.
        divisor: Is known when the step begins.
        late: A divisor that is known when it ends.
    """
    sync.prepare(divisor=divisor)
    for stage in sync.topology.local_stages:
        sync.stage_first_use(stage)
    backward()
    for stage in reversed(sync.topology.local_stages):
        sync.stage_final(stage)
    sync.finish(divisor=late)


def update(sync: GradientSync, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    sync.publish()
    optimizer.zero_grad()


def stepped(sync: GradientSync) -> dict[str, Any]:
    """Key -> (first element, gradient) of what this rank's optimizer steps."""
    return {
        one.record.key: (one.begin, None if one.tensor.grad is None else one.tensor.grad.clone())
        for one in sync.main_parameters()
    }


def small() -> nn.Module:
    torch.manual_seed(5)
    return cases.stage(a=torch.randn(5, 3), b=torch.randn(67), c=torch.randn(7))


def drawn(at: int, number: int) -> dict[str, torch.Tensor]:
    """Returns gradients of the small model, of a rank in a step."""
    made = torch.Generator().manual_seed(10 * number + at)
    return {n: torch.randn(p.shape, generator=made) for n, p in small().named_parameters()}


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a dense tensor, flat, as they lie in memory."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,)).clone()


class Job:
    """A placed parameter `w` of 40 elements, and plain SGD with a rate of 1."""

    def __init__(self, placed: Placement | GradientHandler | str, **options: Any) -> None:
        handler = By("dp", placed) if isinstance(placed, Placement) else placed
        self.module = cases.stage(w=(40,))
        self.sync = alone(self.module, handler, **options)
        params = self.sync.optimizer_parameters()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(params, lr=1.0)

    def compute(self, gradient: float = 1.0) -> None:
        compute(self.sync, partial(cases.give, self.module, w=gradient))

    def step(self, gradient: float = 1.0) -> None:
        self.compute(gradient)
        update(self.sync, self.optimizer)

    def load(self, value: float) -> None:
        self.module.load_state_dict({"w": torch.full((40,), value)})

    @property
    def arrived(self) -> list[float]:
        self.sync.wait_parameters()
        return self.values

    @property
    def values(self) -> list[float]:
        found: list[float] = self.module.get_parameter("w").unique().tolist()
        return found
