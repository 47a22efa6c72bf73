"""A pipeline of torch with `attach` trains as one process does on the uncut model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegrad
from pipegrad import Topology
from tests.support.distributions import declared
from tests.support.pipeline.models import TOKENS, build
from tests.support.pipeline.pipelines import (
    Case,
    CountingData,
    CountingShared,
    Cut,
    launches,
    loss_of,
)
from tests.support.pipeline.schedulers import topology
from tests.support.pipeline.trained import (
    Seen,
    adamw,
    bits,
    checked,
    copied,
    differences,
    once,
    train,
)
from tests.support.ranked import gathered
from tests.support.rounding import rounding
from tests.support.versions import marks_of

FILES = tuple(f"file {name}" for name in declared("pipegrad.schedules"))

Long = partial(Case, optimizer="AdamW")
Short = partial(Case, optimizer="AdamW", steps=4)
Standing = partial(Case, optimizer="standstill", steps=3)
Buckets = partial(Short, "1F1B", model="crossed")
DOUBLE = (("reduce_dtype", torch.float64),)
OWNED = {"name": "pipeline-shared", "placement": "owner"}
PLACED = Short("1F1B", options=(("handlers", (OWNED, "sharded")), ("comm_streams", 2)))

# By mesh: pipeline x data. Over each of 4x1 and 2x2 every schedule of torch is there.
CASES: dict[str, list[Case]] = {
    "4x1": [
        Case("GPipe"),
        Long("1F1B"),
        Case("Interleaved1F1B"),
        Long("ZBVZeroBubble"),
        Short("1F1B", model="three-way"),
        Short("ZBVZeroBubble", model="crossed"),
        Short("1F1B", model="mixed-dtypes"),
        Long("ZBVZeroBubble", model="half-used"),
        Short("1F1B", model="within"),
        Short("DualPipeV", num_microbatches=8),
        *(Short(schedule, num_microbatches=8, steps=3) for schedule in FILES),
        Short("Interleaved1F1B", model="half-used"),
        Short("ZBVZeroBubble", model="half-used", accumulate=2),
        Short("1F1B", model="half-used", set_to_none=False),
        Short("1F1B", model="three-way", cut="split-point", tied="pipe"),
        Short("1F1B", model="reentrant"),
        Short("1F1B", clip=(0.1, 2.0)),
    ],
    "2x1": [
        # The tracer copies ties apart: also those within a rank or a stage.
        Short("1F1B", cut="split-point"),
        Short("1F1B", model="within", cut="split-point", tied="pipe"),
        Short("ZBVZeroBubble", cut="split-point", tied="pipe"),
        Short("DualPipeV", cut="split-point", tied="pipe", optimizer_first=True),
        Short("ZBVZeroBubble", cut="apart", optimizer_first=True),
        Short("ZBVZeroBubble", model="crossed", cut="apart", tied="places"),
        Short("1F1B", model="crossed", tied="places"),
        Short("1F1B", wrapper="compile"),
    ],
    "2x2": [
        Long("GPipe", model="crossed"),
        Case("1F1B", model="crossed"),
        Long("Interleaved1F1B", model="crossed"),
        Case("ZBVZeroBubble", model="crossed"),
        Short("LoopedBFS"),
        Short("InterleavedZeroBubble"),
        Short("CSV runtime"),
        Short("DualPipeV"),
        Short("1F1B", model="mixed-dtypes"),
        Short("ZBVZeroBubble", model="three-way"),
        Short("1F1B", model="three-way", cut="split-point"),
        # Accumulation over two steps, and evaluation in between.
        Short("1F1B", accumulate=2),
        Short("1F1B", model="half-used", accumulate=2, options=DOUBLE),
        Short("ZBVZeroBubble", set_to_none=False, options=DOUBLE),
        Short("GPipe", accumulate=2, evaluate=True),
        Short("1F1B", accumulate=2, evaluate=True, set_to_none=False),
        Short("Interleaved1F1B", evaluate=True),
        Short("CSV multi", evaluate=True),
        # Scaling and clipping.
        Short("1F1B", scale_grads=False),
        Short("ZBVZeroBubble", scale_grads=False),
        Short("ZBVZeroBubble", model="three-way", clip=(0.1, 2.0)),
        Short("1F1B", model="half-used", clip=(0.01, math.inf)),
        # Hooks that fire several times, and wrappers.
        Standing("GPipe", model="reentrant"),
        Standing("1F1B", model="non-reentrant"),
        Standing("Interleaved1F1B", model="half-used"),
        Standing("ZBVZeroBubble", model="half-used"),
        Short("Interleaved1F1B", model="non-reentrant"),
        Short("1F1B", wrapper="ddp", options=(("handlers", ("pipeline-shared",)),)),
        PLACED,  # parameters come back
    ],
    "2x3": [
        Case("1F1B", model="three-way", num_microbatches=6),
        Long("ZBVZeroBubble", model="three-way", num_microbatches=6),
        Buckets(options=(("bucket_bytes", 0), ("comm_streams", 1))),
        Buckets(options=(("bucket_bytes", 1024), ("comm_streams", 3))),
    ],
}
EVERY = [(mesh, case) for mesh, cases in CASES.items() for case in cases]


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
        self.inert, self.early, self.num_buckets = True, 0, 0
        make = partial(make_optimizer, case.optimizer)
        early_optimizer = make(self.cut.parameters()) if case.optimizer_first else None
        options: Any = {"handlers": (CountingShared, CountingData), **dict(case.options)}
        self.sync = pipegrad.attach(self.schedule, topology=topology, tied=self.cut.tied, **options)
        self.is_placed = any(one.sharded for one in self.sync.main_parameters())
        late = self.sync.optimizer(make) if self.is_placed else make(self.cut.parameters())
        self.optimizer = early_optimizer or late

    def train(self) -> Seen:
        seen = train(
            self._step,
            lambda: {} if self.is_placed else dict(self.cut.named()),
            sync=self.sync,
            optimizer=self.optimizer,
            **self.case.training,
        )
        self.early = self.sync.statistics().early
        self.num_buckets = len(self.sync.plan.buckets)
        self.sync.wait_parameters()
        seen.parameters = copied(dict(self.cut.named()))
        self.sync.check_replicas()
        self.sync.close()
        return seen

    def _step(self, number: int, part: int) -> Tensor | None:
        inputs, losses = self.cut.inputs(number, part), list[Tensor]()
        if self.case.evaluate:
            self._evaluate(inputs)
        self.schedule.step(*inputs["args"], target=inputs["target"], losses=losses)
        if self.case.evaluate:
            self._evaluate(inputs)
        return torch.stack(losses).mean() if losses else None

    def _evaluate(self, inputs: dict[str, Any]) -> None:
        gradients = [p.grad for p in self.cut.parameters()]
        before = [None if g is None else g.clone() for g in gradients]
        num_launches, statistics = len(launches), self.sync.statistics()
        self.schedule.eval(*inputs["args"], target=inputs["target"], losses=[])
        for parameter, gradient, copy in zip(self.cut.parameters(), gradients, before, strict=True):
            self.inert &= parameter.grad is gradient
            self.inert &= gradient is None or copy is None or torch.equal(gradient, copy)
        self.inert &= num_launches == len(launches) and statistics == self.sync.statistics()


def params(chosen: Iterable[tuple[str, Case]]) -> list[Any]:
    return [
        pytest.param(
            mesh,
            case,
            id=f"{mesh}: {case}",
            marks=[pytest.mark.ranks(int(mesh[0]) * int(mesh[2])), *marks_of(case)],
        )
        for mesh, case in chosen
    ]


def most(mesh: str, case: Case, *, steps: int = 1) -> float:
    """Returns how far rounding may bring a case away from one process, after some steps."""
    rows = case.num_microbatches * int(mesh[2])
    return rounding(rows * TOKENS * case.accumulate * steps)


def trained(mesh: str, case: Case) -> tuple[Run, Seen, Seen]:
    """Trains on every rank, and in one process."""
    at = topology(int(mesh[0]))
    run, true = Run(case, at), truth(alone(case), at.size("dp"))
    seen = run.train()
    told = [losses for losses in gathered(seen.losses) if losses]  # of the last stages
    seen.losses = [torch.stack(step).mean() for step in zip(*told, strict=True)]
    return run, seen, true


@pytest.mark.parametrize(("mesh", "case"), params(EVERY))
@checked(PLACED, Short("InterleavedZeroBubble"), Short("DualPipeV"))
def test_trains_as_one_process_does(mesh: str, case: Case) -> None:
    run, seen, true = trained(mesh, case)

    learned = true.losses[-1] < 0.9 * true.losses[0]
    assert learned != (case.optimizer == "standstill"), "the case shows nothing"
    later = most(mesh, case, steps=case.steps)
    assert differences(seen, true, most(mesh, case), later=later) == {}
    bits(seen.parameters, run.cut.ties)
    assert run.inert, "evaluation changed or launched something"
    if case.clip is not None:
        assert min(true.norms) > case.clip[0], "nothing is clipped"
        assert len({tuple(map(float, norms)) for norms in gathered(seen.norms)}) == 1
    if dict(case.options).get("bucket_bytes") == 0:
        # One by one, before the stage ends: on six ranks fourteen parameters.
        counts = gathered((run.num_buckets, run.early))
        assert [sum(column) for column in zip(*counts, strict=True)] == [6 * 14, 6 * 14]
