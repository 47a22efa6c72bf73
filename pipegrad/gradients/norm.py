"""The global gradient norm: each parameter counts once, and all ranks have the same bits.

Step 8 of the journey of a gradient in docs/internals.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from pipegrad.model.manifest import Manifest
from pipegrad.plan.plan import Plan
from pipegrad.plan.routes import is_counted
from pipegrad.topology import Topology


def global_norm(
    gradients: Sequence[torch.Tensor],
    norm_type: float,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Returns the norm over the `gradients` of all ranks, a scalar of `dtype`.

    Args:
        gradients: Those that count on this rank, in a fixed order.
        norm_type: The p of the p-norm; ``inf`` for the largest absolute value.
        group: Of all ranks; None if there is one rank.
        device: Of the result.
        dtype: Of the result; the same on all ranks.

    Sync: on the current stream; one scalar all-reduce over `group`.
    """
    # The norm of each gradient comes first, and then a p-norm of these norms: all ranks reduce one
    # number, however many gradients they have. The reduction gives all ranks the same bits.
    norms = [_norm(gradient, norm_type).to(dtype) for gradient in gradients]
    zero = torch.zeros((), dtype=dtype, device=device)
    if math.isinf(norm_type):
        total = torch.stack([zero, *norms]).max()
        if group is not None:
            dist.all_reduce(total, op=dist.ReduceOp.MAX, group=group)
        return total
    total = torch.stack([zero, *norms]).pow(norm_type).sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.pow(1.0 / norm_type)


def _norm(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Returns the norm of one gradient, computed at least in fp32."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.numel() == 0:  # torch refuses the maximum of no elements
        return torch.zeros((), device=gradient.device)
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)
    return norm


def clip_(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scales `gradients` in place by a factor that makes `norm` at most `max_norm`."""
    # As torch does. The factor stays on the device, so the host waits for nothing.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))


def divide_(gradients: Sequence[torch.Tensor], divisor: torch.Tensor) -> None:
    """Divides `gradients` in place by a scalar tensor, those of 16 bits in fp32.

    Sync: on the current stream. On a device the host waits for nothing.
    """
    # The divisor may be none of the numbers of 16 bits. By a Python number torch divides them in
    # fp32, but on a device the host would wait for it. There a tensor of one dimension, unlike a
    # scalar, takes part in torch's choice of the dtype.
    number = divisor.item() if divisor.is_cpu else None
    by_dtype = {
        dtype: divisor.to(torch.promote_types(dtype, torch.float32))
        for dtype in {gradient.dtype for gradient in gradients}
    }
    with torch.no_grad():
        for gradient in gradients:
            by = by_dtype[gradient.dtype]
            if number is not None:
                gradient.div_(number)
            else:
                gradient.div_(by.reshape(1) if gradient.dim() and not gradient.is_sparse else by)


class GlobalNorm:
    """The norm of the gradients of all ranks, in which each parameter counts once.

    Args:
        manifest: The agreed model.
        plan: Of this rank.
        topology: Over all ranks.
        master_dtype: dtype of main parameters, if it is not that of each parameter.
    """

    def __init__(
        self,
        manifest: Manifest,
        plan: Plan,
        topology: Topology,
        *,
        master_dtype: torch.dtype | None,
    ) -> None:
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

    def of(
        self,
        gradients: Mapping[str, torch.Tensor],
        norm_type: float,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> torch.Tensor:
        """Returns the norm, a scalar with the same bits on all ranks; see `global_norm`.

        Args:
            gradients: Of this rank, by key.
            norm_type: The p of the p-norm.
            group: Of all ranks; None if there is one rank.
            device: Of the result.
        """
        counted = [gradient for key, gradient in gradients.items() if key in self._counted]
        return global_norm(counted, norm_type, group=group, device=device, dtype=self._dtype)
