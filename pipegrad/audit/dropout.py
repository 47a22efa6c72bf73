"""Dropout: numbers are compared without it, because no two runs draw the same masks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.nn import functional

_FUNCTIONS = (
    *((functional, name, "p", 1) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d")),
    *((functional, name, "p", 1) for name in ("alpha_dropout", "feature_alpha_dropout")),
    (functional, "scaled_dot_product_attention", "dropout_p", 4),
    (torch, "dropout", "p", 1),
)
_ATEN = torch.ops.aten
_OPERATORS: Mapping[object, tuple[str, int]] = {  # name and position of their probability
    _ATEN.dropout.default: ("p", 1),
    _ATEN.dropout_.default: ("p", 1),
    _ATEN.feature_dropout.default: ("p", 1),
    _ATEN.alpha_dropout.default: ("p", 1),
    _ATEN.scaled_dot_product_attention.default: ("dropout_p", 4),
}


class Without:
    """Sets the probability of dropout to 0 in all calls of torch's functions.

    Args:
        modules: Modules whose dropout is no function that can be replaced, as in nn.LSTM and in
            traced graphs; it is set to 0, too.

    Attributes:
        dropped: Probabilities of the dropout that was switched off.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self.dropped = set[float]()
        self._modules = list(modules)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Sets it to 0 inside the context."""
        with contextlib.ExitStack() as stack:
            for home, name, argument, position in _FUNCTIONS:
                patched = self._without(getattr(home, name), argument, position)
                stack.enter_context(mock.patch.object(home, name, patched))
            for module in self._modules:
                if isinstance(module, GraphModule):  # last, when its nodes are restored
                    stack.callback(module.recompile)
                graph = getattr(module, "graph", None)
                for node in graph.nodes if isinstance(graph, Graph) else ():
                    operator: Any = node.target
                    if operator in _OPERATORS:
                        stack.callback(setattr, node, "target", operator)
                        node.target = self._without(operator, *_OPERATORS[operator])
                if isinstance(module, GraphModule):
                    module.recompile()
                if isinstance(module, nn.RNNBase):
                    if module.training and module.dropout > 0:
                        self.dropped.add(module.dropout)
                    stack.enter_context(mock.patch.object(module, "dropout", 0.0))
            yield

    def _without(
        self, function: Callable[..., Any], argument: str, position: int
    ) -> Callable[..., Any]:
        takes_training = argument == "p"
        is_on = "alpha" not in function.__name__  # the default, if the caller gives none

        def called(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - torch's signature
            probability = args[position] if len(args) > position else options.get(argument)
            if probability == 0 or (probability is None and not takes_training):
                return function(*args, **options)
            named = options.get("training", options.get("train", is_on))
            if args[2] if len(args) > 2 and takes_training else named:
                self.dropped.add(0.5 if probability is None else float(probability))
            if len(args) > position:
                return function(*args[:position], 0.0, *args[position + 1 :], **options)
            return function(*args, **{**options, argument: 0.0})

        return called
