"""What the tests of the registry share: handlers of every kind, in modules and in distributions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pipegrad.plugins.handler import GradientHandler, ParameterRecord, Reduction
from pipegrad.plugins.registry import Registry
from pipegrad.topology import Topology

HERE = __name__
GROUP = "test_registry.handlers"

ACME = """
from pipegrad.plugins.handler import GradientHandler

class Sum(GradientHandler):
    def __init__(self, *, axis="dp", scale=1.0):
        self.axis, self.scale = axis, scale
    def reductions(self, parameters, topology):
        return []

class Outer:
    class Inner(Sum):
        pass
"""

BROKEN = "raise RuntimeError('the driver is too old')"

Install = Callable[..., Path]
Handlers = Registry[GradientHandler]


class Local(GradientHandler):
    def __init__(self, *, axis: str, scale: float = 1.0) -> None:
        if scale <= 0:
            raise ValueError(f"scale must be positive, found {scale}")
        self.axis = axis
        self.scale = scale

    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        return []


class Plain(GradientHandler):
    def reductions(
        self, parameters: Sequence[ParameterRecord], topology: Topology
    ) -> Iterable[Reduction]:
        return []


class Greedy(Plain):
    def __init__(self, **options: object) -> None:
        self.options = options


class Unfinished(GradientHandler):
    pass


def acme(install: Install, **entry_points: str) -> Path:
    return install(
        "acme-handlers",
        version="2.5",
        entry_points=entry_points or {"acme-sum": "acme:Sum"},
        modules={"acme": ACME},
    )
