"""What the tests of communication hooks share: models, steps, spies, and hooks of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipegrad import GradientSync, Topology
from tests.support.gradients import cases
from tests.support.gradients.cases import rank, stage
from tests.support.gradients.placements import compute

Grads = list[torch.Tensor]  # all gradients of a step, flat, by step
HERE = "tests.support.gradients.hooks"
CAST = {"bf16_compress_hook": torch.bfloat16, "fp16_compress_hook": torch.float16}


def hooked(hook: object) -> Mapping[str, object]:
    return {"name": "data-parallel", "hook": hook}


def averaged(module: nn.Module, hook: object, **options: Any) -> GradientSync:
    topology = Topology.create(pipeline=1)
    return GradientSync({0: module}, topology, handlers=[hooked(hook)], **options)


def alone(hook: object, *given: float | None, shape: tuple[int, ...] = (3,), **options: Any) -> Any:
    """One parameter's gradient after each step, of a rank that gives these."""
    module = stage(w=shape)
    sync = averaged(module, hook, **options)
    found = []
    for value in given:
        w = cases.step(sync, module, **({} if value is None else {"w": value}))["w"]
        found.append(None if w is None else torch.tensor(w).flatten().tolist())
        module.zero_grad()
    sync.close()
    return found


def same(one: Grads, other: Grads) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


def model() -> nn.Sequential:
    torch.manual_seed(3)
    layers = nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4)
    return nn.Sequential(*layers)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank()))


def flat(module: nn.Module) -> torch.Tensor:
    grads = [p.grad for p in module.parameters()]
    return torch.cat([g.flatten() for g in grads if g is not None]).clone()


def ours(
    hook: object, num_steps: int = 5, *, lr: float = 0.1, **options: Any
) -> tuple[Grads, GradientSync]:
    """Trains the model; the sync is still open."""
    module = model()
    sync = averaged(module, hook, **options)
    return go_on(sync, module, range(num_steps), lr=lr), sync


def go_on(sync: GradientSync, module: nn.Module, steps: range, *, lr: float = 0.1) -> Grads:
    optimizer, found = torch.optim.SGD(module.parameters(), lr=lr), []
    for step in steps:
        compute(sync, lambda step=step: module(batch(step)).square().mean().backward())  # type: ignore[misc]
        found.append(flat(module))
        optimizer.step()
        optimizer.zero_grad()
    return found


def torchs(hook: Callable[..., Any], state: object) -> Grads:
    """Trains the model as DistributedDataParallel does, in one bucket as well."""

    def any_backend(state: Any, bucket: Any) -> Any:  # torch refuses bfloat16 on gloo by its name
        return hook(state, bucket)

    any_backend.__annotations__.clear()  # which are strings here, and torch compares types
    module, found = DistributedDataParallel(model()), []
    module.register_comm_hook(state, any_backend)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(5):
        module(batch(step)).square().mean().backward()
        found.append(flat(module))
        optimizer.step()
        optimizer.zero_grad()
    return found


# Hooks of one's own, by ``module:attr``.


def scaled(group: dist.ProcessGroup, bucket: Any, *, by: float) -> Any:
    """In place, and its future gives a list."""
    bucket.buffer().mul_(by / dist.get_world_size(group))
    return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()


def too_short(group: dist.ProcessGroup, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer()[:1].clone(), group=group, async_op=True).get_future()


def no_future(_: dist.ProcessGroup, bucket: Any) -> Any:
    return bucket.buffer()


def steps_parameters(_: dist.ProcessGroup, bucket: Any) -> Any:
    return bucket.parameters()


def fails_later(group: dist.ProcessGroup, bucket: Any) -> Any:
    def fail(_: Any) -> Any:
        raise ValueError("a callback gave up")

    return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(fail)
