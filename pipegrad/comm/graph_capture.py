"""CUDA graphs and compiled regions: verbs that communicate run outside of both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar, cast

import torch

from pipegrad.errors import StepError

P = ParamSpec("P")
T = TypeVar("T")


def outside_of_graphs(verb: Callable[P, T]) -> Callable[P, T]:
    """Makes a verb one that runs for each step, as Python, and never as a recording of it.

    A replay of a CUDA graph runs no Python: it would send nothing, and take no part in what other
    ranks do. So a verb is refused while one is captured. In code that torch.compile traces the
    graph ends before it and another begins behind it; ``fullgraph=True`` makes that torch's error.
    """
    name = getattr(verb, "__name__", "").lstrip("_")

    @wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if is_capturing():
            raise StepError(
                f"{name}() while a CUDA graph is captured: its replay would not synchronise "
                f"gradients. Capture the model's forward and backward alone "
                f"(torch.cuda.make_graphed_callables), and call pipegrad outside of the capture"
            )
        return verb(*args, **kwargs)

    @cache
    def disabled() -> Callable[P, T]:
        reason = "pipegrad communicates: it must run in every step, as Python"
        return cast(Callable[P, T], torch.compiler.disable(run, reason=reason))

    @wraps(verb)
    def outside(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" in sys.modules:  # else nobody compiles, and importing it takes seconds
            return disabled()(*args, **kwargs)
        return run(*args, **kwargs)

    return outside


def is_capturing() -> bool:
    """Whether what runs on the current stream is recorded for a CUDA graph, and not done."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
