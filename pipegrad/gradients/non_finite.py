"""Non-finite gradients: which parameters have one, on which stages and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pipegrad.gradients.names import uncut_names
from pipegrad.model.dtensor import local
from pipegrad.model.manifest import Manifest


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
    for rank, own in sorted(keys.items()):
        for key in own:
            ranks_of.setdefault(key, []).append(rank)
    return tuple(
        NonFinite(names[record.key], record.holders, tuple(ranks_of[record.key]))
        for record in records
        if record.key in ranks_of
    )


def in_a_sentence(found: Sequence[NonFinite]) -> str:
    """Returns which gradients are not finite, for a message: the first one, and how many others."""
    if not found:
        return "each gradient is finite, and the sum of their squares overflows"
    if len(found) == 1:
        return f"the gradient of {found[0]} is not finite"
    others = f"{len(found) - 1} other{'s' if len(found) > 2 else ''}"
    return f"the gradients of {found[0]} and {others} are not finite"
