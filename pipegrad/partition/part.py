"""Part: a stage of a cut."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Part:
    """A stage of a cut: a module and the names of its ends.

    Attributes:
        module: Takes the values of `inputs` by position and what a step is given by name.
        inputs: Names of values that earlier stages make.
        outputs: Names of values that later stages take. Of the last stage: names of what the model
            returns.
    """

    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
