"""Profile of one stage: its forward and backward alone, and a microbatch's memory between them.

While the stage runs here, its modules hold copies: its parameters are other leaves in the same
memory, and its buffers are clones. Therefore no gradient, hook, buffer or random state of the stage
changes, whatever is raised, and however its forward reaches its modules.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipegrad.comm import sync_points
from pipegrad.errors import ScheduleError
from pipegrad.model.dtensor import local
from pipegrad.pipeline.loss_message import loss_parts
from pipegrad.pipeline.split_backward import (
    WeightProduct,
    accumulate,
    backward_inputs,
    by_parameter,
    mark,
)
from pipegrad.pipeline.stage import Stage
from pipegrad.pipeline.trees import flattened
from pipegrad.simulation.costs import StageCosts

_WARM_UP = 2  # the first passes compile, and allocate gradients


def clock(device: torch.device) -> float:
    """Returns the time of the host after a device has finished all its work."""
    sync_points.finish_device(device)
    return time.perf_counter()


class StageAlone:
    """One stage without its pipeline, and one microbatch."""

    def __init__(
        self,
        stage: Stage,
        inputs: Sequence[object],
        received: Sequence[Tensor],
        *,
        target: object,
        loss_fn: Callable[..., object] | None,
        is_weighted: bool,
        splits: bool,
        device: torch.device,
    ) -> None:
        self._stage = stage
        self._parameters = list(stage.module.parameters())
        copies: dict[int, Tensor] = {
            id(p): p.detach().requires_grad_(p.requires_grad) for p in self._parameters
        }
        self._leaves = list(copies.values())
        copies |= {id(b): b.clone() for b in stage.module.buffers()}
        self._copies = copies
        self._inputs = inputs
        self._received = received
        self._target = target
        self._loss_fn = loss_fn
        self._is_weighted = is_weighted
        self._splits = splits
        self._device = device
        # The memory of a stage's inputs is counted separately.
        leaves = [leaf for _, leaf in flattened([*inputs, target])[0]]
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._held_anyway = set(_storages([*copies.values(), *given]))
        mark(self._leaves if splits else ())  # as before a first step: [Note: direct]

    def measured(self, repeats: int) -> tuple[tuple[Tensor, ...], StageCosts]:
        """Returns the outputs without losses, and a microbatch's costs without the outputs' bytes.

        The costs do not include memory of buckets and of the optimizer. Times are medians of
        `repeats`.
        """
        with self._apart():
            outputs, _ = self._forward()
            timed = [self._timed() for _ in range(_WARM_UP + repeats)][_WARM_UP:]
            activations, factors = self._held()
        forward, backward, weights = map(statistics.median, zip(*timed, strict=True))
        parameters = self._parameters
        return outputs, StageCosts(
            forward_seconds=forward,
            backward_seconds=backward,
            weight_seconds=weights,
            parameter_bytes=sum(p.nbytes for p in parameters),
            gradient_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
            activation_bytes=activations,
            factor_bytes=factors,
        )

    def _held(self) -> tuple[int, int]:
        """Returns the bytes that a microbatch holds from F on, and from I to W.

        Memory that several tensors share counts once.
        """
        saved = list[Tensor]()

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs, _ = self._forward()
        kept = [] if self._loss_fn is not None else list(outputs)
        activations = self._bytes([] if self._stage.recompute else [*saved, *kept])
        products = self._backward_inputs(self._forward()[1]) if self._splits else []
        factors = [t for p in products for t in (p.operand, p.gradient) if t is not None]
        return activations, self._bytes(factors)

    def _bytes(self, tensors: Iterable[Tensor]) -> int:
        result = _storages(tensors)
        return sum(n for key, n in result.items() if key not in self._held_anyway)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Gives the stage its copies, restores random numbers, and enables gradients."""
        is_host = self._device.type == "cpu"
        devices, kind = ([], "cuda") if is_host else ([self._device], self._device.type)
        modules = self._stage.module.modules()
        tables: list[Any] = [t for m in modules for t in (m._parameters, m._buffers)]
        before = [dict(table) for table in tables]
        try:
            for table in tables:
                table.update({n: self._copies.get(id(x), x) for n, x in table.items()})
            with torch.random.fork_rng(devices, device_type=kind), torch.enable_grad():
                yield
        finally:
            for table, held in zip(tables, before, strict=True):
                table.clear()
                table.update(held)

    def _forward(self) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Runs the forward, and the loss; returns the outputs and the roots of the backward."""
        returned = self._stage.forward(self._inputs)
        number = len(self._stage.outputs)
        outputs, losses = returned[:number], returned[number:]
        ends = outputs
        if self._loss_fn is not None:
            parts = loss_parts(self._loss_fn(*outputs, self._target), is_weighted=self._is_weighted)
            ends = (parts[0],)
        return outputs, [root for root in (*ends, *losses) if root.requires_grad]

    def _timed(self) -> tuple[float, float, float]:
        """Runs one microbatch; gradients add up in the copies, as in a step.

        Returns the seconds of F, of B or of I and W together, and of W.
        """
        device, recomputes = self._device, self._stage.recompute
        began = clock(device)
        with torch.no_grad() if recomputes else contextlib.nullcontext():
            roots = self._forward()[1]
        middle = clock(device)
        if recomputes:
            roots = self._forward()[1]
        again = clock(device)
        # In a pipeline gradients come from the next stage. Therefore their creation is not timed.
        gradients = [torch.ones_like(root) for root in roots]
        set_out = clock(device)
        products = list[WeightProduct]()
        if self._splits:
            products = self._backward_inputs(roots, gradients)
        elif roots:
            torch.autograd.backward(roots, gradients)
        rest = clock(device)
        accumulate(by_parameter(products).values())
        ended = clock(device)
        for tensor in self._received:
            tensor.grad = None
        backward = again - middle + ended - set_out
        return middle - began, backward, ended - rest if self._splits else 0.0

    def _backward_inputs(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor] | None = None
    ) -> list[WeightProduct]:
        if not roots:
            return []
        ids = {id(leaf) for leaf in self._leaves if leaf.requires_grad}
        ones = gradients or [torch.ones_like(root) for root in roots]
        return backward_inputs(roots, ones, ids, ids).products


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Returns address and bytes of the memory of tensors."""
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def profile_stages(
    stages: Sequence[Stage],
    microbatch: Mapping[str, object],
    *,
    target: object = None,
    loss_fn: Callable[..., object] | None = None,
    splits: bool = False,
    is_weighted: bool = False,
    device: torch.device | str = "cpu",
    repeats: int = 5,
) -> tuple[StageCosts, ...]:
    """Returns the costs of one microbatch on each stage, measured one after the other.

    The stages are not changed. They need no process group, and only one of them computes at a time.
    The optimizer is not measured. `measure_costs` does the same on the ranks of a job.

    Raises:
        ScheduleError: If a stage, or an input of a stage, is missing.
        Exception: The error of a stage.
    """
    if [stage.index for stage in stages] != list(range(len(stages))) or not stages:
        raise ScheduleError(
            f"stages {[stage.index for stage in stages]}: expected all of a model, in order"
        )
    values, costs = dict(microbatch), list[StageCosts]()
    made = dict[str, Tensor]()
    for stage in stages:
        missing = [name for name in stage.inputs if name not in values]
        if missing:
            raise ScheduleError(
                f"stage {stage.index} takes {missing}, which no stage before it makes: the "
                f"microbatch has {list(microbatch)}"
            )
        is_last = stage.index == len(stages) - 1
        alone = StageAlone(
            stage,
            [values[name] for name in stage.inputs],
            [made[name] for name in stage.inputs if name in made],
            target=target,
            loss_fn=loss_fn if is_last else None,
            is_weighted=is_weighted,
            splits=splits,
            device=torch.device(device),
        )
        outputs, of_stage = alone.measured(repeats)
        own = dict(zip(stage.outputs, outputs, strict=True))
        num_bytes = {} if is_last else {name: tensor.nbytes for name, tensor in own.items()}
        costs.append(replace(of_stage, outputs=num_bytes))
        made |= {n: t.detach().requires_grad_(t.requires_grad) for n, t in own.items()}
        values |= made
    return tuple(costs)
