"""Matching: which parameter of the uncut model is this one of a stage?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipegrad.errors import PlanError

Named = list[tuple[str, Tensor]]


def match(module: nn.Module, model: nn.Module, what: str) -> dict[str, str]:
    """Returns the names of a stage's parameters -> their names in the uncut model.

    Names that are equal and of equal shape are taken. Otherwise the stage is looked for as a run of
    the uncut model's parameters, by shapes and by values, as a slice of its layers is one.

    Args:
        module: Of a stage.
        model: The uncut model, with the values that the stage has.
        what: The stage, for messages.

    Raises:
        PlanError: If no run has these shapes and values, or several have.
    """
    own: Named = list(module.named_parameters(remove_duplicate=False))
    whole: Named = list(model.named_parameters(remove_duplicate=False))
    shapes = {name: parameter.shape for name, parameter in whole}
    if all(shapes.get(name) == parameter.shape for name, parameter in own):
        return {name: name for name, _ in own}
    runs = [whole[first : first + len(own)] for first in range(len(whole) - len(own) + 1)]
    fitting = [run for run in runs if _fits(own, run)]
    if len(fitting) != 1:
        raise PlanError(
            f"{what}: {len(fitting) or 'no'} runs of the uncut model's parameters have the shapes "
            f"and values of {[name for name, _ in own[:3]]} and so on: give `names`, from those of "
            f"the stage to those of the uncut model, and make both models alike"
        )
    return {name: there for (name, _), (there, _) in zip(own, fitting[0], strict=True)}


def _fits(own: Sequence[tuple[str, Tensor]], run: Sequence[tuple[str, Tensor]]) -> bool:
    pairs = zip(own, run, strict=True)
    return all(a.shape == b.shape and torch.equal(a.cpu(), b.cpu()) for (_, a), (_, b) in pairs)
