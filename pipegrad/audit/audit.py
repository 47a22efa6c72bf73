"""Audit: compares the gradients of a user's pipeline with the gradients of one process.

[Note: an audit]
1. The caller's step runs on all ranks, as it is: schedule, reductions, clipping, optimizer.
2. Gradients are copied right before the optimizer steps, parameters after it (`seen.py`).
3. Rank 0 computes the same step on the uncut model, in float64 (`truth.py`).
4. A wrong gradient is compared with the gradients that known defects make (`hypotheses.py`). The
   defect that fits is its cause (`causes.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from pipegrad.audit.checks import Names, Reply, check_ranks, checked, copied, match
from pipegrad.audit.dropout import Without
from pipegrad.audit.judge import Judge, Verdict
from pipegrad.audit.report import Finding, Gradient, Report, Variant, merged
from pipegrad.audit.seen import PATIENCE_SECONDS, Gradients, Seen, watched
from pipegrad.audit.states import Stepper
from pipegrad.audit.truth import Batch, Data, LossFn, leaves_cut
from pipegrad.audit.variants import compared
from pipegrad.comm.agreement import agree, agree_keeping
from pipegrad.errors import AgreementError, PipegradError, PlanError, in_words, refuse
from pipegrad.plugins.written import written

T = TypeVar("T")

_NO_GROUP = (
    "there is no process group: run `pipegrad audit FILE.py:function`, which starts ranks; or call "
    "this in ranks of torchrun, after torch.distributed.init_process_group"
)
_MAKER = "a function of the uncut model that makes one"
_TABLE = "a table of name -> function"
_USED = (
    "its modules were stepped in this audit before: make modules, optimizer and schedule anew in "
    "the function"
)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """A pipeline's training step and the model of one process. `run` compares them.

    The audit ends after the first wrong step, because later steps would start with its values. Fix
    the cause, and audit again.

    Every rank creates an `Audit` with its own modules, and calls `run`. Train with new modules and
    optimizers afterwards, because the audit has stepped these.

    Attributes:
        step: ``step(inputs, target)`` is one whole training step of this rank on the batch of its
            replica: gradients to zero, microbatches, reductions, clipping, optimizer. It may return
            the loss, a list of losses of microbatches, a tuple whose first value is one of these,
            or ``{"loss": ..., "grad_norm": ...}``. It is called once for each batch, and twice if
            there is one batch alone: a stale gradient shows in the second step.
        modules: The modules of this rank's stages. DistributedDataParallel, FSDP2, compiled modules
            and DTensors are supported.
        model: The uncut model, on every rank, with the same names or the same values.
        loss_fn: ``loss_fn(output, target)`` is the mean loss of the uncut model's output. If it
            returns a tuple, the first value is the loss. Model and loss are computed in float64.
        batches: For each step, inputs and target of all replicas: the same on all ranks. Tensors,
            or dicts, tuples and lists of them. Their first dimension is cut into replicas, and then
            into microbatches. The uncut model gets a dict by name, a tuple by position. An iterator
            needs `steps`.
        microbatches: Number of microbatches of a step on one replica.
        replica: Index of the data that this rank gets, from 0.
        num_replicas: Number of replicas with different data. All ranks of a pipeline have the same
            data, and so have all ranks of tensor parallelism.
        names: Names of the modules' parameters -> names in the uncut model. By default they are
            matched by names, or by shapes and values.
        gradients: Returns gradients by names of the modules' parameters, right before the
            optimizer's step; by default ``.grad``, or ``.main_grad``.
        clip_norm: The norm to which the step clips gradients by its own code. It is not needed if
            the step calls torch's functions. The step also calls `before_clipping`, or returns the
            norm of its gradients.
        autocast: The dtype in which the pipeline computes, if its parameters have another one.
        by_microbatch: True if the right gradient is computed from each microbatch alone, also where
            samples of a batch depend on each other, as in BatchNorm. By default it is computed from
            the whole batch.
        optimizer: ``optimizer(model)`` creates the optimizer of the uncut model in one process,
            with the same options as the pipeline's. It may be any object whose ``step()`` updates
            the model, for example one that also clips, or changes the learning rate. It gets the
            gradients that the pipeline's optimizers got. By default updates are not compared.
        variants: Name -> a function that returns this rank's audit with one option changed, for
            both sides. It creates new modules, from the same seed; modules that were stepped in
            this audit are an error. After its own steps an audit compares each variant with one
            process. It also compares how much the option changes the pipeline and how much it
            changes one process. A function refuses the option if it raises a ValueError,
            ImportError, NotImplementedError, AssertionError or PipegradError.
    """

    step: Callable[[Any, Any], object]
    modules: nn.Module | Iterable[nn.Module]
    model: nn.Module
    loss_fn: LossFn
    batches: Iterable[Batch]
    microbatches: int
    replica: int = 0
    num_replicas: int = 1
    names: Mapping[str, str] | None = None
    gradients: Gradients | None = None
    clip_norm: float | None = None
    autocast: torch.dtype | None = None
    by_microbatch: bool = False
    optimizer: Stepper | None = None
    variants: Mapping[str, Callable[[], Audit]] = field(default_factory=dict)

    def run(self, *, steps: int | None = None, tolerance: float | None = None) -> Report:
        """Runs steps and compares them with one process. All ranks must call it.

        Args:
            steps: Number of steps; by default one for each batch, and two for a single batch.
            tolerance: Largest error of a gradient: norm of the difference, divided by the norm of
                the right gradient, or by 1/1000 of the norm of all gradients if that is larger. By
                default it is derived: 32 x eps x sqrt(targets) for the rounding of float32, and 4
                times the error that one process has in the pipeline's dtype, but at most 0.25.

        Returns:
            The report, the same on all ranks.

        Raises:
            PlanError: If modules are no part of the uncut model, or sizes do not fit.
            AgreementError: If ranks fail differently; if one process cannot compute the uncut model
                in float64; or if the uncut model draws random numbers.
        """
        if not dist.is_initialized():
            raise PlanError(_NO_GROUP)
        begin = time.monotonic()
        run = _Run(self, steps, tolerance)
        usual = report = run.report()
        used = WeakSet(self.trained)
        for name, change in self.variants.items():
            variant, findings, notes = run.beside(name, change, usual, used)
            report = replace(
                report,
                findings=report.findings + findings,
                notes=report.notes + notes,
                variants=(*report.variants, variant),
            )
        return replace(report, seconds=time.monotonic() - begin)

    def __post_init__(self) -> None:
        modules = self.modules
        if not isinstance(modules, nn.Module):  # an iterator could be read once only
            modules = tuple(modules.values() if isinstance(modules, Mapping) else modules or ())
            object.__setattr__(self, "modules", modules)
        has_maker = self.optimizer is None or callable(self.optimizer)
        kinds: list[tuple[str, object, str, bool]] = [
            ("step", self.step, "a function", callable(self.step)),
            ("loss_fn", self.loss_fn, "a function", callable(self.loss_fn)),
            ("model", self.model, "a module", isinstance(self.model, nn.Module)),
            ("modules", modules, "modules", all(isinstance(m, nn.Module) for m in self.held)),
            ("microbatches", self.microbatches, "int", isinstance(self.microbatches, int)),
            ("optimizer", self.optimizer, _MAKER, has_maker),
            ("variants", self.variants, _TABLE, isinstance(self.variants, Mapping)),
        ]
        reasons = {
            f"{name} is {type(value).__name__}, expected {expected}": not is_right
            for name, value, expected, is_right in kinds
        }
        refuse(PlanError, reasons)

    @property
    def held(self) -> tuple[nn.Module, ...]:
        """The modules of this rank."""
        modules = self.modules
        return (modules,) if isinstance(modules, nn.Module) else tuple(modules)

    @property
    def trained(self) -> set[nn.Module]:
        """The modules of this rank that hold parameters themselves, at any depth."""
        every = (part for held in self.held for part in held.modules())
        return {part for part in every if any(True for _ in part.parameters(recurse=False))}


class NotComparedError(AgreementError):
    """One process cannot compute the pipeline's step. All ranks raise the same error."""


class _Run:
    """One run of an audit."""

    def __init__(self, audit: Audit, steps: int | None, tolerance: float | None) -> None:
        self._audit, self._options = audit, (steps, tolerance)

        def prepare() -> tuple[tuple[list[Batch], Names, nn.Module], Reply]:
            batches = checked(audit, steps, tolerance)
            names = match(audit.held, audit.model, audit.names)
            sizes = len(batches), audit.microbatches, audit.num_replicas, audit.replica
            reply = list(names.parameters), written(batches), sizes, list(audit.variants)
            return (batches, names, copied(audit.model)), reply

        (self._batches, self._names, self._model), every = agree_keeping(
            "the audit", prepare, timeout_seconds=PATIENCE_SECONDS
        )
        self._notes = check_ranks(audit, every)
        self._judge = Judge(
            self._model, audit.clip_norm, tolerance, audit.autocast, audit.optimizer
        )
        self._without = Without(part for own in audit.held for part in own.modules())

    def report(self) -> Report:
        """Runs steps until one is wrong; returns the report."""
        begin, number = time.monotonic(), 0
        findings, gradients, notes = list[Finding](), list[Gradient](), list[str]()
        for number, batch in enumerate(self._batches, 1):
            (findings, gradients), notes = self._judged(batch, number)
            if findings:
                break  # a later step would begin with what this one has left
        return Report(
            merged(findings),
            (*self._notes, *notes),
            tuple(gradients),
            number,
            dist.get_world_size(),
            time.monotonic() - begin,
        )

    def beside(
        self, name: str, change: Callable[[], Audit], usual: Report, used: WeakSet[nn.Module]
    ) -> tuple[Variant, tuple[Finding, ...], tuple[str, ...]]:
        """Runs the audit of a variant; returns its comparison, its findings and new notes.

        Raises:
            PlanError: If a step fails.
        """
        other, refusal = _made(name, change, used)
        if other is None:
            return Variant(name, f"refused: {refusal}"), (), ()
        run: _Run | None = None
        try:
            run = _Run(other, *self._options)
            report = run.report()
        except Exception as error:
            known: Any = (PlanError, AgreementError) if run is None else NotComparedError
            if not isinstance(error, known):
                words = f"the variant {name!r} fails in a step: {in_words(error)}"
                raise PlanError(words) from error
            words = f"{name}: it cannot be compared with one process: {error}"
            finding = Finding(words, "look at what the pipeline makes of it")
            return Variant(name, "not compared"), (finding,), ()
        sides = (usual, self._judge.sizes), (report, run._judge.sizes)
        variant, findings = _on_rank_0("a variant", lambda: compared(name, *sides))
        new = tuple(f"{name}: {note}" for note in report.notes if note not in usual.notes)
        return variant, findings, new

    def _judged(self, batch: Batch, number: int) -> tuple[Verdict, list[str]]:
        """Runs a step on all ranks; returns the verdict and all notes of rank 0, on all ranks."""
        audit, seen = self._audit, self._seen(batch)
        every = [seen] * dist.get_world_size()
        dist.gather_object(seen, None if dist.get_rank() else every, dst=0)

        def compare() -> tuple[Verdict, list[str]]:
            shares = leaves_cut(batch, audit.num_replicas)
            cut = [leaves_cut(share, audit.microbatches) for share in shares]
            data = Data(audit.loss_fn, cut, batch, audit.by_microbatch)
            verdict = self._judge.judge(every, data, number)
            return verdict, [*self._judge.notes.values()]

        try:
            return _on_rank_0("compare with one process", compare)
        except AgreementError as error:
            if error.absent or error.follows:
                raise
            raise NotComparedError(str(error)) from error

    def _seen(self, batch: Batch) -> Seen:
        """Runs a step; returns the snapshot of this rank."""
        audit = self._audit
        share = leaves_cut(batch, audit.num_replicas)[audit.replica]
        return watched(
            lambda: audit.step(*share), self._names, audit.replica, audit.gradients, self._without
        )


def _on_rank_0(what: str, function: Callable[[], T]) -> T:
    """Runs a function on rank 0; returns its result, or raises its error, on all ranks."""

    def run() -> T | None:
        return None if dist.get_rank() else function()

    return cast("T", agree(what, run, timeout_seconds=PATIENCE_SECONDS)[0])


def _made(
    name: str, change: Callable[[], Audit], used: WeakSet[nn.Module]
) -> tuple[Audit | None, str]:
    """Returns the audit of a variant; if all ranks refuse the option, None and the reason.

    Its modules are added to the `used` ones of earlier audits.

    Raises:
        AgreementError: If some ranks fail, or the function raises an error that refuses nothing.
    """

    def make() -> tuple[Audit | None, str]:
        try:
            other = change()
        except _REFUSALS as error:
            return None, in_words(error)
        except Exception as error:
            raise PlanError(f"the variant {name!r} fails: {in_words(error)}") from error
        if not isinstance(other, Audit):
            raise PlanError(
                f"the variant {name!r} returned {type(other).__name__}, expected a pipegrad.Audit"
            )
        if not used.isdisjoint(other.trained):
            raise PlanError(f"the variant {name!r} cannot be compared: {_USED}")
        used.update(other.trained)
        return other, ""

    other, refusals = agree_keeping(f"the variant {name!r}", make, timeout_seconds=PATIENCE_SECONDS)
    if any(refusals) and not all(refusals):
        by_rank = {rank: words for rank, words in enumerate(refusals) if words}
        raise AgreementError(f"the variant {name!r}: only some ranks refuse it: {by_rank}")
    return other, next(filter(None, refusals), "")


# Errors that refuse an option. Other errors, such as a NameError, are mistakes.
_REFUSALS = PipegradError, ValueError, NotImplementedError, AssertionError, ImportError
