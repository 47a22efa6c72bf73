"""Trains the pipelines of many cases, and the uncut models; measures how far they are apart.

`run_cases` runs on every rank, one case after the other; `merged` joins what the ranks measured.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipegrad
from pipegrad import FlatBucket, GradientSync, ReductionStep, Topology, Work
from pipegrad_handlers.data_parallel import DataParallel
from pipegrad_handlers.pipeline_shared import PipelineShared
from tests.support.pipeline.models import build
from tests.support.pipeline.pipelines import Case, Cut, loss_of
from tests.support.rounding import ADAM_EPS


@dataclass(frozen=True)
class Truth:
    """What one process sees, which trains the uncut model on whole batches."""

    losses: list[float]
    gradients: dict[str, Tensor | None]
    norms: list[float]


@functools.cache
def truth(case: Case, num_data_ranks: int) -> Truth:
    """Returns how one process trains, given a case from `alone`."""
    model = build(case.model)
    optimizer = make_optimizer(case.optimizer, list(model.parameters()))
    true = Truth([], {}, [])
    for step in range(case.steps):
        for part in range(case.accumulate):
            tokens, target = case.batch(step, part, num_data_ranks)
            loss = loss_of(model(tokens), target)
            (loss * (1 if case.scale_grads else case.num_microbatches)).backward()
            true.losses.append(loss.item())
        if case.clip is not None:
            true.norms.append(nn.utils.clip_grad_norm_(model.parameters(), *case.clip).item())
        if step == 0:
            for name, p in model.named_parameters(remove_duplicate=False):
                true.gradients[name] = None if p.grad is None else p.grad.clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=case.set_to_none)
    return true


def alone(case: Case) -> Case:
    """Returns what one process can know of `case`."""
    return replace(
        case,
        schedule="",
        cut="",
        tied="",
        attached=True,
        evaluate=False,
        wrapper="",
        optimizer_first=False,
        options=(),
    )


def make_optimizer(name: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    if name == "standstill":
        return torch.optim.SGD(parameters, lr=0.0)
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=ADAM_EPS)


@dataclass
class Measured:
    """What one rank saw, or all of them. Errors are relative to the largest true value."""

    losses: list[float] = field(default_factory=list)
    true_losses: list[float] = field(default_factory=list)
    gradient_errors: dict[str, float] = field(default_factory=dict)
    mismatched_none: list[str] = field(default_factory=list)
    bits: dict[str, set[str]] = field(default_factory=dict)
    norms: set[tuple[float, ...]] = field(default_factory=set)
    true_norms: list[float] = field(default_factory=list)
    inert: bool = True
    early: int = 0
    num_buckets: int = 0

    @property
    def gradient_error(self) -> float:
        return max(self.gradient_errors.values())

    @property
    def loss_error(self) -> float:
        pairs = zip(self.losses, self.true_losses, strict=True)
        return max(abs(loss - true) / abs(true) for loss, true in pairs)

    @property
    def norm_error(self) -> float:
        pairs = [zip(norms, self.true_norms, strict=True) for norms in self.norms]
        return max(abs(norm - true) / true for rank in pairs for norm, true in rank)

    @property
    def drifted(self) -> list[str]:
        """Parameters of which two ranks, or two names, hold different bits."""
        return [name for name, digests in self.bits.items() if len(digests) > 1]


def merged(ranks: Sequence[dict[Case, Measured]]) -> dict[Case, Measured]:
    """Joins the ranks' measurements; losses are averaged over the data ranks."""
    return {case: _merged([rank[case] for rank in ranks]) for case in ranks[0]}


def _merged(parts: Sequence[Measured]) -> Measured:
    whole = Measured(true_losses=parts[0].true_losses, true_norms=parts[0].true_norms)
    told = [part.losses for part in parts if part.losses]
    whole.losses = [sum(step) / len(step) for step in zip(*told, strict=True)]
    for part in parts:
        for name, error in part.gradient_errors.items():
            whole.gradient_errors[name] = max(error, whole.gradient_errors.get(name, 0.0))
        for name, digests in part.bits.items():
            whole.bits.setdefault(name, set()).update(digests)
        whole.mismatched_none += part.mismatched_none
        whole.norms |= part.norms
        whole.inert &= part.inert
        whole.early += part.early
        whole.num_buckets += part.num_buckets
    return whole


launches: list[str] = []


class CountingShared(PipelineShared):
    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        launches.append("shared")
        return super().launch(bucket, reduction, group)


class CountingData(DataParallel):
    def launch(
        self, bucket: FlatBucket, reduction: ReductionStep, group: dist.ProcessGroup
    ) -> Work:
        launches.append("data")
        return super().launch(bucket, reduction, group)


def run_cases(pipeline_ranks: int, cases: Sequence[Case]) -> dict[Case, Measured]:
    """Trains every case. Runs on every rank."""
    topology = Topology.create(pipeline=pipeline_ranks)
    measured = {}
    for case in cases:
        try:
            measured[case] = Run(case, topology).train()
        except Exception as error:
            error.add_note(f"in the case: {case}")
            raise
    return measured


class Run:
    """One case on one rank."""

    def __init__(self, case: Case, topology: Topology) -> None:
        self.case = case
        self.cut = Cut(case, topology)
        self.schedule = self.cut.schedule()
        self.sync: GradientSync | None = None
        early_optimizer = self._optimizer() if case.optimizer_first else None
        if case.attached:
            self.sync = attached(self.schedule, self.cut, topology, dict(case.options))
        self.optimizer = early_optimizer or self._optimizer()
        self.truth = truth(alone(case), topology.size("dp"))
        self.measured = Measured(
            true_losses=self.truth.losses,
            true_norms=self.truth.norms,
        )

    def train(self) -> Measured:
        norms: list[float] = []
        for step in range(self.case.steps):
            for part in range(self.case.accumulate):
                self._forward_backward(step, part)
            if self.case.clip is not None and self.sync is not None:
                norms.append(self.sync.clip_grad_norm_(*self.case.clip).item())
            if step == 0 or self.case.optimizer == "standstill":
                self._compare()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.case.set_to_none)
        self.measured.norms = {tuple(norms)} if norms else set()
        self.measured.bits = self.cut.bits()
        if self.sync is not None:
            self.measured.early = self.sync.statistics().early
            self.measured.num_buckets = len(self.sync.plan.buckets)
            self.sync.check_replicas()
            self.sync.close()
        return self.measured

    def _optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.case.optimizer, self.cut.parameters())

    def _forward_backward(self, step: int, part: int) -> None:
        inputs, losses = self.cut.inputs(step, part), list[Tensor]()
        accumulating = part < self.case.accumulate - 1
        if self.case.evaluate:
            self._evaluate(inputs)
        with self.sync.accumulate() if self.sync and accumulating else nullcontext():
            self.schedule.step(*inputs["args"], target=inputs["target"], losses=losses)
        if losses:
            self.measured.losses.append(torch.stack(losses).mean().item())
        if self.case.evaluate:
            self._evaluate(inputs)

    def _evaluate(self, inputs: dict[str, Any]) -> None:
        """Notes whether eval() leaves every bit of every gradient and launches nothing."""
        assert self.sync is not None
        gradients = [p.grad for p in self.cut.parameters()]
        before = [None if g is None else g.clone() for g in gradients]
        numlaunches, statistics = len(launches), self.sync.statistics()
        self.schedule.eval(*inputs["args"], target=inputs["target"], losses=[])
        for parameter, gradient, copy in zip(self.cut.parameters(), gradients, before, strict=True):
            self.measured.inert &= parameter.grad is gradient
            if gradient is not None and copy is not None:
                self.measured.inert &= torch.equal(gradient, copy)
        self.measured.inert &= numlaunches == len(launches)
        self.measured.inert &= statistics == self.sync.statistics()

    def _compare(self) -> None:
        for name, parameter in self.cut.named():
            gradient, true = parameter.grad, self.truth.gradients[name]
            if gradient is None or true is None:
                if gradient is not true:
                    self.measured.mismatched_none.append(name)
                continue
            error = (gradient - true).abs().max() / true.abs().max()
            worst = self.measured.gradient_errors.get(name, 0.0)
            self.measured.gradient_errors[name] = max(error.item(), worst)


def attached(schedule: Any, cut: Cut, topology: Topology, options: dict[str, Any]) -> GradientSync:
    options.setdefault("handlers", (CountingShared, CountingData))
    return pipegrad.attach(schedule, topology=topology, tied=cut.tied, **options)
