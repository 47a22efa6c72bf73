"""Guards of a trace: what torch.export would lose without a word is refused."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pipegrad.errors import TopologyError

STRUCTURAL = "how='structural' runs the model's own code instead"


class _GradModes(TorchFunctionMode):
    """Refuses what torch.export would lose without a word; see `refuses_what_export_loses`."""

    def __init__(self) -> None:
        super().__init__()
        self._before = _autocasts()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        name, found = getattr(func, "__name__", ""), ""
        if name == "_set_grad_enabled" and args[0] != torch.is_grad_enabled():
            is_inside = _autocasts() != self._before
            found = "torch.no_grad() inside of torch.autocast" if is_inside else ""
        elif torch.is_inference_mode_enabled():
            found = "torch.inference_mode()"
        elif name in {"register_hook", "register_post_accumulate_grad_hook"}:
            found = f"Tensor.{name}"
        if found:
            raise TopologyError(
                f"the model uses {found}, and torch.export loses it: gradients would be wrong. "
                f"{STRUCTURAL}"
            )
        return func(*args, **(kwargs or {}))


def _autocasts() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


@contextlib.contextmanager
def refuses_what_export_loses() -> Iterator[None]:
    """Raises TopologyError where a trace would have other gradients than the model."""
    base: Any = torch.autograd.Function
    apply = base.__dict__["apply"]

    def checked(function: Any, /, *args: object, **kwargs: object) -> object:  # noqa: ANN401
        # Functions of torch itself have no backward of their own meaning, but for two of them.
        name, is_torch = function.__name__, function.__module__.startswith("torch.")
        if is_torch and name not in {"CheckpointFunction", "BackwardHookFunction"}:
            return apply.__func__(function, *args, **kwargs)
        is_checkpoint = is_torch and name == "CheckpointFunction"
        advice = "Make checkpoints with use_reentrant=False. " if is_checkpoint else ""
        raise TopologyError(
            f"the model uses {name}, an autograd.Function, and torch.export loses its "
            f"backward: gradients would be wrong. {advice}{STRUCTURAL}"
        )

    base.apply = classmethod(checked)
    numbers = random.getstate()
    try:
        with _GradModes():
            yield
    finally:
        base.apply = apply
    if random.getstate() != numbers:
        raise TopologyError(
            f"the model uses Python's random numbers, and a trace has those of one forward only: "
            f"use torch's, or set layerdrop to 0. {STRUCTURAL}"
        )
