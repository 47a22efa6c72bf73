"""Judge: compares what all ranks had in a step with one process. It runs on rank 0 alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipegrad.audit import clipping, states
from pipegrad.audit.causes import (
    LATE,
    NOT_KNOWN,
    NOT_SUMMED,
    Cause,
    Explanation,
    Place,
    explained,
)
from pipegrad.audit.hypotheses import AT_ONCE, Fit, Hypothesis, chosen_of, fits
from pipegrad.audit.report import Finding, Gradient, shown
from pipegrad.audit.seen import Seen
from pipegrad.audit.states import Entry, Key, Stepped, Stepper, entries_of
from pipegrad.audit.truth import WHOLE, Data, Truth, computed, names_by_use, sampled
from pipegrad.audit.variants import Size, Where
from pipegrad.errors import PlanError

_ROUNDING = 32.0  # factor of the rounding of a gradient
_NOISE = 4.0  # factor of the error of one process that computes in the pipeline's dtype
_SMALL = 1e-3  # gradients below this share of the whole norm are compared with it


def _counts(data: Data, num_ranks: int) -> dict[str, int]:
    """Returns numbers that a gradient may be multiplied by, the likely ones first."""
    microbatches, replicas, targets = (len(data.batches[0]), len(data.batches), data.targets)
    every = {
        "microbatches": microbatches,
        "replicas": replicas,
        "targets of the step": sum(targets),
    }
    if num_ranks > 2:  # twice as large has many causes
        every["ranks"] = num_ranks
    if len(set(targets)) == 1:
        every["targets of a replica"] = targets[0] * microbatches
        every["targets of a microbatch"] = targets[0]
    if microbatches == replicas:
        every = {"microbatches or of replicas": every.pop("microbatches"), **every}
    names: dict[int, str] = {}
    for name, number in every.items():
        names.setdefault(number, name)
    return {name: number for number, name in names.items()}


class Wrong(NamedTuple):
    """A gradient that is wrong, its error that is right, and what an error is divided by."""

    entry: Entry
    allowed: float
    scale: float


Verdict = tuple[list[Finding], list[Gradient]]


@dataclass
class Judge:
    """Compares steps, one after the other.

    Attributes:
        model: The uncut model, on CPU. It is not changed.
        clip_norm: The norm to which the step clips; None to take it from torch's functions.
        tolerance: Relative, of each gradient; None to derive it.
        autocast: In which the pipeline computes, if that is another dtype than its parameters'.
        optimizer: Makes that of one process; None if updates are not compared.
        notes: What was not compared, and why.
        gradients: Norms of the gradients of the first step, on both sides.
        updates: Norms of the updates of all steps up to the first with a finding.
    """

    model: nn.Module
    clip_norm: float | None = None
    tolerance: float | None = None
    autocast: torch.dtype | None = None
    optimizer: Stepper | None = None
    notes: dict[str, str] = field(default_factory=dict)
    gradients: dict[Where, Size] = field(default_factory=dict)
    updates: dict[Where, Size] = field(default_factory=dict)

    def __post_init__(self) -> None:
        uses = names_by_use(self.model)
        self._first = {name: first for first, names in uses.items() for name in names}
        self._before: dict[Key, Tensor] = {}
        self._is_sound = True  # steps follow upon each other

    def judge(self, seen: Sequence[Seen], data: Data, number: int) -> Verdict:
        """Returns what is wrong in a step, by its number from 1, and how far gradients are off."""
        _check_seen(seen)
        if several := list(states.several(seen)):  # nothing else means anything
            return [replace(finding, step=number) for finding in several], []
        findings = list(states.starts(seen, self.model, self._first)) if number == 1 else []
        dtypes = {
            self._first[name]: value.dtype
            for of_rank in seen
            for name, value in of_rank.before.items()
        }
        if number == 1:
            self._describe(seen)
            if self.optimizer is not None:
                self._stepped = Stepped(self.model, self.optimizer, dtypes)
        truth = computed(self._with_values(seen), data, dtypes, self.autocast)
        if truth.is_coupled:
            self.notes["coupled"] = (
                "no parts of microbatches make the gradient of the batch: its samples depend on "
                "each other, as in BatchNorm or in a loss that is no mean over samples. What is "
                "right is that of the whole batch. If each microbatch is to be computed by itself, "
                "give the audit by_microbatch=True"
            )
        frozen = states.frozen(seen, self._first)
        entries, norms, after = clipping.unclipped(seen, self._first, self.clip_norm)
        findings += norms
        findings += states.losses(seen, truth)
        findings += states.trained(entries, truth, frozen)
        changed = {(finding.names[0], finding.ranks) for finding in norms if finding.names}
        entries = [
            entry
            for entry in entries
            if entry.name in truth.gradients
            and not set(entry.ranks) & frozen.get(entry.name, set())
            and entry.key not in changed
        ]
        places = _places(entries, truth, data, len(seen), after)
        wrong, gradients = self._gradients(entries, truth, dtypes, places, sum(data.targets))
        if number == 1:
            for entry, one in zip(entries, gradients, strict=True):
                own = 0.0 if entry.gradient is None else float(entry.gradient.double().norm())
                right = float(truth.gradients[entry.name].norm())
                self.gradients[1, *entry.key] = Size(right, own, one.allowed)
        # A loss scale that is removed behind clipping is one cause, and is said there.
        is_late = any(finding.advice == LATE.advice for finding in wrong)
        is_clipped = any(of_rank.norm is not None for of_rank in seen)
        findings += wrong
        findings += [
            Finding(
                f"gradients are multiplied by {value:.4g} between clipping and the optimizer's "
                f"step",
                "scale gradients before they are clipped",
                ranks=(rank,),
            )
            for rank, value in after.items()
            if not is_late
        ]
        # Ranks that clip by other norms, or other gradients, update copies otherwise: one cause.
        explained = {name for finding in findings for name in finding.names}
        explained |= set(self._first.values()) if norms or (wrong and is_clipped) else set()
        findings += states.updates(seen, self._first, explained)
        findings += self._updates(seen, explained, number)
        findings += states.copies(states.held(seen, "after", self._first), _DRIFT, explained)
        findings += states.buffers(seen, truth)
        self._is_sound &= not findings
        self._before = {
            entry.key: entry.gradient
            for entry in entries_of(seen, [of_rank.gradients for of_rank in seen], self._first)
            if entry.gradient is not None
        }
        return [replace(finding, step=number) for finding in findings], gradients

    def _describe(self, seen: Sequence[Seen]) -> None:
        """Adds notes about values and optimizers that are odd, and no finding."""
        if why_not := states.why_not_updated(seen):
            self.notes["optimizer"] = f"which parameters optimizers step is not known: {why_not}"
        there = dict(self.model.named_parameters(remove_duplicate=False))
        differing = [
            name
            for of_rank in seen
            for name, value in of_rank.before.items()
            if not torch.equal(value, there[name].detach().cpu().to(value.dtype))
        ]
        if differing:
            self.notes["values"] = (
                f"stages start with other values than the uncut model, in "
                f"{shown(differing)}: those of the stages were taken for both"
            )

    def _with_values(self, seen: Sequence[Seen]) -> nn.Module:
        """Returns the uncut model in double precision, with the values of the ranks."""
        whole = copy.deepcopy(self.model).cpu().double()
        parameters = dict(whole.named_parameters(remove_duplicate=False))
        buffers = dict(whole.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for of_rank in reversed(seen):
                for name, value in of_rank.before.items():
                    parameters[name].copy_(value)
                for name, value in of_rank.buffers[0].items():
                    if of_rank.replica == 0:
                        buffers[name].copy_(value)
        return whole

    def _gradients(
        self,
        entries: Sequence[Entry],
        truth: Truth,
        dtypes: Mapping[str, torch.dtype],
        places: Mapping[Key, Place],
        num_targets: int,
    ) -> Verdict:
        """Returns what is wrong with gradients, and how far each is from the right one."""
        whole = math.sqrt(sum(float(g.norm()) ** 2 for g in truth.gradients.values()))
        gradients, wrong = [], list[Wrong]()
        for entry in entries:
            right = truth.gradients[entry.name]
            actual = torch.zeros_like(right) if entry.gradient is None else entry.gradient
            scale = max(float(right.norm()), _SMALL * whole, _TINY)
            error = float((actual.double() - right).norm()) / scale
            noise = truth.noise.get(entry.name, 0.0) * float(right.norm()) / scale
            # Many models compute in float32 inside, also where their parameters are float64.
            is_exact = dtypes[entry.name] == torch.float64 and noise < _EXACT
            eps = torch.finfo(torch.float64 if is_exact else torch.float32).eps
            rounding = _ROUNDING * eps * math.sqrt(num_targets)
            allowed = self.tolerance or rounding + _NOISE * noise
            if not allowed <= _MOST_ALLOWED and self.tolerance is None:
                self.notes["noise"] = (
                    f"one process in the pipeline's dtype is off by as much as {noise:.2g} of a "
                    f"gradient: errors below {_MOST_ALLOWED:g} are not seen. Compare in float32"
                )
                allowed = _MOST_ALLOWED
            gradients.append(Gradient(entry.name, entry.ranks, error, allowed))
            if not error <= allowed:  # NaN is wrong, too
                wrong.append(Wrong(entry, allowed, scale))
        why = self._why(wrong, entries, truth, places)
        is_small = all(0 < one.error < _LOW for one in gradients)
        is_unknown = any(finding.cause == NOT_KNOWN.words for finding in why)
        if is_small and is_unknown and torch.float32 in dtypes.values() and self.autocast is None:
            self.notes["autocast"] = (
                "all errors are as small as those of half precision: if the pipeline computes in "
                "torch.autocast, give autocast=torch.bfloat16"
            )
        return why, gradients

    def _updates(self, seen: Sequence[Seen], explained: set[str], number: int) -> list[Finding]:
        """Returns updates that are wrong, if one process has an optimizer, and keeps all norms."""
        actual = states.updated(seen, self._first)
        right = self._stepped.updates(seen, self._first) if self.optimizer is not None else None
        allowed = dict[Key, float]()
        for name, rank, value in states.held(seen, "before", self._first):
            rounding = _NOISE * torch.finfo(value.dtype).eps * float(value.double().norm())
            own = float(actual[name, (rank,)].norm())
            allowed[name, (rank,)] = _UPDATE + rounding / max(own, _TINY)
            if allowed[name, (rank,)] > _MOST_ALLOWED and right is not None and own:
                self.notes["updates"] = (
                    "some updates are as small as the rounding of their parameters, so that wrong "
                    "ones are not seen: raise the learning rate for the audit"
                )
            if self._is_sound:
                one = None if right is None else float(right[name].norm())
                self.updates[number, name, (rank,)] = Size(one, own, allowed[name, (rank,)])
        if right is None:
            return []
        return list(states.other_updates(actual, right, allowed, explained))

    def _why(
        self,
        wrong: Sequence[Wrong],
        entries: Sequence[Entry],
        truth: Truth,
        places: Mapping[Key, Place],
    ) -> list[Finding]:
        """Returns the causes of wrong gradients."""
        findings, finite = list[Finding](), list[Wrong]()
        for one in wrong:
            entry = one.entry
            if entry.gradient is None or bool(entry.gradient.isfinite().all()):
                finite.append(one)
            else:
                findings.append(Finding(*_NOT_FINITE, (entry.name,), entry.ranks))
        parts = truth.parts(list({one.entry.name for one in finite})) if finite else {}
        found = {one.entry.key: self._fits(one, parts[one.entry.name], truth) for one in finite}
        found = {key: (_shared(key, found), least) for key, (_, least) in found.items()}
        chosen = {
            one.entry.key: explained(
                [(fit, places[one.entry.key]) for fit in found[one.entry.key][0]], one.allowed
            ).fit
            for one in finite
        }
        usual, apart = _usual(chosen, entries, truth), _apart(chosen, entries)
        said = list[tuple[Entry, Explanation]]()
        for one in finite:
            entry = one.entry
            place = replace(
                places[entry.key],
                usual=usual[entry.ranks].scales[0] if entry.ranks in usual else None,
                is_apart=entry.name in apart,
            )
            fitting = [(fit, place) for fit in found[entry.key][0]]
            if place.num_uses > 1:
                copies = [other for other in entries if other.name == entry.name]
                stages = {use: usual.get(copy.ranks) for copy in copies for use in copy.uses}
                of_uses = [stages.get(use) or _RIGHT for use in truth.uses[entry.name]]
                fitting += [
                    (fit, replace(place, holders=1, usual=None, use=name))
                    for fit, name in _fits_of_uses(one, parts[entry.name], truth, of_uses)
                ]
            said.append((entry, explained(fitting, one.allowed)))
        summed = _not_summed(finite, truth)
        # Numbers that nothing explains follow from other values beside them.
        others = {e.ranks for e, _ in said if not found[e.key][0] and e.name not in summed}
        for entry, why in said:
            causes, details = why.causes, tuple[str, ...]()
            if not why.is_known and entry.name in summed:
                causes = [NOT_SUMMED]
            elif not why.is_known and entry.ranks in others:
                causes = [NOT_KNOWN]
                details = (f"{found[entry.key][1]:.2g} of {entry.name} is not explained",)
            findings += [Finding(*c, (entry.name,), entry.ranks, details=details) for c in causes]
        return findings

    def _fits(
        self, one: Wrong, parts: Mapping[str, Tensor], truth: Truth
    ) -> tuple[list[Fit], float]:
        """Returns the hypotheses that make a gradient, and the smallest residual."""
        entry, right = one.entry, sampled(truth.gradients[one.entry.name])
        before = self._before.get(entry.key)
        return fits(
            _sampled(entry, right),
            {AT_ONCE: right.reshape(1, 1, 1, 1, -1), **parts},
            _allowed(one, truth),
            entry.replicas,
            None if before is None else sampled(before),
        )


def _shared(key: Key, found: Mapping[Key, tuple[list[Fit], float]]) -> list[Fit]:
    """Returns the fits of a gradient; those that a larger one of its ranks has are sure, too."""
    sure = [fit for other, (own, _) in found.items() if other[1] == key[1] for fit in own]
    sure = [fit for fit in sure if fit.is_sure]
    return [
        replace(fit, is_sure=fit.is_sure or any(_is_alike(fit, other) for other in sure))
        for fit in found[key][0]
    ]


def _is_alike(fit: Fit, other: Fit) -> bool:
    pairs = zip(fit.scales, other.scales, strict=False)
    return fit.hypothesis == other.hypothesis and all(
        math.isclose(a, b, rel_tol=_ALIKE, abs_tol=_NONE) for a, b in pairs
    )


def _fits_of_uses(
    one: Wrong, parts: Mapping[str, Tensor], truth: Truth, usual: Sequence[Fit]
) -> Iterator[tuple[Fit, str]]:
    """Yields what explains one use of a tied parameter, if the others are as their stages are.

    The name of the use is "" if its stage has the same in other parameters.
    """
    actual, allowed = _sampled(one.entry, truth.gradients[one.entry.name]), _allowed(one, truth)
    every = [(fit, fit.hypothesis, parts.get(fit.hypothesis.view, parts[WHOLE])) for fit in usual]
    shares = [
        fit.scales[0] * chosen_of(hypothesis, view)[:, use].sum(0)
        for use, (fit, hypothesis, view) in enumerate(every)
    ]
    for use, (stage, of_stage, _) in enumerate(every):
        rest = actual.double() - torch.stack(shares[:use] + shares[use + 1 :]).sum(0)
        own = {view: of_view[:, :, :, [use]] for view, of_view in parts.items()}
        for fit in fits(rest, own, allowed, one.entry.replicas)[0]:
            is_alike = replace(fit.hypothesis, view=of_stage.view) == of_stage and math.isclose(
                fit.scales[0], stage.scales[0], rel_tol=_ALIKE
            )
            if fit.scales[0] > _NONE:  # without this use, the tie is not reduced
                yield fit, "" if is_alike else truth.uses[one.entry.name][use]


def _sampled(entry: Entry, right: Tensor) -> Tensor:
    return sampled(torch.zeros_like(right) if entry.gradient is None else entry.gradient)


def _allowed(one: Wrong, truth: Truth) -> float:
    """Returns the norm of the rounding of the elements of a gradient that are looked at."""
    whole = truth.gradients[one.entry.name]
    right = sampled(whole)
    size = float(_sampled(one.entry, whole).norm()) / max(float(right.norm()), _TINY)
    return one.allowed * one.scale * max(1.0, size) * math.sqrt(right.numel() / whole.numel())


_UPDATE = 1e-3  # relative error of an update by the same optimizer on the same gradient
_LOW = 0.1  # error of gradients that were computed in half precision
_MOST_ALLOWED = 0.25  # else a missing gradient would pass
_TINY = torch.finfo(torch.float64).tiny
_EXACT = 1e-12  # of a gradient that is float64 all the way
_NONE = 1e-3  # of a use: it has no share
_ALIKE = 0.02  # of the scales of two parameters of a stage
_RIGHT = Fit(Hypothesis(), (1.0,))
_DRIFT = Cause(
    "copies of the parameter differ after the optimizer's step",
    "step all copies with the same gradients, options and dtype",
)
_NOT_FINITE = Cause(
    "the gradient has infinities or NaN",
    "compare without fp16 first; with it, look at the loss scale and at what is reduced before "
    "it is divided",
)


def _check_seen(seen: Sequence[Seen]) -> None:
    """Checks that there are gradients to compare.

    Raises:
        PlanError: If the caller's optimizer is none of torch, and has set them to None.
    """
    has_optimizer = any(of_rank.updates for of_rank in seen)
    if not has_optimizer and all(g is None for s in seen for g in s.gradients.values()):
        raise PlanError(
            "no gradient was seen: no optimizer of torch.optim has stepped, and gradients are None "
            "after the step. Call pipegrad.audit.before_clipping() in the step when gradients are "
            "reduced, or give `gradients`"
        )


def _not_summed(wrong: Sequence[Wrong], truth: Truth) -> set[str]:
    """Returns parameters whose ranks have parts of one gradient, and the sum is right."""
    held: dict[str, dict[tuple[int, ...], list[Wrong]]] = {}
    for one in wrong:
        held.setdefault(one.entry.name, {}).setdefault(one.entry.replicas, []).append(one)
    return {
        name
        for name, of_replicas in held.items()
        if all(_sum_is(group, truth.gradients[name]) for group in of_replicas.values())
    }


def _sum_is(group: Sequence[Wrong], right: Tensor) -> bool:
    """Returns whether several ranks have parts of a gradient, and their sum is right."""
    parts = [one.entry.gradient for one in group]
    there = [part.double() for part in parts if part is not None]
    if len(there) < 2:
        return False
    error = float((torch.stack(there).sum(0) - right).norm()) / group[0].scale
    return error <= sum(one.allowed for one in group)


def _places(
    entries: Sequence[Entry], truth: Truth, data: Data, num_ranks: int, after: Mapping[int, float]
) -> dict[Key, Place]:
    """Returns what is known of each gradient before any is explained."""
    counts, targets = _counts(data, num_ranks), data.targets
    holders: dict[Key, set[tuple[int, ...]]] = {}
    for entry in entries:
        holders.setdefault((entry.name, entry.replicas), set()).add(entry.ranks)
    return {
        entry.key: Place(
            replicas=entry.replicas,
            uses=[truth.uses[entry.name].index(name) for name in entry.uses],
            num_uses=len(truth.uses[entry.name]),
            holders=len(holders[entry.name, entry.replicas]),
            counts=counts,
            num_replicas=len(data.batches),
            stages=num_ranks // len(data.batches),
            targets=targets,
            terms=truth.terms,
            is_coupled=truth.is_coupled,
            after=after.get(entry.ranks[0], 1.0),
        )
        for entry in entries
    }


def _usual(
    chosen: Mapping[Key, Fit | None], entries: Sequence[Entry], truth: Truth
) -> dict[tuple[int, ...], Fit]:
    """Returns what has happened to parameters that are not tied, by their ranks."""
    every: dict[tuple[int, ...], list[Fit]] = {}
    for entry in entries:
        fit = chosen.get(entry.key, _RIGHT)
        if len(truth.uses[entry.name]) == 1 and fit is not None and fit.scales[0] > 0:
            every.setdefault(entry.ranks, []).append(fit)
    result = {ranks: _middle(found) for ranks, found in every.items()}
    # A rank of tied parameters alone is taken to be as the others are.
    if result:
        others = _middle(list(result.values()))
        result = {entry.ranks: result.get(entry.ranks, others) for entry in entries}
    return result


def _middle(found: Sequence[Fit]) -> Fit:
    """Returns the one whose scale is the median."""
    return sorted(found, key=lambda fit: fit.scales[0])[(len(found) - 1) // 2]


def _apart(chosen: Mapping[Key, Fit | None], entries: Sequence[Entry]) -> set[str]:
    """Returns parameters of which all ranks have the data of their own replica alone."""
    result = {entry.name for entry in entries}
    for entry in entries:
        fit = chosen.get(entry.key)
        if fit is not None and set(fit.hypothesis.replicas) != set(entry.replicas):
            result.discard(entry.name)
    return result
