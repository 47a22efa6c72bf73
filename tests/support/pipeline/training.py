"""Schedules of torch under attach as an engine of `train`, and the uncut models of their cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from tests.support.pipeline.trained import Seen, adamw, once, train


@once
def truth(case: Case, num_data_ranks: int) -> Seen:
    """Returns how one process trains the uncut model, given a case from `alone`."""
    model = build(case.model)
    held = dict(model.named_parameters(remove_duplicate=False))

    def step(number: int, part: int) -> Tensor:
        tokens, target = case.batch(number, part, num_data_ranks)
        loss = loss_of(model(tokens), target)
        (loss * (1 if case.scale_grads else case.num_microbatches)).backward()
        return loss

    optimizer = make_optimizer(case.optimizer, list(model.parameters()))
    seen = train(step, lambda: held, optimizer=optimizer, **case.training)
    if case.optimizer != "standstill":  # whose steps are all the first one
        seen.gradients = seen.gradients[:1]
    return seen


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
    if name == "AdamW":
        return adamw(parameters)
    standing = name == "standstill"
    return torch.optim.SGD(parameters, lr=0.0 if standing else 0.05, momentum=0.9)


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


class Run:
    """One case on one rank.

    Attributes:
        inert: Whether evaluation left every bit of every gradient, and launched nothing.
        early: Buckets of the last step that were sent before their stage ended.
        num_buckets: How many there are.
    """

    def __init__(self, case: Case, topology: Topology) -> None:
        self.case = case
        self.cut = Cut(case, topology)
        self.schedule = self.cut.schedule()
        self.sync: GradientSync | None = None
        self.inert, self.early, self.num_buckets = True, 0, 0
        early_optimizer = self._optimizer() if case.optimizer_first else None
        if case.attached:
            options: Any = {"handlers": (CountingShared, CountingData), **dict(case.options)}
            self.sync = pipegrad.attach(
                self.schedule, topology=topology, tied=self.cut.tied, **options
            )
        self.optimizer = early_optimizer or self._optimizer()

    def train(self) -> Seen:
        seen = train(
            self._step,
            lambda: dict(self.cut.named()),
            sync=self.sync,
            optimizer=self.optimizer,
            **self.case.training,
        )
        if self.sync is not None:
            self.early = self.sync.statistics().early
            self.num_buckets = len(self.sync.plan.buckets)
            self.sync.check_replicas()
            self.sync.close()
        return seen

    def _optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.case.optimizer, self.cut.parameters())

    def _step(self, number: int, part: int) -> Tensor | None:
        inputs, losses = self.cut.inputs(number, part), list[Tensor]()
        if self.case.evaluate:
            self._evaluate(inputs)
        self.schedule.step(*inputs["args"], target=inputs["target"], losses=losses)
        if self.case.evaluate:
            self._evaluate(inputs)
        return torch.stack(losses).mean() if losses else None

    def _evaluate(self, inputs: dict[str, Any]) -> None:
        assert self.sync is not None
        gradients = [p.grad for p in self.cut.parameters()]
        before = [None if g is None else g.clone() for g in gradients]
        num_launches, statistics = len(launches), self.sync.statistics()
        self.schedule.eval(*inputs["args"], target=inputs["target"], losses=[])
        for parameter, gradient, copy in zip(self.cut.parameters(), gradients, before, strict=True):
            self.inert &= parameter.grad is gradient
            self.inert &= gradient is None or copy is None or torch.equal(gradient, copy)
        self.inert &= num_launches == len(launches) and statistics == self.sync.statistics()
