"""Audit: are the gradients of somebody's pipeline those of one process?

[Note: an audit]
1. The caller's step runs on all ranks, as it is: schedule, reductions, clipping, optimizer.
2. Gradients are taken right before the optimizer steps, parameters after it.
3. One rank computes the same step on the uncut model, whole and in parts (`truth`).
4. Each gradient is fitted by its parts (`contributions`), and the weights say the cause (`causes`).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipegrad.audit.causes import Place, causes
from pipegrad.audit.clipping import factor, norm_of, scale_of, wrong_norm
from pipegrad.audit.contributions import Fit, fit
from pipegrad.audit.matching import match
from pipegrad.audit.report import Finding, Report
from pipegrad.audit.truth import Batch, LossFn, Truth, compute

Step = Callable[[Any, Any], object]
_TERMS = 64.0  # factor of the rounding of a gradient


@dataclass(frozen=True)
class Seen:
    """What one rank had in one step, by names of the uncut model.

    Attributes:
        replica: Of the rank.
        loss: What the step has returned, if it is a number.
        before: Parameters before it.
        gradients: Right before the optimizer; None where there is none.
        after: Parameters after it.
    """

    replica: int
    loss: float | None
    before: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    after: dict[str, Tensor]


def audit(
    step: Step,
    modules: nn.Module | Sequence[nn.Module],
    model: nn.Module,
    loss_fn: LossFn,
    batches: Sequence[Batch],
    *,
    microbatches: int,
    replica: int = 0,
    num_replicas: int = 1,
    names: Mapping[str, str] | None = None,
    clip_norm: float | None = None,
    tolerance: float | None = None,
) -> Report:
    """Runs a pipeline's step, compares it with one process, and says what is wrong.

    Every rank must call it. Afterwards parameters are those after the steps.

    Args:
        step: ``step(inputs, target)`` makes one whole training step of this rank on its replica's
            share of a batch, with ``zero_grad`` and the optimizer. It may return the loss.
        modules: What this rank holds: the modules of its stages.
        model: The uncut model, with the same values as the stages. It is not changed.
        loss_fn: ``loss_fn(output, target)``.
        batches: For each step, inputs and target of all replicas, the same on all ranks. The first
            dimension is cut into replicas, and then into microbatches.
        microbatches: Of a step.
        replica: Of this rank.
        num_replicas: Number of replicas that see different data.
        names: Names of this rank's parameters -> their names in the uncut model.
        clip_norm: The norm to which the step clips the gradients of the whole model, if it does.
        tolerance: Of a gradient, relative to its norm; by default from dtype and number of terms.

    Returns:
        The report, the same on all ranks.

    Raises:
        PlanError: If a stage is no part of the uncut model.
    """
    begin = time.monotonic()
    held = [modules] if isinstance(modules, nn.Module) else list(modules)
    own = _named(held, model, names)
    findings: list[Finding] = []
    worst, count, allowed, last = 0.0, 0, 0.0, None
    for number, (inputs, target) in enumerate(batches, 1):
        of_replicas = list(zip(inputs.chunk(num_replicas), target.chunk(num_replicas), strict=True))
        seen = _gathered(_observed(step, own, *of_replicas[replica], replica=replica))
        if dist.get_rank() == 0:
            parts = [
                list(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True))
                for x, y in of_replicas
            ]
            truth = compute(_with_values(model, seen), loss_fn, parts)
            counts = {
                "microbatches": microbatches,
                "replicas": num_replicas,
                "targets": target.numel(),
                "targets of a replica": target.numel() // num_replicas,
                "targets of a microbatch": target.numel() // num_replicas // microbatches,
                "ranks": dist.get_world_size(),
            }
            allowed = tolerance or _tolerance(truth, target)
            right = factor(norm_of(truth, list(truth.uses)), clip_norm)
            held_by = [list(of_rank.gradients) for of_rank in seen]
            for rank, of_rank in enumerate(seen):
                scale = right
                if clip_norm is not None:
                    found_scale = scale_of(of_rank.gradients, truth)
                    words = wrong_norm(
                        found_scale, clip_norm, truth, held_by[rank], held_by, num_replicas
                    )
                    if words and not math.isclose(found_scale, right, rel_tol=1e-4):
                        findings.append(Finding(words, (), (rank,), number))
                        scale = found_scale
                for name, gradient in of_rank.gradients.items():
                    actual = None if gradient is None else gradient.double() / scale
                    found, error = _judged(
                        name, actual, truth, of_rank.replica, counts, allowed, last
                    )
                    worst, count = max(worst, error), count + 1
                    findings += [Finding(cause, (name,), (rank,), number) for cause in found]
            findings += _losses(seen, truth, allowed, number)
            findings += _drift(seen, number)
            last = truth
        # What follows a wrong step is wrong, too.
        if _on_all(bool(findings)):
            break
    report = Report(_merged(findings), count, worst, allowed, time.monotonic() - begin)
    shared = [report]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _named(
    held: Sequence[nn.Module], model: nn.Module, names: Mapping[str, str] | None
) -> dict[str, nn.Parameter]:
    """Returns this rank's parameters by their names in the uncut model."""
    found: dict[str, nn.Parameter] = {}
    for number, module in enumerate(held):
        known = names or match(module, model, f"module {number} of rank {dist.get_rank()}")
        parameters = dict(module.named_parameters(remove_duplicate=False))
        found |= {known[name]: parameter for name, parameter in parameters.items()}
    return found


def _observed(
    step: Step, own: Mapping[str, nn.Parameter], inputs: Any, target: Any, *, replica: int
) -> Seen:
    """Runs a step; returns what this rank had in it."""
    gradients: dict[str, Tensor | None] = {}

    def take(*_: object) -> None:
        if not gradients:
            gradients.update({n: None if p.grad is None else _copy(p.grad) for n, p in own.items()})

    before = {name: _copy(parameter) for name, parameter in own.items()}
    hook = register_optimizer_step_pre_hook(take)
    try:
        result = step(inputs, target)
    finally:
        hook.remove()
    take()
    is_number = isinstance(result, float) or (isinstance(result, Tensor) and result.numel() == 1)
    loss = float(torch.as_tensor(result).detach()) if is_number else None
    after = {name: _copy(parameter) for name, parameter in own.items()}
    return Seen(replica, loss, before, gradients, after)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


def _gathered(seen: Seen) -> list[Seen]:
    """Returns what all ranks had, on rank 0."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(seen, every if dist.get_rank() == 0 else None, dst=0)
    return every


def _on_all(value: bool) -> bool:
    """Returns the value of rank 0."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _with_values(model: nn.Module, seen: Sequence[Seen]) -> nn.Module:
    """Returns a copy of the uncut model, in double precision, with the values of the ranks."""
    whole = copy.deepcopy(model).cpu().double()
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for of_rank in reversed(seen):
            for name, value in of_rank.before.items():
                parameters[name].copy_(value)
    return whole


def _judged(
    name: str,
    gradient: Tensor | None,
    truth: Truth,
    replica: int,
    counts: Mapping[str, int],
    tolerance: float,
    last: Truth | None,
) -> tuple[list[str], float]:
    """Returns the causes of a wrong gradient, and its error."""
    [(first, uses)] = [(n, names) for n, names in truth.uses.items() if name in names]
    right, parts = truth.gradients[first], truth.parts[first]
    actual = torch.zeros_like(right) if gradient is None else gradient.double()
    scale = right.norm().clamp_min(torch.finfo(torch.float64).tiny)
    error = float((actual - right).norm() / scale)
    if error <= tolerance:
        return [], error
    weights = truth.weights[:, :, None].expand(parts.shape[:3])
    before = last.gradients[first] if last is not None else None
    fitted: Fit = fit(actual, parts, weights, before)
    place = Place(replica, uses.index(name), counts)
    return causes(fitted, place, tolerance) or [f"it is off by {error:.2g}"], error


def _tolerance(truth: Truth, target: Tensor) -> float:
    """Returns the rounding that a gradient may have: c x eps x sqrt(terms)."""
    return _TERMS * torch.finfo(torch.float32).eps * target.numel() ** 0.5


def _losses(seen: Sequence[Seen], truth: Truth, tolerance: float, number: int) -> list[Finding]:
    """Returns losses that are not that of one process."""
    found = []
    for rank, of_rank in enumerate(seen):
        loss = of_rank.loss
        if loss is not None and not math.isclose(loss, truth.loss, rel_tol=tolerance):
            cause = f"the loss is {loss:.6g}, and {truth.loss:.6g} in one process"
            found.append(Finding(cause, (), (rank,), number))
    return found


def _drift(seen: Sequence[Seen], number: int) -> list[Finding]:
    """Returns parameters whose copies differ after the step."""
    first: dict[str, tuple[int, Tensor]] = {}
    found = []
    for rank, of_rank in enumerate(seen):
        for name, value in of_rank.after.items():
            other, there = first.setdefault(name, (rank, value))
            if not torch.equal(value, there):
                cause = "copies differ after the step: ranks step them with different gradients"
                found.append(Finding(cause, (name,), (other, rank), number))
    return found


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Returns findings with one cause as one; the first step of each."""
    merged: dict[str, Finding] = {}
    for finding in findings:
        known = merged.setdefault(finding.cause, finding)
        merged[finding.cause] = replace(
            known,
            names=tuple(dict.fromkeys([*known.names, *finding.names])),
            ranks=tuple(sorted({*known.ranks, *finding.ranks})),
        )
    return list(merged.values())
