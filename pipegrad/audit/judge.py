"""Judge: compares what all ranks had in a step with one process. It runs on rank 0 alone."""

from __future__ import annotations

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
from pipegrad.audit.dropout import Without
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
_UPDATE = 1e-3  # relative error of an update by the same optimizer on the same gradient
_MOST_ALLOWED = 0.25  # else a missing gradient would pass
_TINY = torch.finfo(torch.float64).tiny
_EXACT = 1e-12  # of a gradient that is float64 all the way
_NONE = 1e-3  # of a use: it has no share
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
_COUPLED = (
    "no parts of microbatches make the gradient of the batch: its samples depend on each other, as "
    "in BatchNorm or in a loss that is no mean over samples. What is right is that of the whole "
    "batch. If each microbatch is to be computed by itself, give the audit by_microbatch=True"
)


class Wrong(NamedTuple):
    """A gradient that is wrong, its error that is right, and what an error is divided by."""

    entry: Entry
    allowed: float
    scale: float


Verdict = tuple[list[Finding], list[Gradient]]
Parts = Mapping[str, Tensor]


@dataclass
class Judge:
    """Compares steps, one after the other.

    Attributes:
        model: The uncut model. It becomes float64, and gets the values of the ranks in each step.
        clip_norm: The norm to which the step clips; None to take it from torch's functions.
        tolerance: Relative, of each gradient; None to derive it.
        autocast: In which the pipeline computes, if that is another dtype than its parameters'.
        optimizer: Makes that of one process; None if updates are not compared.
        notes: What was not compared, and why.
        sizes: Norms on both sides; see `variants.Where`.
    """

    model: nn.Module
    clip_norm: float | None = None
    tolerance: float | None = None
    autocast: torch.dtype | None = None
    optimizer: Stepper | None = None
    notes: dict[str, str] = field(default_factory=dict)
    sizes: dict[Where, Size] = field(default_factory=dict)

    def __post_init__(self) -> None:
        uses = names_by_use(self.model)
        self._first = {name: first for first, names in uses.items() for name in names}
        self._before: dict[Key, Tensor] = {}
        self._without = Without(self.model.modules())
        self._is_sound = True  # steps follow upon each other

    def judge(self, seen: Sequence[Seen], data: Data, number: int) -> Verdict:
        """Returns what is wrong in a step, by its number from 1, and how far gradients are off."""
        _check_seen(seen)
        findings, first = list[Finding](), self._first
        dtypes = {first[n]: value.dtype for of_rank in seen for n, value in of_rank.before.items()}
        if number == 1:
            self.model.cpu().double()
            findings += [*states.modes(seen, self.model), *states.starts(seen, self.model, first)]
            self._describe(seen)
            if self.optimizer is not None:
                self._stepped = Stepped(self.model, self.optimizer, dtypes)
        if several := list(states.several(seen)):  # nothing else means anything
            return [replace(finding, step=number) for finding in several], []
        self._load(seen)
        with self._without.running():
            truth = computed(self.model, data, dtypes, self.autocast)
        if truth.is_coupled:
            self.notes["coupled"] = _COUPLED
        entries, norms, after = clipping.unclipped(seen, first, self.clip_norm)
        findings += [*norms, *states.losses(seen, truth), *states.trained(entries, truth)]
        changed = {(finding.names[0], finding.ranks) for finding in norms if finding.names}
        entries = [
            entry
            for entry in entries
            if entry.name in truth.gradients and not entry.is_frozen and entry.key not in changed
        ]
        wrong, gradients = self._gradients(entries, truth, dtypes, sum(data.targets))
        if number == 1:
            findings += self._dropped(
                seen, has_modes=any(f.advice == states.MODE for f in findings)
            )
            for entry, one in zip(entries, gradients, strict=True):
                own = 0.0 if entry.gradient is None else float(entry.gradient.double().norm())
                right = float(truth.gradients[entry.name].norm())
                self.sizes["gradient", 1, entry.name, entry.ranks] = Size(right, own, one.allowed)
        why = self._why(wrong, entries, truth, _places(entries, truth, data, len(seen), after))
        findings += why
        # A loss scale that is removed behind clipping is one cause, and is said there.
        if not any(finding.advice == LATE.advice for finding in why):
            findings += [
                Finding(
                    f"gradients are multiplied by {value:.4g} between clipping and the optimizer's "
                    f"step",
                    "scale gradients before they are clipped",
                    ranks=(rank,),
                )
                for rank, value in after.items()
            ]
        # Ranks that clip by other norms, or other gradients, update copies otherwise: one cause.
        explained = {name for finding in findings for name in finding.names}
        if norms or (why and any(of_rank.norm is not None for of_rank in seen)):
            explained |= set(first.values())
        findings += states.updates(seen, first, explained)
        findings += self._updates(seen, explained, number)
        findings += states.copies(states.held(seen, "after", first), _DRIFT, explained)
        findings += states.buffers(seen, truth)
        self._is_sound &= not findings
        stepped = entries_of(seen, [of_rank.gradients for of_rank in seen], first)
        self._before = {e.key: e.gradient for e in stepped if e.gradient is not None}
        return [replace(finding, step=number) for finding in findings], gradients

    def _dropped(self, seen: Sequence[Seen], *, has_modes: bool) -> list[Finding]:
        """Returns a finding if the pipeline drops with other probabilities than one process."""
        one = sorted(self._without.dropped)
        pipeline = sorted({probability for of_rank in seen for probability in of_rank.dropped})
        self.sizes["dropout", 1, "", ()] = Size(sum(one), sum(pipeline))
        if pipeline:
            self.notes["dropout"] = "dropout was 0 while numbers were compared"
        if one == pipeline or has_modes:
            return []
        listed, of_one = (
            ", ".join(f"{probability:g}" for probability in side) or "nothing"
            for side in (pipeline, one)
        )
        words = f"the pipeline drops {listed}, and one process {of_one}"
        return [Finding(words, "give both the same probabilities of dropout, and the same mode")]

    def _describe(self, seen: Sequence[Seen]) -> None:
        """Adds notes about values and optimizers that are odd, and no finding."""
        if why_not := states.why_not_updated(seen):
            self.notes["optimizer"] = f"which parameters optimizers step is not known: {why_not}"
        there = dict(self.model.named_parameters(remove_duplicate=False))
        differing = [
            name
            for of_rank in seen
            for name, value in of_rank.before.items()
            if not torch.equal(value, there[name].detach().to(value.dtype))
        ]
        if differing:
            self.notes["values"] = (
                f"stages start with other values than the uncut model, in "
                f"{shown(differing)}: those of the stages were taken for both"
            )

    def _load(self, seen: Sequence[Seen]) -> None:
        """Gives the uncut model the values of the ranks, and the buffers of the first replica."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for of_rank in reversed(seen):
                for name, value in of_rank.before.items():
                    parameters[name].copy_(value)
                for name, value in of_rank.buffers[0].items() if of_rank.replica == 0 else ():
                    buffers[name].copy_(value)

    def _gradients(
        self,
        entries: Sequence[Entry],
        truth: Truth,
        dtypes: Mapping[str, torch.dtype],
        num_targets: int,
    ) -> tuple[list[Wrong], list[Gradient]]:
        """Returns gradients that are wrong, and how far each is from the right one."""
        whole = math.hypot(*(float(gradient.norm()) for gradient in truth.gradients.values()))
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
            derived = _ROUNDING * eps * math.sqrt(num_targets) + _NOISE * noise
            if not derived <= _MOST_ALLOWED and self.tolerance is None:
                self.notes["noise"] = (
                    f"one process in the pipeline's dtype is off by as much as {noise:.2g} of a "
                    f"gradient: errors below {_MOST_ALLOWED:g} are not seen. Compare in float32"
                )
                derived = _MOST_ALLOWED
            allowed = self.tolerance or derived
            gradients.append(Gradient(entry.name, entry.ranks, error, allowed))
            if not error <= allowed:  # NaN is wrong, too
                wrong.append(Wrong(entry, allowed, scale))
        return wrong, gradients

    def _updates(self, seen: Sequence[Seen], explained: set[str], number: int) -> list[Finding]:
        """Returns updates that are wrong, if one process has an optimizer, and keeps all norms."""
        actual, allowed = states.updated(seen, self._first), dict[Key, float]()
        right = self._stepped.updates(seen, self._first) if self.optimizer is not None else None
        for name, rank, value in states.held(seen, "before", self._first):
            rounding = _NOISE * torch.finfo(value.dtype).eps * float(value.double().norm())
            key = name, (rank,)
            own = float(actual[key].norm())
            allowed[key] = _UPDATE + rounding / max(own, _TINY)
            if allowed[key] > _MOST_ALLOWED and right is not None and own:
                self.notes["updates"] = (
                    "some updates are as small as the rounding of their parameters, so that wrong "
                    "ones are not seen: raise the learning rate for the audit"
                )
            if self._is_sound:
                one = None if right is None else float(right[name].norm())
                self.sizes["update", number, name, (rank,)] = Size(one, own, allowed[key])
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
        finite = {
            one.entry.key: one
            for one in wrong
            if one.entry.gradient is None or bool(one.entry.gradient.isfinite().all())
        }
        findings = [
            Finding(*_NOT_FINITE, (one.entry.name,), one.entry.ranks)
            for one in wrong
            if one.entry.key not in finite
        ]
        parts = truth.parts(list({name for name, _ in finite})) if finite else {}
        found = dict[Key, tuple[list[Fit], float]]()
        for key, one in finite.items():
            right, before = sampled(truth.gradients[key[0]]), self._before.get(key)
            views = {AT_ONCE: right.reshape(1, 1, 1, 1, -1), **parts[key[0]]}
            stale = None if before is None else sampled(before)
            actual, allowed = _sampled(one.entry, right), _allowed(one, truth)
            found[key] = fits(actual, views, allowed, one.entry.replicas, stale)
        # What each gradient is by itself says what is usual on its ranks.
        chosen: dict[Key, Fit | None] = {entry.key: _RIGHT for entry in entries}
        for key, (fitting, _) in found.items():
            alone = [(fit, places[key], "") for fit in fitting]
            chosen[key] = explained(alone, finite[key].allowed).fit
        usual = _usual(chosen, truth)
        others = frozenset(fit.hypothesis for fit in chosen.values() if fit is not None)
        said = dict[Key, Explanation]()
        for key, one in finite.items():
            name, ranks = key
            copies = {entry: chosen[entry.key] for entry in entries if entry.name == name}
            place = replace(
                places[key],
                usual=usual[ranks].scales[0],
                others=others,
                is_apart=all(
                    fit is None or set(fit.hypothesis.replicas) == set(copy.replicas)
                    for copy, fit in copies.items()
                ),
            )
            uses = [(fit, place, "") for fit in found[key][0]]
            if place.num_uses > 1:
                stages = {use: usual[copy.ranks] for copy in copies for use in copy.uses}
                of_uses = [stages.get(use, _RIGHT) for use in truth.uses[name]]
                uses += [
                    (fit, replace(place, holders=1, usual=fit.scales[0]), use)
                    for fit, use in _fits_of_uses(one, parts[name], truth, of_uses)
                ]
            said[key] = explained(uses, one.allowed)
        summed = _not_summed(list(finite.values()), truth)
        # Numbers that nothing explains follow from other values beside them.
        odd = {ranks for name, ranks in said if not found[name, ranks][0] and name not in summed}
        for (name, ranks), why in said.items():
            causes, details = why.causes, (f"{name} by its use {why.use}",) if why.use else ()
            if not why.is_known and name in summed:
                causes = [NOT_SUMMED]
            elif not why.is_known and ranks in odd:
                causes = [NOT_KNOWN]
                details = (f"{found[name, ranks][1]:.2g} of {name} is not explained",)
            findings += [Finding(*cause, (name,), ranks, details=details) for cause in causes]
        return findings


def _fits_of_uses(
    one: Wrong, parts: Parts, truth: Truth, usual: Sequence[Fit]
) -> Iterator[tuple[Fit, str]]:
    """Yields what explains one use of a tied parameter, if the others are as their stages are."""
    actual, allowed = _sampled(one.entry, truth.gradients[one.entry.name]), _allowed(one, truth)
    shares = [
        fit.scales[0]
        * chosen_of(fit.hypothesis, parts.get(fit.hypothesis.view, parts[WHOLE]))[:, use].sum(0)
        for use, fit in enumerate(usual)
    ]
    for use, name in enumerate(truth.uses[one.entry.name]):
        rest = actual.double() - torch.stack(shares[:use] + shares[use + 1 :]).sum(0)
        own = {view: of_view[:, :, :, [use]] for view, of_view in parts.items()}
        for fit in fits(rest, own, allowed, one.entry.replicas)[0]:
            if fit.scales[0] > _NONE:  # without this use, the tie is not reduced
                yield fit, name


def _sampled(entry: Entry, right: Tensor) -> Tensor:
    return sampled(torch.zeros_like(right) if entry.gradient is None else entry.gradient)


def _allowed(one: Wrong, truth: Truth) -> float:
    """Returns the norm of the rounding of the elements of a gradient that are looked at."""
    whole = truth.gradients[one.entry.name]
    right = sampled(whole)
    size = float(_sampled(one.entry, whole).norm()) / max(float(right.norm()), _TINY)
    return one.allowed * one.scale * max(1.0, size) * math.sqrt(right.numel() / whole.numel())


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
    """Returns True if several ranks have parts of a gradient, and their sum is right."""
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


def _counts(data: Data, num_ranks: int) -> dict[str, int]:
    """Returns numbers that a gradient may be multiplied by, the likely ones first."""
    microbatches, replicas, targets = len(data.batches[0]), len(data.batches), data.targets
    both = "microbatches or of replicas" if microbatches == replicas else "microbatches"
    every = {both: microbatches, "replicas": replicas, "targets of the step": sum(targets)}
    if num_ranks > 2:  # twice as large has many causes
        every["ranks"] = num_ranks
    if len(set(targets)) == 1:
        every["targets of a replica"] = targets[0] * microbatches
        every["targets of a microbatch"] = targets[0]
    # Of equal numbers the first one counts.
    names = {number: name for name, number in reversed(every.items())}
    return {name: number for name, number in every.items() if names[number] == name}


def _usual(chosen: Mapping[Key, Fit | None], truth: Truth) -> dict[tuple[int, ...], Fit]:
    """Returns what has happened to parameters that are not tied, by their ranks."""
    every: dict[tuple[int, ...], list[Fit]] = {}
    for (name, ranks), fit in chosen.items():
        if len(truth.uses[name]) == 1 and fit is not None and fit.scales[0] > 0:
            every.setdefault(ranks, []).append(fit)
    result = {ranks: _middle(found) for ranks, found in every.items()}
    # A rank of tied parameters alone is taken to be as the others are.
    others = _middle(list(result.values()) or [_RIGHT])
    return {ranks: result.get(ranks, others) for _, ranks in chosen}


def _middle(found: Sequence[Fit]) -> Fit:
    """Returns the one whose scale is the median."""
    return sorted(found, key=lambda fit: fit.scales[0])[(len(found) - 1) // 2]
