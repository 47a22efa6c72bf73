"""What the tests of GradientSync share: small models, and what happens to their gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipegrad import (
    GradientSync,
    Scheduler,
    Stage,
    Topology,
)
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.pipeline_shared import PipelineShared

SHARED, DATA = "pipegrad_handlers.pipeline_shared:PipelineShared", "data-parallel"
ALONE = Topology.build(axes=(("pp", 1), ("dp", 1)))  # one process, which needs no group


def rank() -> int:
    return dist.get_rank()


def outcome(function: Callable[[], object]) -> str:
    """Returns what `function` raised, or what it returned."""
    try:
        found = function()
    except Exception as error:  # noqa: BLE001 - whatever it is, is asserted
        return f"{type(error).__name__}: {error}"
    return repr(found)


def stage(**parameters: object) -> nn.Module:
    """A module of parameters: tensors as they are, sequences as shapes of zeros."""
    module = nn.Module()
    for name, given in parameters.items():
        tensor = given if isinstance(given, torch.Tensor) else torch.zeros(given)  # type: ignore[call-overload]
        made = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
        setattr(module, name, made)
    return module


def give(module: nn.Module, **gradients: float | torch.Tensor) -> None:
    """Runs a backward that adds these to the gradients."""
    for name, gradient in gradients.items():
        (module.get_parameter(name) * gradient).sum().backward()


def grads(module: nn.Module) -> dict[str, Any]:
    return {
        name: None if p.grad is None else p.grad.tolist() for name, p in module.named_parameters()
    }


def tied(module: nn.Module, *names: str, **options: Any) -> GradientSync:
    """A pipeline of two stages, one a rank, which hold `names` together."""
    topology = Topology.create(pipeline=2)
    options = {"handlers": [PipelineShared, DataParallel], **options}
    here = topology.coordinate("pp")
    return GradientSync({here: module}, topology, tied=[[name] for name in names], **options)


def replicated(module: nn.Module, **options: Any) -> GradientSync:
    """One stage, a copy on every rank; means unless told otherwise."""
    options = {"handlers": [DATA], **options}
    return GradientSync({0: module}, Topology.create(pipeline=1), **options)


def scheduled(module: nn.Module, *, pipeline: int, **options: Any) -> Scheduler:
    """One stage a rank; by 1f1b in two microbatches with a mean of squares, or as options say."""
    topology = Topology.create(pipeline=pipeline)
    usual = {"schedule": "1f1b", "num_microbatches": 2, "loss_fn": nn.functional.mse_loss}
    stages = [Stage(module, topology.coordinate("pp"))]
    return Scheduler(stages, topology, **{**usual, **options})


def in_float32(module: nn.Module) -> nn.Module:
    """Has gradients of parameters of lower precision accumulate in fp32."""
    for parameter in module.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.grad_dtype = torch.float32
    return module


def step(
    sync: GradientSync,
    module: nn.Module,
    *,
    divisor: Any = 1.0,  # a float or None; for mypy any ** of tensors may be it
    **gradients: float | torch.Tensor,
) -> dict[str, Any]:
    sync.prepare(divisor=divisor)
    give(module, **gradients)
    for at in sync.topology.local_stages:
        sync.stage_final(at)
    sync.finish()
    return grads(module)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().view(torch.int32).flatten().tolist()


class Operators(TorchDispatchMode):
    """Counts operators by name, in this thread; of tensors that have so many elements."""

    def __init__(self, least_numel: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.least_numel, self.counts = least_numel, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.").removesuffix(".Tensor").removesuffix(".default")
        given = [t for arg in args for t in (arg if isinstance(arg, list) else [arg])]
        sizes = [t.numel() for t in given if isinstance(t, torch.Tensor)]
        self.counts[name] += max(sizes, default=0) >= self.least_numel
        return func(*args, **(kwargs or {}))


class NewStorage(TorchDispatchMode):
    """Counts the bytes of every storage that an operator makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage.data_ptr() not in known:
                self.nbytes += storage.nbytes()
        return result
