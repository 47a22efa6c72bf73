"""Stepping: the caller's optimizer, again in one process, on the gradients that it got."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipegrad.audit.compare.causes import Cause
from pipegrad.audit.watch import Seen

_ROUNDING = 64.0  # factor of the rounding of an update


class Reference:
    """Steps whole parameters in float64, by the caller's class of optimizer and its options.

    Attributes:
        why_not: Why parameters are not compared; "" if they are.
    """

    def __init__(self) -> None:
        self.why_not = ""
        self._parameters: dict[str, nn.Parameter] = {}
        self._optimizer: Optimizer | None = None

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
            self.why_not = f"{seen[0].optimizers[0].kind.__name__} does not step here: {error}"
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
        for group, now in zip(self._optimizer.param_groups, options.values(), strict=True):
            group.update({k: v for k, v in now.items() if k not in {"fused", "foreach"}})
        with contextlib.suppress(StopIteration):
            self._optimizer.step()


def _why_not(seen: Sequence[Seen], *, is_first: bool) -> str:
    optimizers = [stepped for of_rank in seen for stepped in of_rank.optimizers]
    kinds = {stepped.kind for stepped in optimizers}
    if not optimizers:
        return "no optimizer of torch.optim has stepped"
    if len(kinds) > 1:
        return f"there are several kinds, {sorted(kind.__name__ for kind in kinds)}"
    if any(stepped.num_unknown for stepped in optimizers):
        return "they step tensors that are no parameters of the modules, such as main parameters"
    if is_first and not all(stepped.is_new for stepped in optimizers):
        return "they had stepped before the audit"
    return ""


def judged(before: Tensor, after: Tensor, right: Tensor, dtype: torch.dtype) -> Cause | None:
    """Returns what is wrong with a parameter after the step; None if it is right.

    Args:
        before: The parameter before it.
        after: After it.
        right: After it in one process, from the same gradient.
        dtype: Of the parameter.
    """
    before, after, right = before.double(), after.double(), right.double()
    eps = torch.finfo(dtype).eps
    update = right - before
    allowed = _ROUNDING * eps * update.norm() + 4 * eps * right.norm()
    if float((after - right).norm()) <= float(allowed):
        return None
    if torch.equal(after, before):
        return Cause(
            "the parameter did not change in the optimizer's step, although it has a gradient",
            "give the optimizer the parameters that the stages have now",
        )
    share = float(((after - before) * update).sum() / update.square().sum())
    return Cause(
        f"the optimizer's step is not that of one process on the same gradient: its update is "
        f"{share:.4g} of the right one",
        "look for what changes parameters, gradients or learning rates behind the optimizer",
    )
