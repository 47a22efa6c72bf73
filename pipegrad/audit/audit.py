"""Audit: are the gradients of somebody's pipeline those of one process?

[Note: an audit]
1. The caller's step runs on all ranks, as it is: schedule, reductions, clipping, optimizer.
2. Gradients are copied right before the optimizer steps, parameters after it (`watch.py`).
3. Rank 0 computes the same step on the uncut model, in float64 (`truth.py`).
4. A wrong gradient is fitted by its parts (`contributions.py`). The weights say why (`causes.py`).
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad.audit import dropout
from pipegrad.audit.compare.judge import Judge, Sizes, Verdict
from pipegrad.audit.compare.truth import Batch, Data, LossFn, leaves_cut, relative
from pipegrad.audit.matching import Names, match
from pipegrad.audit.order import ordered
from pipegrad.audit.report import Finding, Report, merged
from pipegrad.audit.watch import Gradients, Seen, watched
from pipegrad.comm.agreement import agree
from pipegrad.errors import PlanError, in_words
from pipegrad.model.dtensor import is_dtensor
from pipegrad.model.wrappers import FSDP1, wrapper_of
from pipegrad.pipeline.batch.trees import flattened, is_cut

_IGNORED = -100  # by torch's losses, and Hugging Face's
_PATIENCE_SECONDS = 1800.0  # for the rank that compares


@dataclass(frozen=True, kw_only=True)
class Audit:
    """A pipeline's training step, beside the model of one process. `run` compares them.

    Every rank makes one, with what it holds, and calls `run`. Afterwards parameters and optimizers
    have stepped, so train with new ones.

    Attributes:
        step: ``step(inputs, target)`` is one whole training step of this rank on the batch of its
            replica: gradients to zero, microbatches, reductions, clipping, optimizer. It may return
            the loss, a list of losses of microbatches, or ``{"loss": ..., "grad_norm": ...}``.
        modules: What this rank holds: the modules of its stages. DistributedDataParallel, FSDP2,
            compiled modules and DTensors are known.
        model: The uncut model, on every rank, with the same names or the same values.
        loss_fn: ``loss_fn(output, target)`` is the mean loss of the uncut model's output. If it
            returns a tuple, the first value is the loss.
        batches: For each step, inputs and target of all replicas: the same on all ranks. Tensors,
            or dicts, tuples and lists of them. Their first dimension is cut into replicas, and then
            into microbatches. The uncut model gets a dict by name, a tuple by position.
        microbatches: Of a step on one replica.
        replica: Index of the data that this rank gets, from 0.
        num_replicas: Of different data. All ranks of a pipeline, and those of tensor parallelism,
            have the same data.
        names: Names of the modules' parameters -> names in the uncut model. By default they are
            matched by names, or by shapes and values.
        gradients: Returns gradients by names of the modules' parameters, right before the
            optimizer's step; by default ``.grad``, or ``.main_grad``.
        clip_norm: The norm to which the step clips gradients by its own code. torch's functions say
            it themselves.
        autocast: The dtype in which the pipeline computes, if its parameters have another one.
    """

    step: Callable[[Any, Any], object]
    modules: nn.Module | Sequence[nn.Module]
    model: nn.Module
    loss_fn: LossFn
    batches: Sequence[Batch]
    microbatches: int
    replica: int = 0
    num_replicas: int = 1
    names: Mapping[str, str] | None = None
    gradients: Gradients | None = None
    clip_norm: float | None = None
    autocast: torch.dtype | None = None

    def run(self, *, steps: int | None = None, tolerance: float | None = None) -> Report:
        """Runs steps and compares them with one process. All ranks must call it.

        Args:
            steps: How many; by default one for each batch.
            tolerance: Of a gradient: norm of the difference by the norm of the right one. By
                default it is derived: 32 x eps x sqrt(targets) for the rounding of float32, and
                4 times the error that one process has in the pipeline's dtype.

        Returns:
            The report, the same on all ranks.

        Raises:
            PlanError: If modules are no part of the uncut model, or sizes do not fit.
            AgreementError: If ranks fail differently, or differ in what they give.
        """
        return _Run(self, steps, tolerance).report()

    def order(self, *, steps: int | None = None) -> Report:
        """Runs steps under the `OrderChecker`: finds accesses to memory that nothing orders.

        It looks at what was waited for, not at times, so one run finds what could go wrong in any.
        All ranks must call it.

        Args:
            steps: How many; by default one for each batch.

        Returns:
            The report, the same on all ranks. Its notes say what was seen, and what cannot be.

        Raises:
            PlanError: If sizes do not fit.
        """
        batches = list[Batch]()
        agree("the audit", lambda: batches.extend(_checked(self, steps, None)))
        shares = [_shares(batch, self.num_replicas)[self.replica] for batch in batches]
        return ordered([functools.partial(self.step, *share) for share in shares])

    @property
    def held(self) -> list[nn.Module]:
        """The modules of this rank."""
        return [self.modules] if isinstance(self.modules, nn.Module) else list(self.modules)


class _Run:
    """One run of an audit."""

    def __init__(self, audit: Audit, steps: int | None, tolerance: float | None) -> None:
        self._audit = audit
        self._begin = time.monotonic()
        self._names: Names
        self._batches: list[Batch]

        def prepare() -> tuple[object, ...]:
            self._batches = _checked(audit, steps, tolerance)
            if any(wrapper_of(module) == FSDP1 for module in audit.held):
                raise PlanError("FSDP1 keeps parameters in flat ones: wrap stages in FSDP2 or DDP")
            self._names = match(audit.held, audit.model, audit.names)
            self._model = _copied(audit.model)
            return len(self._batches), audit.microbatches, audit.num_replicas, audit.replica

        every = agree("the audit", prepare)
        _check_replicas(every, audit)
        self._judge = Judge(
            self._model,
            clip_norm=audit.clip_norm,
            tolerance=tolerance,
            autocast=audit.autocast,
        )
        modules = [part for module in audit.held for part in module.modules()]
        self._dropout = dropout.Without(modules)

    def report(self) -> Report:
        """Runs all steps; returns what was found."""
        findings, verdict = self._modes(), Verdict([], [])
        for number, batch in enumerate(self._batches, 1):
            saved = self._saved()
            verdict = self._judged(batch, number)
            findings += verdict.findings
            if verdict.findings:
                # Other steps may show other causes. They begin with values that are alike again.
                self._restore(saved)
        if not findings:
            findings += self._repeated(self._batches[-1])
        notes = [*self._judge.notes.values()]
        if any(agree("dropout", lambda: self._dropout.was_active)):
            notes.append("dropout was 0 while numbers were compared")
        shared: list[Any] = [merged(findings), tuple(notes), tuple(verdict.gradients)]
        dist.broadcast_object_list(shared, src=0)
        findings, notes, gradients = shared
        seconds = time.monotonic() - self._begin
        return Report(
            findings, notes, gradients, len(self._batches), dist.get_world_size(), seconds
        )

    def _modes(self) -> list[Finding]:
        """Returns modules that drop out, or normalise, otherwise than in the uncut model."""
        there = dropout.modes(dict(self._model.named_modules(remove_duplicate=False)))
        for module in self._model.modules():
            if isinstance(module, nn.RNNBase):
                module.dropout = 0.0
        own = dropout.modes(self._names.modules)
        return [
            Finding(
                f"the module {mode}, and in the uncut model it {there[name]}",
                "give both the same mode and probability",
                (name,),
                (rank,),
            )
            for rank, modes in enumerate(agree("modes of modules", lambda: own))
            for name, mode in modes.items()
            if name in there and there[name] != mode
        ]

    def _judged(self, batch: Batch, number: int) -> Verdict:
        """Runs a step on all ranks; returns what rank 0 finds in it, on all ranks."""
        audit = self._audit
        with self._dropout.running():
            every = _gathered(self._seen(batch))

        def compare() -> Verdict | None:
            if every is None:
                return None
            cut = [
                [*zip(*(leaves_cut(x, audit.microbatches) for x in share), strict=True)]
                for share in _shares(batch, audit.num_replicas)
            ]
            targets = tuple(_counted(target) for of_replica in cut for _, target in of_replica)
            sizes = Sizes(audit.microbatches, audit.num_replicas, targets, len(every))
            with self._dropout.running():
                return self._judge.judge(every, Data(audit.loss_fn, cut, batch), number, sizes)

        first = agree("compare with one process", compare, timeout_seconds=_PATIENCE_SECONDS)[0]
        return Verdict([], []) if first is None else first

    def _seen(self, batch: Batch) -> Seen:
        """Runs a step; returns what this rank had in it."""
        audit = self._audit
        inputs, target = _shares(batch, audit.num_replicas)[audit.replica]
        return watched(
            lambda: audit.step(inputs, target), self._names, audit.replica, audit.gradients
        )

    def _repeated(self, batch: Batch) -> list[Finding]:
        """Runs a right step again from one state; returns what differs, on rank 0."""
        values, state = self._saved(), torch.get_rng_state()
        runs = list[Seen]()
        for _ in range(2):
            self._restore(values)
            torch.set_rng_state(state)
            with self._dropout.running():
                runs.append(self._seen(batch))
        differing = agree("repeat a step", lambda: _differing(*runs))
        findings = []
        if any(differing):
            findings.append(
                Finding(
                    "the step is not deterministic: twice from the same values, batch and random "
                    "state, it makes different gradients",
                    "call torch.use_deterministic_algorithms(True), and reduce in a fixed order",
                    tuple(dict.fromkeys(name for names in differing for name in names)),
                    tuple(rank for rank, names in enumerate(differing) if names),
                )
            )
        if any(agree("dropout", lambda: self._dropout.was_active)):
            self._restore(values)
            every = _gathered(self._seen(batch))
            if every is not None:
                findings += self._judge.copies_with_dropout(every)
        return findings

    def _saved(self) -> list[Tensor]:
        return [p.detach().clone() for p in self._tensors()]

    def _restore(self, saved: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(self._tensors(), saved, strict=True):
                tensor.copy_(value)

    def _tensors(self) -> list[Tensor]:
        return [*self._names.parameters.values(), *self._names.buffers.values()]


def _checked(audit: Audit, steps: int | None, tolerance: float | None) -> list[Batch]:
    """Returns the batches of the steps; refuses what cannot be audited."""
    batches = list(audit.batches)
    number = len(batches) if steps is None else steps
    if not 1 <= number <= len(batches):
        raise PlanError(f"steps is {steps}, and there are {len(batches)} batches: give one a step")
    if tolerance is not None and not tolerance > 0:
        raise PlanError(f"tolerance is {tolerance}, expected a number above 0")
    if audit.microbatches < 1 or not 0 <= audit.replica < audit.num_replicas:
        raise PlanError(
            f"microbatches is {audit.microbatches}, expected at least 1; replica is "
            f"{audit.replica} of {audit.num_replicas}, expected 0 to {audit.num_replicas - 1}"
        )
    if any(is_dtensor(p) or p.is_meta for p in audit.model.parameters()):
        raise PlanError(
            "the uncut model has DTensors or parameters without values: give a copy that was made "
            "before the stages were wrapped, with real values on every rank"
        )
    if not any(parameter.requires_grad for parameter in audit.model.parameters()):
        raise PlanError("the uncut model has no parameter that requires a gradient")
    for batch in batches[:number]:
        parts: object = batch
        if not isinstance(parts, tuple | list) or len(parts) != 2:
            raise PlanError(f"a batch is {type(parts).__name__}, expected (inputs, target)")
        rows = {leaf.shape[0] for x in batch for _, leaf in flattened(x)[0] if is_cut(leaf)}
        most = max(rows, default=0)
        if most == 0 or rows - {1, most} or most % (audit.microbatches * audit.num_replicas):
            raise PlanError(
                f"tensors of a batch have {sorted(rows) or 'no'} rows, expected one number, a "
                f"multiple of {audit.num_replicas} replicas x {audit.microbatches} microbatches"
            )
    return batches[:number]


def _copied(model: nn.Module) -> nn.Module:
    """Returns a copy of the uncut model, which the caller's steps cannot change."""
    try:
        return copy.deepcopy(model)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise PlanError(
            f"the uncut model cannot be copied: {in_words(error)}; give one without process groups "
            f"and other things of a job, for example the same layers in plain torch"
        ) from error


def _check_replicas(every: Sequence[tuple[object, ...]], audit: Audit) -> None:
    """Checks that all ranks have the same sizes, and that each replica has a rank."""
    sizes = {values[:3] for values in every}
    replicas = {values[3] for values in every}
    if len(sizes) > 1 or replicas != set(range(audit.num_replicas)):
        raise PlanError(
            "ranks give different audits; (steps, microbatches, num_replicas, replica) are "
            f"{dict(enumerate(every))}: give all ranks the same sizes, and every replica a rank"
        )


def _shares(batch: Batch, num_replicas: int) -> list[Batch]:
    inputs, target = (leaves_cut(value, num_replicas) for value in batch)
    return list(zip(inputs, target, strict=True))


def _counted(target: Any) -> int:  # noqa: ANN401 - a tree
    """Returns how many elements of a target a loss counts, at least 1."""
    leaves = [leaf for _, leaf in flattened(target)[0] if isinstance(leaf, Tensor)]
    return max(1, sum(int((leaf != _IGNORED).sum()) for leaf in leaves))


def _gathered(own: Seen) -> list[Seen] | None:
    """Returns what all ranks had, on rank 0."""
    every: list[Any] = [None] * dist.get_world_size()
    is_first = dist.get_rank() == 0
    dist.gather_object(own, every if is_first else None, dst=0)
    return every if is_first else None


def _differing(first: Seen, second: Seen) -> list[str]:
    """Returns names of gradients that differ by more than rounding explains."""
    return [
        name
        for name, gradient in first.gradients.items()
        if (other := second.gradients[name]) is not None
        and gradient is not None
        and relative(other.double() - gradient.double(), gradient.double())
        > 64 * torch.finfo(gradient.dtype).eps
    ]
