"""Profile of one stage: its forward and backward alone, and what a microbatch holds in between.

While the stage runs here, its modules hold copies: its parameters are other leaves in the same
memory, and its buffers are clones. So no gradient, hook, buffer or random state of the stage is
touched, whatever is raised, and however its forward comes to its modules.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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

Loss = Callable[[tuple[Tensor, ...]], Tensor]  # of the outputs of the last stage

_WARM_UP = 2  # the first passes compile, and make gradients


class _Passes(NamedTuple):
    """Seconds of one microbatch's passes.

    Attributes:
        forward: F.
        backward: B, or I and W together.
        weights: W, of a split backward.
    """

    forward: float
    backward: float
    weights: float = 0.0


class StageAlone:
    """One stage without its pipeline, and one microbatch.

    Args:
        stage: The stage.
        inputs: Its inputs, in order.
        received: Those of them that come from other stages.
        target: What the loss reads, which lives on without it.
        loss: Of the last stage; None elsewhere.
        splits: Whether the schedule splits backwards.
        device: Where it computes.
    """

    def __init__(
        self,
        stage: Stage,
        inputs: Sequence[object],
        received: Sequence[Tensor],
        *,
        target: object = None,
        loss: Loss | None,
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
        self._loss = loss
        self._splits = splits
        self._device = device
        # The memory of what a stage receives is counted by itself.
        leaves = [leaf for _, leaf in flattened([*inputs, target])[0]]
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._held_anyway = set(_storages([*copies.values(), *given]))
        mark(self._leaves if splits else ())  # as before a first step: [Note: direct]

    def outputs(self) -> tuple[Tensor, ...]:
        """Returns what the stage makes, without losses."""
        with self._apart():
            return self._forward()[0]

    def _held(self) -> tuple[int, int]:
        """Returns the bytes that a microbatch holds from F on, and from I to W.

        Memory that several tensors share counts once.
        """
        saved = list[Tensor]()

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with self._apart():
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                outputs, _ = self._forward()
            kept = [] if self._loss is not None else list(outputs)
            live = [] if self._stage.recompute else [*saved, *kept]
            activations = self._bytes(live)
            products = self._backward_inputs(self._forward()[1]) if self._splits else []
            factors = [t for p in products for t in (p.operand, p.gradient) if t is not None]
            return activations, self._bytes(factors)

    def costs(self, outputs: Mapping[str, Tensor], repeats: int) -> StageCosts:
        """Returns what a microbatch costs, and what the stage holds without buckets or optimizer.

        Args:
            outputs: What it hands on, by name.
            repeats: Of each pass; the median counts.
        """
        with self._apart():
            timed = [self._timed() for _ in range(_WARM_UP + repeats)][_WARM_UP:]
        passes = _Passes(*map(statistics.median, zip(*timed, strict=True)))
        activations, factors = self._held()
        parameters = self._parameters
        return StageCosts(
            forward_seconds=passes.forward,
            backward_seconds=passes.backward,
            weight_seconds=passes.weights,
            parameter_bytes=sum(p.nbytes for p in parameters),
            gradient_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
            activation_bytes=activations,
            factor_bytes=factors,
            outputs={name: tensor.nbytes for name, tensor in outputs.items()},
        )

    def _bytes(self, tensors: Iterable[Tensor]) -> int:
        result = _storages(tensors)
        return sum(n for key, n in result.items() if key not in self._held_anyway)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Lets the stage hold copies, puts random numbers back, and has graphs in any caller."""
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
        ends = outputs if self._loss is None else (self._loss(outputs),)
        return outputs, [root for root in (*ends, *losses) if root.requires_grad]

    def _timed(self) -> _Passes:
        """Runs one microbatch; gradients add up in the copies, as in a step."""
        clock, recomputes = self._clock, self._stage.recompute
        began = clock()
        with torch.no_grad() if recomputes else contextlib.nullcontext():
            roots = self._forward()[1]
        middle = clock()
        if recomputes:
            roots = self._forward()[1]
        again = clock()
        # In a pipeline gradients come from the next stage. So making them is no part of a backward.
        gradients = [torch.ones_like(root) for root in roots]
        set_out = clock()
        products = list[WeightProduct]()
        if self._splits:
            products = self._backward_inputs(roots, gradients)
        elif roots:
            torch.autograd.backward(roots, gradients)
        rest = clock()
        accumulate(by_parameter(products).values())
        ended = clock()
        for tensor in self._received:
            tensor.grad = None
        backward = again - middle + ended - set_out
        return _Passes(middle - began, backward, ended - rest if self._splits else 0.0)

    def _backward_inputs(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor] | None = None
    ) -> list[WeightProduct]:
        if not roots:
            return []
        ids = {id(leaf) for leaf in self._leaves if leaf.requires_grad}
        ones = gradients or [torch.ones_like(root) for root in roots]
        return backward_inputs(roots, ones, ids, ids).products

    def _clock(self) -> float:
        sync_points.finish_device(self._device)
        return time.perf_counter()


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
    """Returns what one microbatch costs on each stage, measured one after the other.

    The stages are not changed. They need no process group, and only one of them computes at a time.
    What the optimizer takes is not measured. `measure_costs` does the same on the ranks of a job.

    Args:
        stages: All stages, in order, on `device`.
        microbatch: The external inputs, by name.
        target: What `loss_fn` gets.
        loss_fn: Takes the last stage's outputs and the target. Without it, the outputs of the last
            stage are the roots of its backward.
        splits: Whether backwards are split into I and W.
        is_weighted: Whether `loss_fn` returns sums with weights, as for "token_mean".
        device: Where to compute.
        repeats: Of each pass; the median counts.

    Raises:
        ScheduleError: If stages are missing, or an input of one is.
        Exception: What a stage raises.
    """
    if [stage.index for stage in stages] != list(range(len(stages))) or not stages:
        raise ScheduleError(
            f"stages {[stage.index for stage in stages]}: expected all of a model, in order"
        )
    values, costs = dict(microbatch), list[StageCosts]()
    made = dict[str, Tensor]()

    def loss(outputs: tuple[Tensor, ...]) -> Tensor:
        assert loss_fn is not None
        return loss_parts(loss_fn(*outputs, target), is_weighted=is_weighted)[0]

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
            loss=loss if is_last and loss_fn is not None else None,
            splits=splits,
            device=torch.device(device),
        )
        outputs = dict(zip(stage.outputs, alone.outputs(), strict=True))
        costs.append(alone.costs({} if is_last else outputs, repeats))
        made |= {n: t.detach().requires_grad_(t.requires_grad) for n, t in outputs.items()}
        values |= made
    return tuple(costs)
