"""What the tests of GradientSync share: cases that run on every rank, and their small models.

A test module lists its cases with `on`, and asserts what came back: one mapping a rank, with each
case's plain values and seconds by name. If all tests of a module run, the cases of a world share a
spawn. If only some of them run, each case that they ask for has a spawn of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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
from pipegrad.testing import run_ranks
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.pipeline_shared import PipelineShared

Case = Callable[[], Any]
Replies = list[dict[str, Any]]  # of each rank, by case
SHARED, DATA = "pipegrad_handlers.pipeline_shared:PipelineShared", "data-parallel"


def on(world: list[Case]) -> Callable[[Case], Case]:
    """Makes a function one of the cases of a world."""

    def add(case: Case) -> Case:
        world.append(case)
        return case

    return add


def replies(num_ranks: int, cases: list[Case]) -> Any:
    """Returns a fixture: a world of cases runs once for its module."""

    @pytest.fixture(scope="module")
    def replies(request: pytest.FixtureRequest) -> list[Reply]:
        world = _World(num_ranks, cases)
        tests = {name for name in vars(request.module) if name.startswith("test_")}
        if tests <= {
            item.originalname
            for item in request.session.items
            if isinstance(item, pytest.Function) and item.module is request.module
        }:
            world.run(cases)
        return [Reply(world, rank) for rank in range(num_ranks)]

    return replies


class _World:
    """What each rank replied in the cases that have run."""

    def __init__(self, num_ranks: int, cases: list[Case]) -> None:
        self.cases = {case.__name__: case for case in cases}
        self.known: Replies = [{} for _ in range(num_ranks)]

    def run(self, cases: list[Case]) -> None:
        replies = run_ranks(run_cases, len(self.known), cases)
        for known, reply in zip(self.known, replies, strict=True):
            known.update(reply)


class Reply(Mapping[str, Any]):
    """What one rank replied, by case; a case that has not run yet runs when it is looked up."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world, self._rank = world, rank

    def __getitem__(self, name: str) -> Any:
        known = self._world.known[self._rank]
        if name not in known:
            self._world.run([self._world.cases[name.removesuffix(" seconds")]])
        return known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._world.cases)

    def __len__(self) -> int:
        return len(self._world.cases)


def run_cases(cases: list[Case]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for case in cases:
        began = time.monotonic()
        results[case.__name__] = case()
        results[f"{case.__name__} seconds"] = time.monotonic() - began
    return results


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


def in_float32(module: nn.Module) -> nn.Module:
    """Has gradients of parameters of lower precision accumulate in fp32."""
    for parameter in module.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.grad_dtype = torch.float32
    return module


def step(
    sync: GradientSync, module: nn.Module, **gradients: float | torch.Tensor
) -> dict[str, Any]:
    sync.prepare()
    give(module, **gradients)
    for at in sync.topology.local_stages:
        sync.stage_final(at)
    sync.finish()
    return grads(module)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().view(torch.int32).flatten().tolist()


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


class Silent(GradientHandler):
    """Plans what pipeline-shared does, and sends nothing."""

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        return [Reduction(p, topology.ranks_of(p.holders)) for p in parameters if p.shared]

    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        return Done()


class Done:
    def wait(self) -> None:
        pass
