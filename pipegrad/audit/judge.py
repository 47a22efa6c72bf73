"""Judge: compares the steps of all ranks with one process. It runs on rank 0 alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipegrad.audit import clipping, states
from pipegrad.audit.causes import (
    NOT_KNOWN,
    NOT_SUMMED,
    Cause,
    Explanation,
    Place,
    explained,
)
from pipegrad.audit.dropout import Without
from pipegrad.audit.hypotheses import AT_ONCE, Fit, Hypothesis, fits
from pipegrad.audit.report import Finding, Gradient, shown
from pipegrad.audit.seen import Seen
from pipegrad.audit.states import Entry, Key, Stepped, Stepper, entries_of
from pipegrad.audit.truth import Data, Truth, computed, names_by_use, sampled
from pipegrad.audit.variants import Size, Where
from pipegrad.errors import PlanError

_ROUNDING = 32.0  # factor of the rounding of a gradient
_NOISE = 4.0  # factor of the error of one process that computes in the pipeline's dtype
_SMALL = 1e-3  # errors of smaller gradients are divided by this share of the whole norm
_UPDATE = 1e-3  # relative error of an update by the same optimizer on the same gradient
_MOST_ALLOWED = 0.25  # because a missing gradient would pass otherwise
_TINY = torch.finfo(torch.float64).tiny
_EXACT = 1e-12  # of a gradient that is computed in float64 from start to end
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


class Compared(NamedTuple):
    """A gradient and the right one; `error` and `allowed` are divided by `scale`."""

    entry: Entry
    actual: Tensor
    right: Tensor
    error: float
    allowed: float
    scale: float


Verdict = tuple[list[Finding], list[Gradient]]


@dataclass
class Judge:
    """Compares steps, one after the other.

    Attributes:
        model: The uncut model. It becomes float64, and gets the values of the ranks in each step.
        clip_norm: The norm to which the step clips; None to take it from torch's functions.
        tolerance: Largest relative error of each gradient; None to derive it.
        autocast: The dtype in which the pipeline computes, if it is not its parameters' dtype.
        optimizer: Creates the optimizer of one process; None if updates are not compared.
        notes: Comparisons that were left out, and their reasons.
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

    def judge(self, seen: Sequence[Seen], data: Data, number: int) -> Verdict:
        """Returns the findings and the gradients' errors of a step; `number` counts from 1."""
        _check_seen(seen)
        findings, first = list[Finding](), self._first
        dtypes = {first[n]: value.dtype for of_rank in seen for n, value in of_rank.before.items()}
        if number == 1:
            self.model.cpu().double()
            findings += states.starts(seen, self.model, first)
            self._describe(seen)
            if self.optimizer is not None:
                self._stepped = Stepped(self.model, self.optimizer, dtypes)
        if several := list(states.several(seen)):  # then other comparisons mean nothing
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
        compared = self._compared(entries, truth, dtypes, sum(data.targets))
        wrong = [one for one in compared if not one.error <= one.allowed]  # NaN is wrong, too
        if number == 1:
            findings += self._dropped(seen)
            for one in compared:
                right, own = float(one.right.norm()), float(one.actual.double().norm())
                self.sizes["gradient", 1, *one.entry.key] = Size(right, own, one.allowed)
        why = self._why(wrong, entries, truth, _places(entries, truth, data, len(seen)))
        findings += why
        findings += [
            Finding(
                f"gradients are multiplied by {value:.4g} between clipping and the optimizer's "
                f"step",
                "scale gradients before they are clipped: remove a loss scale first, as "
                "GradScaler.unscale_ does",
                ranks=(rank,),
            )
            for rank, value in after.items()
        ]
        # Other norms or gradients on a rank also make its copies differ: report only one cause.
        explained = {name for finding in findings for name in finding.names}
        if norms or (why and any(of_rank.norm is not None for of_rank in seen)):
            explained |= set(first.values())
        findings += states.updates(seen, first, explained)
        findings += self._updates(seen, explained, number)
        findings += states.copies(states.held(seen, "after", first), _DRIFT, explained)
        findings += states.buffers(seen, truth)
        stepped = entries_of(seen, [of_rank.gradients for of_rank in seen], first)
        self._before = {e.key: e.gradient for e in stepped if e.gradient is not None}
        gradients = [Gradient(*one.entry.key, one.error, one.allowed) for one in compared]
        return [replace(finding, step=number) for finding in findings], gradients

    def _dropped(self, seen: Sequence[Seen]) -> list[Finding]:
        """Returns a finding if the pipeline and one process have different dropout."""
        one = sorted(self._without.dropped)
        pipeline = sorted({probability for of_rank in seen for probability in of_rank.dropped})
        self.sizes["dropout", 1, "", ()] = Size(sum(one), sum(pipeline))
        if pipeline:
            self.notes["dropout"] = "dropout was 0 while numbers were compared"
        if one == pipeline:
            return []
        listed, of_one = (
            ", ".join(f"{probability:g}" for probability in side) or "nothing"
            for side in (pipeline, one)
        )
        words = f"the pipeline drops {listed}, and one process {of_one}"
        return [Finding(words, "give both the same probabilities of dropout, and the same mode")]

    def _describe(self, seen: Sequence[Seen]) -> None:
        """Adds notes about unusual values and optimizers that are no findings."""
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

    def _compared(
        self,
        entries: Sequence[Entry],
        truth: Truth,
        dtypes: Mapping[str, torch.dtype],
        num_targets: int,
    ) -> list[Compared]:
        """Returns gradients, each with its error."""
        whole = math.hypot(*(float(gradient.norm()) for gradient in truth.gradients.values()))
        result = list[Compared]()
        for entry in entries:
            right = truth.gradients[entry.name]
            actual = torch.zeros_like(right) if entry.gradient is None else entry.gradient
            scale = max(float(right.norm()), _SMALL * whole, _TINY)
            error = float((actual.double() - right).norm()) / scale
            noise = truth.noise.get(entry.name, 0.0) * float(right.norm()) / scale
            # Many models compute in float32 internally, also if their parameters are float64.
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
            result.append(Compared(entry, actual, right, error, allowed, scale))
        return result

    def _updates(self, seen: Sequence[Seen], explained: set[str], number: int) -> list[Finding]:
        """Keeps the norms of updates; returns wrong updates if one process has an optimizer."""
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
            one = None if right is None else float(right[name].norm())
            self.sizes["update", number, name, (rank,)] = Size(one, own, allowed[key])
        if right is None:
            return []
        return list(states.other_updates(actual, right, allowed, explained))

    def _why(
        self,
        wrong: Sequence[Compared],
        entries: Sequence[Entry],
        truth: Truth,
        places: Mapping[Key, Place],
    ) -> list[Finding]:
        """Returns the causes of wrong gradients."""
        finite = {one.entry.key: one for one in wrong if bool(one.actual.isfinite().all())}
        findings = [
            Finding(*_NOT_FINITE, (one.entry.name,), one.entry.ranks)
            for one in wrong
            if one.entry.key not in finite
        ]
        with self._without.running():  # because a model may compute again in its backward
            parts = truth.parts(list({name for name, _ in finite})) if finite else {}
        found = dict[Key, tuple[list[Fit], float]]()
        for key, one in finite.items():
            right, actual, before = sampled(one.right), sampled(one.actual), self._before.get(key)
            views = {AT_ONCE: right.reshape(1, 1, 1, 1, -1), **parts[key[0]]}
            stale = None if before is None else sampled(before)
            size = max(1.0, float(actual.norm()) / max(float(right.norm()), _TINY))
            share = math.sqrt(right.numel() / one.right.numel())  # of the sampled elements
            allowed = one.allowed * one.scale * size * share
            found[key] = fits(actual, views, allowed, one.entry.replicas, stale)
        # First explain each gradient alone. This gives the usual scale of its ranks.
        chosen: dict[Key, Fit | None] = {entry.key: _RIGHT for entry in entries}
        for key, (fitting, _) in found.items():
            chosen[key] = explained(fitting, places[key], finite[key].allowed).fit
        usual = _usual(chosen, truth)
        others = frozenset(fit.hypothesis for fit in chosen.values() if fit is not None)
        said = dict[Key, Explanation]()
        for key, one in finite.items():
            name, ranks = key
            copies = {entry: chosen[entry.key] for entry in entries if entry.name == name}
            place = replace(
                places[key],
                usual=usual[ranks],
                others=others,
                is_apart=all(
                    fit is None or set(fit.hypothesis.replicas) == set(copy.replicas)
                    for copy, fit in copies.items()
                ),
            )
            said[key] = explained(found[key][0], place, one.allowed)
        summed = _not_summed(list(finite.values()))
        # If a gradient of a rank fits nothing, unexplained scales on this rank follow from it.
        odd = {ranks for name, ranks in said if not found[name, ranks][0] and name not in summed}
        for (name, ranks), why in said.items():
            causes, details = why.causes, tuple[str, ...]()
            if why.fit is not None and why.fit.hypothesis.apart is not None:
                details = (f"{name} by its use {truth.uses[name][why.fit.hypothesis.apart]}",)
            if not why.is_known and name in summed:
                causes = [NOT_SUMMED]
            elif not why.is_known and ranks in odd:
                causes = [NOT_KNOWN]
                details = (f"{found[name, ranks][1]:.2g} of {name} is not explained",)
            findings += [Finding(*cause, (name,), ranks, details=details) for cause in causes]
        return findings


def _check_seen(seen: Sequence[Seen]) -> None:
    """Checks that there are gradients to compare.

    Raises:
        PlanError: If no torch optimizer has stepped, and all gradients are None.
    """
    has_optimizer = any(of_rank.updates for of_rank in seen)
    if not has_optimizer and all(g is None for s in seen for g in s.gradients.values()):
        raise PlanError(
            "no gradient was seen: no optimizer of torch.optim has stepped, and gradients are None "
            "after the step. Call pipegrad.audit.before_clipping() in the step when gradients are "
            "reduced, or give `gradients`"
        )


def _not_summed(wrong: Sequence[Compared]) -> set[str]:
    """Returns parameters of which ranks hold parts of one gradient, if the parts' sum is right."""
    held: dict[str, dict[tuple[int, ...], list[Compared]]] = {}
    for one in wrong:
        held.setdefault(one.entry.name, {}).setdefault(one.entry.replicas, []).append(one)
    return {name for name, of_replicas in held.items() if all(map(_sum_is, of_replicas.values()))}


def _sum_is(group: Sequence[Compared]) -> bool:
    """Returns True if several ranks hold parts of a gradient, and their sum is right."""
    there = [one.actual.double() for one in group if one.entry.gradient is not None]
    if len(there) < 2:
        return False
    error = float((torch.stack(there).sum(0) - group[0].right).norm()) / group[0].scale
    return error <= sum(one.allowed for one in group)


def _places(entries: Sequence[Entry], truth: Truth, data: Data, num_ranks: int) -> dict[Key, Place]:
    """Returns the known facts about each gradient, before any is explained."""
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
        )
        for entry in entries
    }


def _counts(data: Data, num_ranks: int) -> dict[str, int]:
    """Returns numbers that a gradient may be multiplied by, the likely ones first."""
    microbatches, replicas, targets = len(data.batches[0]), len(data.batches), data.targets
    both = "microbatches or of replicas" if microbatches == replicas else "microbatches"
    every = {both: microbatches, "replicas": replicas, "targets of the step": sum(targets)}
    if num_ranks > 2:  # because a factor of 2 has many causes
        every["ranks"] = num_ranks
    if len(set(targets)) == 1:
        every["targets of a replica"] = targets[0] * microbatches
        every["targets of a microbatch"] = targets[0]
    # If counts are equal, the first one is used.
    names = {number: name for name, number in reversed(every.items())}
    return {name: number for name, number in every.items() if names[number] == name}


def _usual(chosen: Mapping[Key, Fit | None], truth: Truth) -> dict[tuple[int, ...], float]:
    """Returns the factor by which parameters that are not tied are too large, by their ranks."""
    every: dict[tuple[int, ...], list[float]] = {}
    for (name, ranks), fit in chosen.items():
        if len(truth.uses[name]) == 1 and fit is not None and fit.scales[0] > 0:
            every.setdefault(ranks, []).append(fit.scales[0])
    result = {ranks: median_low(scales) for ranks, scales in every.items()}
    # A rank with tied parameters alone gets the median of the other ranks.
    others = median_low(list(result.values()) or [1.0])
    return {ranks: result.get(ranks, others) for _, ranks in chosen}
