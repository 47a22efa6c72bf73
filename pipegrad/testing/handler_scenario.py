"""Scenario: plans and steps of a small model with some handlers. HandlerContract checks them.

The model has a tie across ranks, a tie that may be within a rank, three dtypes and a frozen
parameter. Gradients are fixed numbers, because then the result of one process is plain arithmetic.

[Note: hash seeds] Plans are also made in processes with other hash seeds, because a handler must
not depend on the order of a set. One process for each hash seed plans for all handlers, because
starting Python and importing torch takes seconds.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store

from pipegrad import GradientSync, ParameterRecord, Topology, handlers, make_manifest, make_plan
from pipegrad.errors import DriftError, StepError
from pipegrad.model.manifest import Manifest
from pipegrad.plan.options import GradientOptions
from pipegrad.plan.plan import Plan
from pipegrad.plugins.handler import HandlerSpec
from pipegrad.testing.ordering.checker import OrderChecker

Specs = Sequence[str | Mapping[str, object]]

LIVE: Final = Topology.build(axes=(("pp", 2), ("dp", 2)))
TOPOLOGIES: Final = {
    "1 rank": Topology.build(axes=(("pp", 1), ("dp", 1))),
    "pp 2": Topology.build(axes=(("pp", 2), ("dp", 1))),
    "pp 2 x dp 2": LIVE,
    "pp 2, 4 stages": Topology.build(axes=(("pp", 2), ("dp", 1)), stage_to_rank=(0, 1, 0, 1)),
    "dp 3": Topology.build(axes=(("pp", 1), ("dp", 3))),
}
_OPTIONS: Final[dict[str, Any]] = {"bucket_bytes": 128, "comm_streams": 2, "allow_unsynced": ("*",)}

_PARAMETERS: Final = {
    "weight": ((5, 3), torch.float32),
    "weight_bf16": ((7,), torch.bfloat16),
    "weight_f64": ((4,), torch.float64),
    "tied": ((2, 3), torch.float32),
    "tied_bf16": ((6,), torch.bfloat16),
    "frozen": ((3,), torch.float32),
}
STEPS: Final = ("first", "again", "missing")
# Ranks that have a gradient in the step "missing".
_RANKS_WITH_GRADIENT: Final = {"weight": (1, 3), "weight_f64": (0, 1, 2, 3), "tied": (3,)}
_ENDED = "rehearsal/ended"
_LATE_SECONDS = 0.3


@dataclass(frozen=True)
class Piece:
    """The elements of a parameter that the optimizer of one rank steps.

    Attributes:
        begin: Number of the first element, in the order of memory.
        end: Number after the last element.
        gradient: Gradient of these elements, ``(end - begin,)``; None without a gradient.
    """

    begin: int
    end: int
    gradient: torch.Tensor | None

    def of(self, whole: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the same elements of a whole parameter or gradient."""
        return None if whole is None else whole.flatten()[self.begin : self.end]


Pieces = dict[str, Piece]
Parameters = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Seen:
    """The results of one rank.

    Attributes:
        digest: Digest of its plan.
        pieces: Step -> name -> the piece that this rank steps. Other parameters have no entry.
        second_finish: The error of a second finish, or "nothing".
        after_second_finish: Name -> piece, after the second finish.
        parameters: Step -> name -> the parameter after all ranks have updated and published it. It
            is zeros before the first step, and gradients are subtracted.
        violations: Violations that the OrderChecker found.
    """

    digest: str
    pieces: dict[str, Pieces]
    second_finish: str
    after_second_finish: Pieces
    parameters: dict[str, Parameters]
    violations: list[str]


def importable(spec: HandlerSpec) -> str | Mapping[str, object]:
    """Returns a handler in a form that other processes can import.

    Raises:
        TypeError: If it is an instance.
    """
    if isinstance(spec, Mapping):
        return {**spec, "name": importable(spec["name"])}  # type: ignore[arg-type]
    if isinstance(spec, type):
        return f"{spec.__module__}:{spec.__qualname__}"
    if isinstance(spec, str):
        return spec
    raise TypeError(f"every rank makes a handler of its own: give the class of {spec!r}, or a name")


def plans(specs: Specs) -> dict[str, list[Plan]]:
    """Returns every rank's plan in every topology. Each rank has its own instances."""
    return {
        name: [plan(topology.at(rank), instances(specs)) for rank in topology.ranks]
        for name, topology in TOPOLOGIES.items()
    }


def plans_as_text(specs: Specs) -> str:
    """Returns the plans of all topologies as text, with digests."""
    return "\n".join(
        f"{name}: {p.digest}\n{p}" for name, every in plans(specs).items() for p in every
    )


def plan(topology: Topology, chosen: Sequence[tuple[str, Any]]) -> Plan:
    """Returns the plan of ``topology.rank``, made offline."""
    return make_plan(_manifest(topology), topology, chosen, GradientOptions(**_OPTIONS))


def records(topology: Topology) -> tuple[ParameterRecord, ...]:
    """Returns the records that handlers get on ``topology.rank``."""
    return _manifest(topology).records(topology)


def instances(specs: Specs) -> list[tuple[str, Any]]:
    """Returns names and new instances of handlers."""
    return [(name, resolved.plugin) for name, resolved in handlers.resolve_all(specs).items()]


def gradient_of(step: str, rank: int, name: str) -> torch.Tensor | None:
    """Returns the gradient that a rank of the live topology has before any reduction."""
    if name == "frozen" or (step == "missing" and rank not in _RANKS_WITH_GRADIENT.get(name, ())):
        return None
    shape, dtype = _PARAMETERS[name]
    # Every rank and parameter has another scale, because a wrong rank's gradient must be noticed.
    scale = math.sqrt(2 + rank + 4 * list(_PARAMETERS).index(name))
    values = torch.linspace(1, 2, math.prod(shape), dtype=torch.float64) * scale
    return values.reshape(shape).to(dtype)


def holders(rank: int, name: str) -> list[int]:
    """Returns the ranks of the live topology that hold a parameter of `rank`, itself included."""
    stages = set(LIVE.at(rank).local_stages)
    if name in _ties(LIVE.num_stages):
        stages = _ties(LIVE.num_stages)[name]
    return [other for other in LIVE.ranks if stages & {*LIVE.at(other).local_stages}]


def whole(step: str, rank: int, name: str, *, is_apart: bool = False) -> torch.Tensor | None:
    """Returns the gradient of one process, in float64; None if no rank has a gradient."""
    replica = LIVE.at(rank).ranks_along(LIVE.pipeline) if is_apart else LIVE.ranks
    ranks = [other for other in holders(rank, name) if other in replica]
    gradients = [gradient_of(step, other, name) for other in ranks]
    present = [gradient.double() for gradient in gradients if gradient is not None]
    num_replicas = 1 if is_apart else LIVE.size(LIVE.data)
    return torch.stack(present).sum(0) / num_replicas if present else None


def steps(specs: Specs) -> Seen:
    """Runs all steps under an OrderChecker; returns the results of this rank.

    Every rank of a process group like the live topology must call it.
    """
    topology, rank = Topology.create(pipeline=2), dist.get_rank()
    (stage,) = topology.local_stages
    module = _stage(stage, topology.num_stages)
    pieces: dict[str, Pieces] = {}
    parameters_before: list[Parameters] = []
    second_finish = "nothing"
    with OrderChecker() as checker:
        sync = GradientSync(
            {stage: module},
            topology,
            tied=_shared(topology.num_stages),
            handlers=specs,
            **_OPTIONS,
        )
        # With a rate of 1, a step from zeros leaves the negative gradient in the parameter.
        optimizer = torch.optim.SGD(sync.optimizer_parameters(), lr=1.0)
        for step in STEPS:
            optimizer.zero_grad()
            sync.prepare()
            sync.stage_first_use(stage)
            parameters_before.append(_parameters(module))
            for name, parameter in module.named_parameters():
                gradient = gradient_of(step, rank, name)
                if gradient is not None:
                    (parameter * gradient).sum().backward()
            # A wrong handler may not wait for the last rank. This rank is late, because only then
            # its peers can be seen to finish too early.
            if step == "first" and rank == max(topology.ranks):
                _wait_for_early_peers()
            sync.stage_final(stage)
            with suppress(DriftError):  # the contract has a better message for a wrong gradient
                sync.finish()
            pieces[step] = _pieces(sync)
            _store().set(_ENDED, "")
            optimizer.step()
            sync.publish()
        sync.wait_parameters()
        parameters_before.append(_parameters(module))
        try:
            sync.finish()
        except StepError as error:
            second_finish = f"StepError: {error}"
        after = _pieces(sync)
        sync.close()
    parameters = dict(zip(STEPS, parameters_before[1:], strict=True))
    violations = list(map(str, checker.violations))
    return Seen(sync.plan.digest, pieces, second_finish, after, parameters, violations)


def _wait_for_early_peers() -> None:
    """Waits a short time for peers that finish without this rank's part."""
    deadline = time.monotonic() + _LATE_SECONDS
    while not _store().check([_ENDED]) and time.monotonic() < deadline:
        time.sleep(0.01)


def _store() -> Store:
    default_group = dist.group.WORLD
    assert default_group is not None
    return default_group.get_group_store()


def _pieces(sync: GradientSync) -> Pieces:
    return {
        main.record.name: Piece(
            main.begin,
            main.begin + main.tensor.numel(),
            None if main.tensor.grad is None else main.tensor.grad.flatten().clone(),
        )
        for main in sync.main_parameters()
    }


def _parameters(module: nn.Module) -> Parameters:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def _manifest(topology: Topology) -> Manifest:
    number = topology.num_stages
    modules = {stage: _stage(stage, number) for stage in range(number)}
    return make_manifest(modules, topology, tied=_shared(number))


def _stage(stage: int, num_stages: int) -> nn.Module:
    module = nn.Module()
    for name, (shape, dtype) in _PARAMETERS.items():
        if stage in _ties(num_stages).get(name, {stage}):
            zeros = torch.zeros(shape, dtype=dtype)
            setattr(module, name, nn.Parameter(zeros, requires_grad=name != "frozen"))
    return module


def _ties(num_stages: int) -> dict[str, set[int]]:
    """Returns the holders of each tie: 0 and the last stage, or 0 and a middle stage."""
    return {"tied": {0, num_stages - 1}, "tied_bf16": {0, num_stages // 2}}


def _shared(num_stages: int) -> list[dict[int, str]]:
    ties = _ties(num_stages).items()
    return [dict.fromkeys(sorted(stages), name) for name, stages in ties if len(stages) > 1]


def plans_under_seeds(specs: Specs, *seeds: str) -> list[str]:
    """Returns the plans as text, made by a process for each PYTHONHASHSEED.

    Raises:
        RuntimeError: If one of them cannot plan.
    """
    # Another `sys.path` needs another process, because a process finds modules by its path.
    pools = [_process(seed, tuple(sys.path)) for seed in seeds]
    try:
        made = [pool.submit(_plans_there, specs, Path.cwd(), {**os.environ}) for pool in pools]
        return [each.result() for each in made]
    except BrokenProcessPool:
        _process.cache_clear()  # others are started for the next handler
        raise RuntimeError("it ended its process before it made a plan") from None
    except BaseException as error:  # noqa: BLE001 - SystemExit too
        raise RuntimeError("".join(traceback.format_exception(error))) from None


@cache
def _process(seed: str, _: tuple[str, ...]) -> ProcessPoolExecutor:
    """Starts a Python process with its own hash seed."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with mock.patch.dict(os.environ, PYTHONHASHSEED=seed):
        pool.submit(int)  # starts it
    return pool


def _plans_there(specs: Specs, folder: Path, environment: Mapping[str, str]) -> str:
    os.chdir(folder)
    os.environ.update(environment)
    return plans_as_text(specs)
