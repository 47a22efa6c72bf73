"""Truth: what one process computes on the uncut model, whole and in parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Any, Any]  # inputs and target
LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Truth:
    """One step of one process.

    Attributes:
        loss: Of the whole batch.
        gradients: Name -> gradient. A tied parameter has the first of its names.
        parts: Name -> its gradient by replica, microbatch and use,
            ``(replicas, microbatches, uses, *shape)``.
        uses: Name -> all names of a tied parameter, in the order of its parts.
        weights: Weight of each replica and microbatch in the whole, ``(replicas, microbatches)``.
    """

    loss: float
    gradients: dict[str, Tensor]
    parts: dict[str, Tensor]
    uses: dict[str, tuple[str, ...]]
    weights: Tensor


def compute(model: nn.Module, loss_fn: LossFn, batches: Sequence[Sequence[Batch]]) -> Truth:
    """Returns what one process computes.

    Args:
        model: The uncut model.
        loss_fn: ``loss_fn(output, target)``, a mean or a sum.
        batches: Of each replica, its microbatches.
    """
    uses = names_by_use(model)
    loose = untied(model, uses)
    whole = [joined([joined(of_replica) for of_replica in batches])]
    loss, (gradients,) = _gradients(loose, loss_fn, whole)
    found = [_gradients(loose, loss_fn, of_replica)[1] for of_replica in batches]
    parts, totals = {}, {}
    for name, names in uses.items():
        totals[name] = torch.stack([gradients[other] for other in names]).sum(0)
        parts[name] = torch.stack(
            [
                torch.stack([torch.stack([one[other] for other in names]) for one in of_replica])
                for of_replica in found
            ]
        )
    return Truth(loss, totals, parts, uses, _weights(totals, parts))


def names_by_use(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns the first name of each parameter -> all its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: (first, *others) for first, *others in names.values()}


def untied(model: nn.Module, uses: dict[str, tuple[str, ...]]) -> nn.Module:
    """Returns a copy of a model in which each name has a parameter of its own."""
    loose = copy.deepcopy(model)
    for first, *others in uses.values():
        for name in others:
            home, _, own = name.rpartition(".")
            parameter = loose.get_parameter(first)
            again = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            setattr(loose.get_submodule(home), own, again)
    return loose


def joined(batches: Sequence[Batch]) -> Batch:
    """Returns batches as one, along their first dimension."""
    inputs, targets = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def _gradients(
    model: nn.Module, loss_fn: LossFn, batches: Sequence[Batch]
) -> tuple[float, list[dict[str, Tensor]]]:
    """Returns the last loss, and for each batch the gradients by name."""
    found, loss = list[dict[str, Tensor]](), torch.tensor(0.0)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for inputs, target in batches:
        loss = loss_fn(model(inputs), target)
        values = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
        found.append(dict(zip(trained, values, strict=True)))
    return float(loss.detach()), found


def _weights(totals: dict[str, Tensor], parts: dict[str, Tensor]) -> Tensor:
    """Returns the weights that make parts the whole, the same for all parameters."""
    some = next(iter(parts.values()))
    columns = torch.cat([p.sum(2).double().reshape(*some.shape[:2], -1) for p in parts.values()], 2)
    whole = torch.cat([totals[name].double().reshape(-1) for name in parts])
    solved = torch.linalg.lstsq(columns.flatten(0, 1).T, whole[:, None], driver="gelsd").solution
    return solved.reshape(some.shape[:2])
