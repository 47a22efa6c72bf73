"""Dropout: no two runs draw the same masks, so numbers are compared without it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_FUNCTIONS = (
    (functional, "dropout", "p"),
    (functional, "dropout1d", "p"),
    (functional, "dropout2d", "p"),
    (functional, "dropout3d", "p"),
    (functional, "alpha_dropout", "p"),
    (functional, "feature_alpha_dropout", "p"),
    (functional, "scaled_dot_product_attention", "dropout_p"),
    (torch, "dropout", "p"),
)


class Without:
    """Sets the probability of dropout to 0, wherever torch's functions are called.

    Attributes:
        was_active: Whether anything was dropped.
    """

    def __init__(self) -> None:
        self.was_active = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Sets it inside."""
        with contextlib.ExitStack() as stack:
            for home, name, argument in _FUNCTIONS:
                patched = self._without(getattr(home, name), argument)
                stack.enter_context(mock.patch.object(home, name, patched))
            yield

    def _without(self, function: Callable[..., Any], argument: str) -> Callable[..., Any]:
        position = _POSITIONS[argument]
        takes_training = argument == "p"

        @functools.wraps(function)
        def called(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - torch's signature
            given = args[position] if len(args) > position else options.get(argument)
            if given is None and takes_training:
                given = 0.5
            if not given:
                return function(*args, **options)
            trains = options.get("training", args[2] if len(args) > 2 and takes_training else True)
            self.was_active |= bool(trains)
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                options[argument] = 0.0
            return function(*args, **options)

        return called


_POSITIONS: Mapping[str, int] = {"p": 1, "dropout_p": 4}


def modes(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Returns in words how modules whose mode matters compute: those of dropout and BatchNorm."""
    found = {}
    for name, module in modules.items():
        mode = "in training" if module.training else "in evaluation"
        if isinstance(module, _DROPOUTS):
            is_off = not module.training or module.p == 0
            found[name] = "drops nothing" if is_off else f"drops {module.p:g}"
        elif isinstance(module, _NORMS):
            found[name] = mode
    return found
