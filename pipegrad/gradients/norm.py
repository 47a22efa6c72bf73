"""The global gradient norm: each parameter counts once, and all ranks have the same bits.

If it is not finite, `merge_non_finite` says which gradients are not, on which stages and ranks.

Step 8 of the journey of a gradient in docs/internals.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipegrad.comm.activity import Activity, Tape
from pipegrad.comm.collectives import all_reduce
from pipegrad.gradients.main_params import uncut_names
from pipegrad.model.dtensor import local
from pipegrad.model.manifest import Manifest
from pipegrad.plan.plan import Plan
from pipegrad.plan.routes import is_counted
from pipegrad.topology import Topology


def local_term(
    gradients: Sequence[torch.Tensor],
    norm_type: float,
    *,
    device: torch.device,
    dtype: torch.dtype,
    least: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Returns what this rank adds to a norm, a scalar: a sum of powers, or the largest value.

    Args:
        gradients: Those that count on this rank.
        norm_type: The p of the p-norm; ``inf`` for the largest absolute value.
        device: Of the result.
        dtype: Of the result.
        least: The norm of each gradient is computed at least in this dtype.
    """
    # The norm of each gradient comes first, and then a p-norm of these norms: all ranks reduce one
    # number, however many gradients they have. The reduction gives all ranks the same bits.
    norms = [torch.zeros(1, dtype=dtype, device=device)]
    for some in _by_dtype(gradients).values():
        at_least = torch.promote_types(some[0].dtype, least)
        of_each = torch._foreach_norm(some, norm_type, dtype=at_least)
        norms.append(torch.stack(of_each).to(dtype))
    stacked = torch.cat(norms)
    return stacked.max() if math.isinf(norm_type) else stacked.pow(norm_type).sum()


def _by_dtype(gradients: Sequence[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    """Returns the values of gradients by dtype, for operators over many tensors."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if values.numel():  # torch refuses the maximum of no elements
            by_dtype.setdefault(values.dtype, []).append(values)
    return by_dtype


def clip_(
    gradients: Sequence[torch.Tensor],
    norm: torch.Tensor,
    max_norm: float,
    inverse_scale: torch.Tensor | None = None,
) -> None:
    """Scales `gradients` in place by a factor that makes `norm` at most `max_norm`.

    Args:
        gradients: Of this rank.
        norm: Of all gradients, without the scale.
        max_norm: The largest norm allowed.
        inverse_scale: Gradients are multiplied by this in the same pass; None for 1.
    """
    # As torch does. The factor stays on the device, so the host waits for nothing. Unlike torch, a
    # norm that is not a number leaves gradients as they are: all would become not a number, and
    # nobody could see which of them was the first. An infinite norm makes the finite ones zero.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    factor = factor.where(factor.isfinite(), torch.ones_like(factor))
    if inverse_scale is not None:
        _each(torch.Tensor.mul_, gradients, factor * inverse_scale)
        return
    sparse = [gradient for gradient in gradients if gradient.is_sparse]
    with torch.no_grad():
        for dtype, some in _by_dtype([g for g in gradients if not g.is_sparse]).items():
            torch._foreach_mul_(some, factor.to(dtype))
        for gradient in sparse:
            gradient.mul_(factor.to(gradient.dtype))


def divide_(gradients: Sequence[torch.Tensor], divisor: torch.Tensor) -> None:
    """Divides `gradients` in place by a scalar tensor, those of 16 bits in fp32.

    Sync: on the current stream. On a device the host waits for nothing.
    """
    _each(torch.Tensor.div_, gradients, divisor)


def _each(
    operation: Callable[[torch.Tensor, Any], object],
    gradients: Sequence[torch.Tensor],
    scalar: torch.Tensor,
) -> None:
    """Runs an operation in place, of each gradient and a scalar tensor."""
    # The scalar may be none of the numbers of 16 bits. By a Python number torch computes in fp32,
    # but on a device the host would wait for it. There a tensor of one dimension, unlike a scalar,
    # takes part in torch's choice of the dtype.
    number = scalar.item() if scalar.is_cpu else None
    by_dtype = {
        dtype: scalar.to(torch.promote_types(dtype, torch.float32)).reshape(1)
        for dtype in {gradient.dtype for gradient in gradients}
    }
    with torch.no_grad():
        for gradient in gradients:
            by = by_dtype[gradient.dtype]
            if number is not None:
                operation(gradient, number)
            else:
                operation(gradient, by if gradient.dim() and not gradient.is_sparse else by[0])


class GlobalNorm:
    """The norm of the gradients of all ranks, in which each parameter counts once.

    Replicas that train alone have each a norm of its own.

    Args:
        manifest: The agreed model.
        plan: Of this rank.
        topology: Over all ranks.
        master_dtype: dtype of main parameters, if it is not that of each parameter.
        tape: Where the wait for other ranks is recorded.
    """

    def __init__(
        self,
        manifest: Manifest,
        plan: Plan,
        topology: Topology,
        *,
        master_dtype: torch.dtype | None,
        tape: Tape,
    ) -> None:
        self._tape = tape
        # A gradient may be equal on several ranks by its route, or by the layout of a DTensor. It
        # counts on the rank that is first in both.
        rank, routes = topology.rank, dict(plan.routes)
        self._counted = {
            record.key
            for record in manifest.records(topology)
            if is_counted(routes.get(record.key, ()), rank)
            and manifest.is_counted(rank, record.key)
        }
        entries = (e for r in manifest.parameters for e in manifest.entries(r.key))
        dtypes = {master_dtype, *(entry.gradient_dtype for entry in entries)}
        # All ranks must sum in the same dtype, so fp64 on one rank makes it fp64 on all.
        double = dtypes & {torch.float64, torch.complex128}
        self._dtype = torch.float64 if double else torch.float32
        ranks = sorted(topology.ranks)
        self._num_ranks, self._index = len(ranks), ranks.index(rank)
        alone = plan.independent_axes
        replica = topology.ranks_along(tuple(a for a, _ in topology.axes if a not in alone))
        self._replica = [ranks.index(r) for r in replica] if alone else None

    def of(
        self,
        gradients: Mapping[str, torch.Tensor],
        norm_type: float,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> torch.Tensor:
        """Returns the norm, a scalar with the same bits on all ranks.

        Args:
            gradients: Of this rank, by key, in a fixed order.
            norm_type: The p of the p-norm; ``inf`` for the largest absolute value.
            group: Of all ranks; None if there is one rank.
            device: Of the result.

        Sync: on the current stream; one all-reduce over `group`, of a scalar, or of one for each
        rank if replicas train alone.
        """
        dtype, least = self._dtype, torch.float32
        term = self.term(gradients, norm_type, device=device, dtype=dtype, least=least)
        if group is None:
            return term if math.isinf(norm_type) else term.pow(1.0 / norm_type)
        # A rank that has no gradient that counts takes part as well, with a zero: every rank must
        # come to each collective.
        began = self._tape.now()
        ranks = dist.get_process_group_ranks(group)
        if self._replica is not None:
            terms = torch.zeros(self._num_ranks, dtype=self._dtype, device=device)
            terms[self._index] = term
            with Activity("the norms of the replicas", ranks):
                all_reduce(terms, group)
            norm = self.total(terms, norm_type, factor=torch.ones_like(term))
        else:
            op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
            with Activity("the norm of the gradients", ranks):
                all_reduce(term, group, op)
            norm = term if math.isinf(norm_type) else term.pow(1.0 / norm_type)
        self._tape.note("wait for ranks", "the norm of the gradients", began)
        return norm

    def term(
        self,
        gradients: Mapping[str, torch.Tensor],
        norm_type: float,
        *,
        device: torch.device,
        dtype: torch.dtype,
        least: torch.dtype,
    ) -> torch.Tensor:
        """Returns what this rank adds to the norm; arguments are as in `of` and `local_term`.

        A caller that sends it with other numbers gives the terms of all ranks to `total`.
        """
        counted = [gradient for key, gradient in gradients.items() if key in self._counted]
        return local_term(counted, norm_type, device=device, dtype=dtype, least=least)

    def total(self, terms: torch.Tensor, norm_type: float, *, factor: torch.Tensor) -> torch.Tensor:
        """Returns `factor` times the norm of these terms of all ranks, ``(ranks,)``; a scalar.

        If replicas train alone, it is the norm of this rank's replica. If the norm of any replica
        is not finite, that of every replica is not, so that all skip the step or none does.
        """
        of_replica = terms if self._replica is None else terms[self._replica]
        norm = of_replica.max() if math.isinf(norm_type) else of_replica.sum().pow(1.0 / norm_type)
        # A replica that skips the step while others make it would count other steps than they do.
        norm = norm.where(terms.isfinite().all(), terms.sum())
        return (norm * factor).to(self._dtype)


@dataclass(frozen=True)
class NonFinite:
    """A parameter whose gradient has an element that is infinite or not a number.

    Attributes:
        name: Of the parameter in the uncut model. If several stages use one name for different
            parameters, it begins with the stage: ``"1.weight"``.
        stages: Which hold the parameter.
        ranks: Which have such an element in their reduced gradient, or in their shard of it.
    """

    name: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        stages = f"stage {self.stages[0]}" if len(self.stages) == 1 else f"stages {[*self.stages]}"
        ranks = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {[*self.ranks]}"
        return f"{self.name!r} ({stages}, {ranks})"


def non_finite_keys(gradients: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the keys of the gradients that have an element that is not finite.

    Args:
        gradients: Of this rank, by key.

    Sync: on the current stream. The host waits for it once.
    """
    if not gradients:
        return []
    finite = torch.stack([_is_finite(gradient) for gradient in gradients.values()]).tolist()
    return [key for key, is_finite in zip(gradients, finite, strict=True) if not is_finite]


def _is_finite(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else local(gradient)
    return torch.isfinite(values.detach()).all()


def merge_non_finite(
    manifest: Manifest, keys: Mapping[int, Sequence[str]]
) -> tuple[NonFinite, ...]:
    """Returns the parameters of all ranks, by stage and position. Pure.

    Args:
        manifest: The agreed model.
        keys: Of each rank, as `non_finite_keys` returns them.
    """
    records = sorted(manifest.parameters, key=lambda record: (record.holders[0], record.position))
    names = uncut_names(records)
    ranks_of: dict[str, list[int]] = {}
    for rank, of_rank in sorted(keys.items()):
        for key in of_rank:
            ranks_of.setdefault(key, []).append(rank)
    return tuple(
        NonFinite(names[record.key], record.holders, tuple(ranks_of[record.key]))
        for record in records
        if record.key in ranks_of
    )


def in_a_sentence(non_finite: Sequence[NonFinite]) -> str:
    """Returns which gradients are not finite, for a message: the first one, and how many others."""
    if not non_finite:
        return "each gradient is finite, and the sum of their squares overflows"
    if len(non_finite) == 1:
        return f"the gradient of {non_finite[0]} is not finite"
    others = f"{len(non_finite) - 1} other{'s' if len(non_finite) > 2 else ''}"
    return f"the gradients of {non_finite[0]} and {others} are not finite"
