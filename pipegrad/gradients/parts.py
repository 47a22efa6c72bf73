"""Parts: which optimizer steps which parameters; one for matrices, say, and one for the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from pipegrad.errors import PlanError
from pipegrad.gradients.main_params import refuse_unless_elementwise
from pipegrad.plugins.handler import ParameterRecord
from pipegrad.plugins.written import written

Steps = Literal["everything", "matrices", "others"]

# What to do if Muon gets a parameter that has not two dimensions.
_ADVICE: dict[Steps, str] = {
    "everything": "let another optimizer step what is no matrix, others=torch.optim.AdamW",
    "matrices": (
        "name it in the option 'others' of the handler 'owned', beside embeddings and heads; "
        "'data-parallel' has no such option, so use 'owned' instead of it"
    ),
    "others": (
        "Muon is given as others, which step what is no matrix; give torch.optim.AdamW there, and "
        "Muon as the first optimizer"
    ),
}


@dataclass(frozen=True)
class Part:
    """An optimizer to be made, and what it steps.

    Attributes:
        kind: Takes parameter groups and `options`.
        options: For `kind`.
        records: Its parameters, of all ranks.
        steps: What they are. ``"matrices"`` and ``"others"`` are parts of one optimizer.
    """

    kind: Callable[..., torch.optim.Optimizer]
    options: Mapping[str, Any]
    records: Sequence[ParameterRecord]
    steps: Steps = "everything"

    def __str__(self) -> str:
        return f"{written(self.kind)} with {written(self.options)}"

    def made(self, groups: list[dict[str, Any]], sharded: Container[str]) -> torch.optim.Optimizer:
        """Returns the optimizer of some parameter groups.

        Args:
            groups: For `kind`.
            sharded: Keys of parameters that are stepped in shards.

        Raises:
            PlanError: As `check`, or if `kind` makes no optimizer.
        """
        self.check(self.kind, sharded)  # before the error of torch, which names no parameter
        optimizer = self.kind(groups, **self.options)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PlanError(
                f"{written(self.kind)} made {type(optimizer).__name__}, expected an Optimizer"
            )
        self.check(optimizer, sharded)
        return optimizer

    def check(self, optimizer: object, sharded: Container[str]) -> None:
        """Refuses an optimizer, or a class of one, if it cannot step these parameters.

        A function that makes one says nothing yet.

        Raises:
            PlanError: If it cannot step shards, and some are, or has vectors and takes none.
        """
        made = optimizer.func if isinstance(optimizer, partial) else optimizer
        kind = made if isinstance(made, type) else type(made)
        if not issubclass(kind, torch.optim.Optimizer):
            return
        other = next((record for record in self.records if len(record.shape) != 2), None)
        if issubclass(kind, torch.optim.Muon) and other is not None:
            raise PlanError(
                f"Muon steps matrices of two dimensions, but {other.key!r} is {other.shape}: "
                f"{_ADVICE[self.steps]}"
            )
        if not any(record.key in sharded for record in self.records):
            return
        try:
            refuse_unless_elementwise(kind)
        except PlanError as error:
            if self.steps != "others":
                raise
            raise PlanError(
                f"{error}. {kind.__name__} is given as others, which step shards here: give one "
                f"that looks at no whole parameter"
            ) from None


def parts_of(
    kind: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
    others: Callable[..., torch.optim.Optimizer] | None,
    *,
    records: Sequence[ParameterRecord],
    matrices: Collection[str],
) -> list[Part]:
    """Returns which optimizer steps which parameters.

    Args:
        kind: Steps matrices; everything, if there are no `others`.
        options: For `kind`.
        others: Steps what is no matrix.
        records: The trained parameters of all ranks.
        matrices: Keys that a handler has placed as matrices. If there are none,
            `ParameterRecord.is_matrix` says what a matrix is.

    Raises:
        PlanError: If there is no parameter, or no matrix.
    """
    if not records:
        raise PlanError("no parameter requires a gradient, so an optimizer has nothing to step")
    for made_by in (kind, others):
        if made_by is not None and not callable(made_by):
            raise PlanError(
                f"an optimizer cannot be made by an object of class {type(made_by).__name__}: give "
                f"a class of torch.optim, or a function of parameter groups, as in "
                f"partial(torch.optim.AdamW, lr=3e-4)"
            )
    if others is None:
        return [Part(kind, options, records)]
    of_kind = [r for r in records if (r.key in matrices if matrices else r.is_matrix())]
    keys = {record.key for record in of_kind}
    of_others = [record for record in records if record.key not in keys]
    if not of_kind:
        raise PlanError(
            f"others={written(others)} steps what is no matrix, and no parameter is one, of "
            f"{records[0].key!r} and {len(records) - 1} more: leave others out"
        )
    parts = [
        Part(kind, options, of_kind, steps="matrices"),
        Part(others, {}, of_others, steps="others"),
    ]
    return [part for part in parts if part.records]
