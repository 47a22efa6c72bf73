"""Manifests of stages whose parameters are names, and handlers that say what a function says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from pipegrad import GradientHandler, ParameterRecord, Reduction, Topology
from pipegrad.model.manifest import Manifest, ParameterEntry

Reductions = Callable[[Sequence[ParameterRecord], Topology], Iterable[Reduction]]


class Say(GradientHandler):
    """Says what a function says."""

    def __init__(self, function: Reductions) -> None:
        self._function = function

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        return self._function(parameters, topology)


def say(function: Reductions) -> tuple[str, GradientHandler]:
    return "mine", Say(function)


def entry(name: str) -> ParameterEntry:
    return ParameterEntry(name, (), (2,), (1,), torch.float32, torch.float32, True)


def manifest(*names: Sequence[str], wrappers: tuple[tuple[int, str], ...] = ()) -> Manifest:
    """Stages of these parameters; ``emb``, ``head`` and ``third`` are one."""
    stages = tuple(tuple(entry(name) for name in stage) for stage in names)
    tie = [(s, n) for s, stage in enumerate(names) for n in stage if n in ("emb", "head", "third")]
    return Manifest(stages, (tuple(tie),) if len(tie) > 1 else (), wrappers)
