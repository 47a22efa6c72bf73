"""CUDA graphs and compiled regions: functions that communicate run outside of both."""

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
    """Returns `verb` so that Python runs it in every step, never a recording of it.

    A replay of a CUDA graph runs no Python. It would send nothing, and other ranks would wait. So
    the verb raises StepError while a graph is captured. In code that torch.compile traces, the
    graph breaks at the verb; with ``fullgraph=True``, torch raises an error.
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
        # To import torch._dynamo takes seconds. If nobody has imported it, nobody compiles.
        if "torch._dynamo" in sys.modules:
            return disabled()(*args, **kwargs)
        return run(*args, **kwargs)

    return outside


def is_capturing() -> bool:
    """Whether a CUDA graph is captured: kernels on the current stream are recorded, not run."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
