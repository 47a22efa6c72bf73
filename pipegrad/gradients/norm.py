"""The global gradient norm: each parameter counts once, and all ranks have the same bits.

If it is not finite, `merge_non_finite` lists the gradients that are not, with stages and ranks.

Step 8 of the journey of a gradient in docs/internals.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pipegrad.comm.activity import Tape
from pipegrad.comm.process_groups import Groups
from pipegrad.gradients.main_params import uncut_names
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
) -> torch.Tensor:
    """Returns this rank's term of a norm, a scalar: a sum of powers, or the largest value."""
    # The norm of each gradient comes first, and then a p-norm of these norms, because ranks then
    # send one number for any count of gradients.
    norms = [torch.zeros(1, dtype=dtype, device=device)]
    # torch refuses the maximum of no elements.
    for some in _by_dtype([each for each in gradients if each.numel()]):
        at_least = torch.promote_types(some[0].dtype, torch.float32)
        of_each = torch._foreach_norm(some, norm_type, dtype=at_least)
        norms.append(torch.stack(of_each).to(dtype))
    stacked = torch.cat(norms)
    return stacked.max() if math.isinf(norm_type) else stacked.pow(norm_type).sum()


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns a list for each dtype, for operators over many tensors."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return list(by_dtype.values())


def clip_(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scales `gradients` in place by a factor that makes the norm of all at most `max_norm`."""
    # As torch does. The factor stays on the device, because the host must not wait. Unlike torch, a
    # norm that is not a number leaves gradients as they are, because all would become not a number,
    # and the first of them could not be found. An infinite norm makes the finite ones zero.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    factor = factor.where(factor.isfinite(), torch.ones_like(factor))
    for some in _by_dtype([gradient.detach() for gradient in gradients]):
        torch._foreach_mul_(some, factor.to(some[0].dtype))


def divide_(gradients: Sequence[torch.Tensor], divisor: torch.Tensor) -> None:
    """Divides flat gradients in place by a scalar tensor; 16-bit gradients are divided in fp32.

    Sync: on the current stream. On a device the host waits for nothing.
    """
    for gradient in gradients:
        # Promote the divisor, because 16 bits may not represent it. Give it one dimension, because
        # torch ignores a scalar when it chooses the dtype in which it computes.
        by = divisor.to(torch.promote_types(gradient.dtype, torch.float32))
        gradient.div_(by.reshape(1))


class GlobalNorm:
    """The norm of the gradients of all ranks, in which each parameter counts once.

    Replicas that train alone have separate norms.

    Args:
        manifest: The agreed model.
        plan: This rank's plan.
        topology: The topology of all ranks.
        master_dtype: dtype of main parameters; None for each parameter's dtype.
        tape: Records the wait for other ranks.
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
        # fp64 on one rank makes it fp64 on all, because all ranks must sum in the same dtype.
        double = dtypes & {torch.float64, torch.complex128}
        self._dtype = torch.float64 if double else torch.float32
        ranks, alone = sorted(topology.ranks), plan.independent_axes
        axes = tuple(axis for axis, _ in topology.axes if axis not in alone)
        # Indices of the ranks of this rank's replica, if replicas train alone.
        self._replica = [ranks.index(r) for r in topology.ranks_along(axes)] if alone else None

    def of(
        self,
        gradients: Mapping[str, torch.Tensor],
        norm_type: float,
        groups: Groups,
        device: torch.device,
    ) -> torch.Tensor:
        """Returns the norm, a scalar with the same bits on all ranks of a replica.

        If a gradient of any replica is not finite, the norm of no replica is.

        Args:
            gradients: This rank's gradients by key, in a fixed order.
            norm_type: The p of the p-norm; ``inf`` for the largest absolute value.
            groups: Send a number to all ranks.
            device: Device of the result.

        Sync: on the current stream; one all-reduce of a number for each rank.
        """
        counted = [gradient for key, gradient in gradients.items() if key in self._counted]
        term = local_term(counted, norm_type, device=device, dtype=self._dtype)
        began = self._tape.now()
        terms = groups.gather(term.reshape(1))[:, 0]
        self._tape.note("wait for ranks", "the norm of the gradients", began)
        of_replica = terms if self._replica is None else terms[self._replica]
        norm = of_replica.max() if math.isinf(norm_type) else of_replica.sum().pow(1.0 / norm_type)
        # Not finite on any replica, because one that skips the step while others make it would
        # count other steps.
        return norm.where(terms.isfinite().all(), terms.sum())


@dataclass(frozen=True)
class NonFinite:
    """A parameter whose gradient has an element that is infinite or not a number.

    Attributes:
        name: Name of the parameter in the uncut model. If several stages use one name for different
            parameters, it begins with the stage: ``"1.weight"``.
        stages: Stages that hold the parameter.
        ranks: Ranks that have such an element in their reduced gradient, or in their shard of it.
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

    Sync: on the current stream. The host waits for it once.
    """
    finite = [torch.isfinite(each.detach()).all() for each in gradients.values()]
    are_finite = torch.stack(finite).tolist() if finite else []
    return [key for key, is_finite in zip(gradients, are_finite, strict=True) if not is_finite]


def merge_non_finite(
    manifest: Manifest, keys: Mapping[int, Sequence[str]]
) -> tuple[NonFinite, ...]:
    """Returns the parameters of all ranks, by stage and position. Pure."""
    records = sorted(manifest.parameters, key=lambda record: (record.holders[0], record.position))
    names = uncut_names(records)
    found = {rank: frozenset(of_rank) for rank, of_rank in sorted(keys.items())}
    return tuple(
        NonFinite(names[record.key], record.holders, ranks)
        for record in records
        if (ranks := tuple(rank for rank, of_rank in found.items() if record.key in of_rank))
    )


def in_a_sentence(non_finite: Sequence[NonFinite]) -> str:
    """Returns a phrase for a message: the first non-finite gradient, and the count of others."""
    if not non_finite:
        return "each gradient is finite, and the sum of their squares overflows"
    if len(non_finite) == 1:
        return f"the gradient of {non_finite[0]} is not finite"
    others = f"{len(non_finite) - 1} other{'s' if len(non_finite) > 2 else ''}"
    return f"the gradients of {non_finite[0]} and {others} are not finite"
