"""Stepping: the caller's optimizer, again in one process, on the gradients that it got."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipegrad.audit.report import Finding
from pipegrad.audit.seen import Seen

_ROUNDING = 64.0  # factor of the rounding of an update
_SAME = 0.01  # of shares that are one
_SEEN = 0.5  # of an update: rounding below this share leaves it to be seen


class Reference:
    """Steps whole parameters in float64, by the caller's class of optimizer and its options.

    Attributes:
        why_not: Why parameters are not compared; "" if they are.
        notes: What is odd, and no finding.
    """

    def __init__(self) -> None:
        self.why_not = ""
        self.notes: dict[str, str] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._optimizer: Optimizer | None = None
        self._names: list[str] = []

    def judge(
        self, seen: Sequence[Seen], first: Mapping[str, str], explained: set[str]
    ) -> list[Finding]:
        """Returns parameters that are wrong after a step.

        Args:
            seen: By all ranks.
            first: Name of a parameter -> the first of its names.
            explained: First names that are wrong for a cause that is known. More are added.
        """
        rates = sorted({one.rate for of_rank in seen for one in of_rank.optimizers})
        if len(rates) > 1:
            self.notes["rates"] = f"optimizers have different learning rates: {rates}"
        right = self.step(seen, first)
        still = list(_still(seen, explained))
        if not right:
            return still
        left_out = list(_left_out(seen, first, explained))
        explained.update(name for finding in left_out for name in finding.names)
        wrong = dict[str, list[tuple[int, float]]]()  # ranks, and shares of the right update
        for name in right.keys() - explained:
            held = [
                (of_rank.rank, _share(of_rank.before[use], of_rank.after[use], right[name]))
                for of_rank in seen
                for use in of_rank.after
                if first[use] == name
            ]
            # If only some copies are wrong, then copies differ, and that is said elsewhere.
            if all(share is not None for _, share in held):
                wrong[name] = [(rank, share) for rank, share in held if share is not None]
        explained.update(wrong)
        shares = [share for of_name in wrong.values() for _, share in of_name]
        is_one = bool(shares) and max(shares) - min(shares) <= _SAME
        size = f": its update is {shares[0]:.4g} of the right one" if is_one else ""
        return left_out + [
            Finding(
                f"the optimizer's step is not that of one process on the same gradient{size}",
                "look for what changes parameters, gradients or learning rates behind the "
                "optimizer",
                (name,),
                tuple(rank for rank, _ in wrong[name]),
            )
            for name in right
            if name in wrong
        ]

    def step(self, seen: Sequence[Seen], first: Mapping[str, str]) -> dict[str, Tensor]:
        """Returns parameters after a step, by first name; empty if they are not compared.

        Args:
            seen: By all ranks.
            first: Name of a parameter -> the first of its names.
        """
        if not self.why_not:
            self.why_not = _why_not(seen, is_first=self._optimizer is None)
        if self.why_not:
            return {}
        options = dict[str, Mapping[str, object]]()
        for of_rank in seen:
            for stepped in of_rank.optimizers:
                for name, group in stepped.options.items():
                    options.setdefault(first[name], group)
        for of_rank in reversed(seen):
            for name, gradient in of_rank.gradients.items():
                if first[name] not in options:
                    continue
                value = of_rank.before[name].double()
                parameter = self._parameters.setdefault(first[name], nn.Parameter(value))
                parameter.data = value
                parameter.grad = None if gradient is None else gradient.double()
        try:
            self._step(seen, options)
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            kind = next(stepped.kind for of_rank in seen for stepped in of_rank.optimizers)
            self.why_not = f"{kind.__name__} does not step here: {error}"
            return {}
        return {name: p.detach().clone() for name, p in self._parameters.items()}

    def _step(self, seen: Sequence[Seen], options: Mapping[str, Mapping[str, object]]) -> None:
        if self._optimizer is None:
            kind = next(stepped.kind for of_rank in seen for stepped in of_rank.optimizers)
            groups = [
                {"params": [self._parameters[name]], **group, "fused": None, "foreach": None}
                for name, group in options.items()
            ]
            self._optimizer = kind(groups, lr=0.0)  # type: ignore[call-arg]
            self._names = list(options)
        for group, name in zip(self._optimizer.param_groups, self._names, strict=True):
            now = options.get(name, {})
            group.update({k: v for k, v in now.items() if k not in {"fused", "foreach"}})
            if name not in options:  # it is not stepped this time
                self._parameters[name].grad = None
        self._optimizer.step()


def _why_not(seen: Sequence[Seen], *, is_first: bool) -> str:
    optimizers = [stepped for of_rank in seen for stepped in of_rank.optimizers]
    kinds = {stepped.kind for stepped in optimizers}
    if not optimizers:
        return "no optimizer of torch.optim has stepped"
    if len(kinds) > 1:
        return f"there are several kinds, {sorted(kind.__name__ for kind in kinds)}"
    if Optimizer in kinds:
        return "their class is not at the top level of a module"
    if any(stepped.num_unknown for stepped in optimizers):
        return "they step tensors that are no parameters of the modules, such as main parameters"
    if is_first and not all(stepped.is_new for stepped in optimizers):
        return "they had stepped before the audit"
    return ""


def several(seen: Seen) -> Iterator[Finding]:
    """Yields what a rank did several times in one step."""
    for stepped in seen.optimizers:
        if stepped.times > 1:
            yield Finding(
                f"the optimizer stepped {stepped.times} times in one step",
                "step it once, after the last microbatch",
                ranks=(seen.rank,),
            )
    if seen.num_clips > 1:
        yield Finding(
            f"gradients are clipped {seen.num_clips} times in one step",
            "clip them once, after the last microbatch and all reductions",
            ranks=(seen.rank,),
        )


def _still(seen: Sequence[Seen], explained: set[str]) -> Iterator[Finding]:
    """Yields ranks on which no parameter has changed, although an optimizer has stepped."""
    for of_rank in seen:
        moves = any(stepped.rate > 0 for stepped in of_rank.optimizers)
        trained = [
            name
            for name, gradient in of_rank.gradients.items()
            if gradient is not None and bool(gradient.any()) and name not in explained
        ]
        if (
            moves
            and trained
            and all(torch.equal(of_rank.before[name], of_rank.after[name]) for name in trained)
        ):
            yield Finding(
                "no parameter of the rank changed in the optimizer's step",
                "give the optimizer the parameters that the stages have now",
                ranks=(of_rank.rank,),
            )


def _left_out(
    seen: Sequence[Seen], first: Mapping[str, str], explained: set[str]
) -> Iterator[Finding]:
    """Yields parameters with a gradient that no optimizer of their rank steps."""
    for of_rank in seen:
        stepped = {name for one in of_rank.optimizers for name in one.options}
        for name, gradient in of_rank.gradients.items():
            is_stepped = any(use in stepped for use in of_rank.uses[name])
            if gradient is not None and not is_stepped and first[name] not in explained:
                yield Finding(
                    "no optimizer steps the parameter, although it has a gradient",
                    "give the optimizer all parameters that the stages have now",
                    (first[name],),
                    of_rank.groups[name],
                )


def _share(before: Tensor, after: Tensor, right: Tensor) -> float | None:
    """Returns which share of the right update a parameter has got; None if all of it.

    In half precision many updates are smaller than the rounding of the parameter. Then their sum
    along the right update is looked at.
    """
    eps = torch.finfo(after.dtype).eps
    before, after = before.double(), after.double()
    update = right - before
    rounding = 2 * eps * torch.maximum(before.abs(), right.abs())
    allowed = float((_ROUNDING * eps * update.abs() + rounding).norm())
    if float((after - right).norm()) <= allowed <= _SEEN * float(update.norm()):
        return None
    squares = float(update.square().sum())
    if not squares:
        return None if float((after - right).norm()) <= allowed else math.inf
    share = float(((after - before) * update).sum()) / squares
    # The rounding of elements is by chance, so its sum along the update is small.
    noise = 4 * float((rounding * update).norm()) / squares
    is_hidden = allowed > _SEEN * float(update.norm())
    return None if is_hidden and abs(share - 1) <= noise + _SAME else share
