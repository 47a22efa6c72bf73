"""Profile of one stage: its forward and backward alone, and what a microbatch holds in between.

The stage runs on copies: its parameters are other leaves in the same memory, and its buffers are
clones. So no gradient, hook, buffer or random state of the stage is touched, whatever is raised.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from pipegrad.comm import sync_points
from pipegrad.model.dtensor import local
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


class Passes(NamedTuple):
    """Seconds of one microbatch's passes.

    Attributes:
        forward: F.
        backward: B, or I and W together.
        weights: W, of a split backward.
    """

    forward: float
    backward: float
    weights: float = 0.0


class Held(NamedTuple):
    """Bytes that one microbatch holds.

    Attributes:
        activations: From F to B, or to I.
        factors: From I to W.
    """

    activations: int
    factors: int


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
        module = stage.module
        self._leaves = {
            name: p.detach().requires_grad_(p.requires_grad)
            for name, p in module.named_parameters()
        }
        buffers = {name: b.clone() for name, b in module.named_buffers()}
        self._stage = copy.copy(stage)
        call = partial(_called, module, {**self._leaves, **buffers})
        vars(self._stage)["binding"] = replace(stage.binding, function=call)
        self._inputs = inputs
        self._received = received
        self._loss = loss
        self._splits = splits
        self._device = device
        # The memory of what a stage receives is counted by itself.
        leaves = [leaf for _, leaf in flattened([*inputs, target])[0]]
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._held_anyway = set(_storages([*self._leaves.values(), *buffers.values(), *given]))
        mark(self._leaves.values() if splits else ())  # as before a first step: [Note: direct]

    def outputs(self) -> tuple[Tensor, ...]:
        """Returns what the stage makes, without losses."""
        with self._apart():
            return self._forward()[0]

    def passes(self, repeats: int) -> Passes:
        """Returns the median of each pass."""
        with self._apart():
            rows = [self._timed() for _ in range(_WARM_UP + repeats)][_WARM_UP:]
        return Passes(*(statistics.median(column) for column in zip(*rows, strict=True)))

    def held(self) -> Held:
        """Returns what one microbatch holds; memory that several tensors share counts once."""
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
            factors = self._factors() if self._splits else 0
        return Held(activations, factors)

    def costs(self, outputs: Mapping[str, Tensor], repeats: int) -> StageCosts:
        """Returns what a microbatch costs, and what the stage holds without buckets or optimizer.

        Args:
            outputs: What it hands on, by name.
            repeats: Of each pass; the median counts.
        """
        passes, held = self.passes(repeats), self.held()
        parameters = list(self._stage.module.parameters())
        return StageCosts(
            forward_seconds=passes.forward,
            backward_seconds=passes.backward,
            weight_seconds=passes.weights,
            parameter_bytes=sum(p.nbytes for p in parameters),
            gradient_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
            activation_bytes=held.activations,
            factor_bytes=held.factors,
            outputs={name: tensor.nbytes for name, tensor in outputs.items()},
        )

    def _factors(self) -> int:
        products = self._backward_inputs(self._forward()[1])
        tensors = [t for p in products for t in (p.operand, p.gradient) if t is not None]
        return self._bytes(tensors)

    def _bytes(self, tensors: Iterable[Tensor]) -> int:
        found = _storages(tensors)
        return sum(n for key, n in found.items() if key not in self._held_anyway)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Puts random numbers back, and has graphs whatever the caller is in."""
        is_host = self._device.type == "cpu"
        devices, kind = ([], "cuda") if is_host else ([self._device], self._device.type)
        with torch.random.fork_rng(devices, device_type=kind), torch.enable_grad():
            yield

    def _forward(self) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Runs the forward, and the loss; returns the outputs and the roots of the backward."""
        returned = self._stage.forward(self._inputs)
        number = len(self._stage.outputs)
        outputs, losses = returned[:number], returned[number:]
        ends = outputs if self._loss is None else (self._loss(outputs),)
        return outputs, [root for root in (*ends, *losses) if root.requires_grad]

    def _timed(self) -> Passes:
        """Runs one microbatch; gradients add up in the copies, as in a step."""
        clock, recomputes = self._clock, self._stage.recompute
        began = clock()
        with torch.no_grad() if recomputes else contextlib.nullcontext():
            roots = self._forward()[1]
        middle = clock()
        if recomputes:
            roots = self._forward()[1]
        again = clock()
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
        return Passes(middle - began, backward, ended - rest if self._splits else 0.0)

    def _backward_inputs(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor] | None = None
    ) -> list[WeightProduct]:
        if not roots:
            return []
        ids = {id(leaf) for leaf in self._leaves.values() if leaf.requires_grad}
        ones = gradients or [torch.ones_like(root) for root in roots]
        return backward_inputs(roots, ones, ids, ids).products

    def _clock(self) -> float:
        sync_points.finish_device(self._device)
        return time.perf_counter()


def _called(module: nn.Module, state: dict[str, Tensor], *args: object, **options: object) -> Any:  # noqa: ANN401 - whatever the module returns
    return functional_call(module, state, args, options)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Returns address and bytes of the memory of tensors."""
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
