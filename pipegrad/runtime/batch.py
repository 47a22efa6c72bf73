"""Batches: what a step is given on this rank, cut into microbatches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeGuard

import torch

from pipegrad.errors import StepError
from pipegrad.runtime.stage import Wiring


class Batches:
    """Cuts the batches of one kind of step, which all look like the first one.

    Args:
        wiring: What stages take from outside.
        stages: Those of this rank.
        num_microbatches: Into how many a batch is cut, along the first dimension.
        needs_target: Whether this rank computes a loss.
        takes_target: Whether it may.
        has_loss: Whether it could.

    Attributes:
        rows: Rows of the tensors of the first batch, by name.
    """

    def __init__(
        self,
        wiring: Wiring,
        stages: Collection[int],
        num_microbatches: int,
        *,
        needs_target: bool,
        takes_target: bool,
        has_loss: bool,
    ) -> None:
        self._external = wiring.external
        self._needed = sorted({s for i in stages for s in wiring.taken[i] if isinstance(s, str)})
        self._made = list(dict.fromkeys(link.name for link in wiring.links))
        self._num_microbatches = num_microbatches
        self._needs_target = needs_target
        self._takes_target = takes_target
        self._has_loss = has_loss
        self.rows: dict[str, int] = {}

    def cut(
        self, inputs: Sequence[object], named: Mapping[str, object], target: object
    ) -> tuple[dict[str, Sequence[object]], Sequence[object] | None]:
        """Returns the microbatches of each external input that this rank needs, and of the target.

        Raises:
            StepError: If inputs are missing, given twice, unknown, or not cut alike.
        """
        values = self._values(inputs, named)
        if self._needs_target or (self._takes_target and target is not None):
            if target is None or not self._has_loss:
                raise StepError("the last stage's rank needs target= and a Scheduler with loss_fn=")
            values["target"] = target
        self._check_rows(values)
        cut = {name: self._microbatches(value) for name, value in values.items()}
        return cut, cut.pop("target", None)

    def _values(self, inputs: Sequence[object], named: Mapping[str, object]) -> dict[str, object]:
        external = list(self._external)
        if len(inputs) > len(external):
            raise StepError(f"{len(inputs)} inputs, expected at most {external}")
        given = dict(zip(external, inputs, strict=False))
        unknown = [name for name in named if name not in external]
        if unknown:
            raise StepError(f"no stage takes {unknown}; from outside they take {external}")
        twice = [name for name in named if name in given]
        if twice:
            raise StepError(f"inputs {twice} are given twice, by position and by name")
        given |= named
        missing = [name for name in self._needed if name not in given]
        if missing:
            raise StepError(
                f"inputs {missing} are missing, which stages of this rank take; what stages make "
                f"for later ones is {self._made}"
            )
        return {name: given[name] for name in self._needed}

    def _check_rows(self, values: Mapping[str, object]) -> None:
        """Refuses tensors that are not cut alike, or not as in the first step."""
        rows = {name: len(x) for name, x in values.items() if _is_cut(x)}
        number = self._num_microbatches
        if len(set(rows.values())) > 1 or any(n == 0 or n % number for n in rows.values()):
            raise StepError(
                f"tensors of {rows} rows cannot be cut into {number} microbatches that belong "
                f"together: give all the same number of rows, a multiple of {number}"
            )
        if any(self.rows.get(name, n) != n for name, n in rows.items()):
            raise StepError(
                f"tensors of {rows} rows, and of {self.rows} in the first step of this kind: all "
                f"microbatches must look alike: pad them, or make another Scheduler"
            )
        self.rows = rows | self.rows

    def _microbatches(self, value: object) -> Sequence[object]:
        number = self._num_microbatches
        return value.tensor_split(number) if _is_cut(value) else [value] * number


def _is_cut(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is cut; anything else every microbatch gets whole."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def joined(outputs: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Returns outputs of all microbatches, each in one tensor."""
    return tuple(
        torch.cat(parts) if parts[0].dim() else torch.stack(parts)
        for parts in zip(*outputs, strict=True)
    )
