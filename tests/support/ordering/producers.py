"""Gradients written on several streams, as autograd does on a device: here on virtual ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipegrad.comm import sync_points
from pipegrad.testing import OrderChecker

CPU = torch.device("cpu")


class Producers:
    """Parameter k accumulates its gradient, and runs its hooks, on stream k modulo ``number``.

    What autograd orders on a device is ordered here: a producer waits for the stream on which its
    gradient was computed, and the stream that called backward waits for all producers at its end.
    Nothing else is. With one producer that is the stream that called backward.
    """

    def __init__(
        self, checker: OrderChecker, parameters: Sequence[nn.Parameter], number: int = 1
    ) -> None:
        self.number = number
        self._checker = checker
        self._parameters = [p for p in parameters if p.requires_grad]
        # Kept: autograd holds them only weakly.
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self._parameters]
        for k, node in enumerate(self._nodes):
            node.register_prehook(self._switch(k))
        self._leaves: list[Any] = []
        self._caller = checker.on_now
        self._calls = 0

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a call of backward."""
        # Behind all hooks of the parameter: that of pipegrad belongs to the producer's stream.
        backs = [node.register_hook(self._back) for node in self._nodes]
        self._caller = self._checker.on_now
        try:
            yield
        finally:
            for hook in backs:
                hook.remove()
            for event in self._leaves:
                sync_points.in_use.wait(event, CPU)
            self._leaves.clear()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function`, which calls backward."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.backward():
                return function(*args, **kwargs)

        return wrapped

    def elsewhere(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function`, each call on the next producer, between two of its caller's."""

        def moved(*args: Any, **kwargs: Any) -> Any:
            if self.number == 1:
                return function(*args, **kwargs)
            self._calls += 1
            before = sync_points.in_use.record(CPU)
            with self._checker.on(f"producer {self._calls % self.number}"):
                sync_points.in_use.wait(before, CPU)
                result = function(*args, **kwargs)
                after = sync_points.in_use.record(CPU)
            sync_points.in_use.wait(after, CPU)
            return result

        return moved

    def _switch(self, k: int) -> Callable[[Any], None]:
        def switch(_: Any) -> None:
            if self.number > 1:
                event = sync_points.in_use.record(CPU)
                self._checker.switch(f"producer {k % self.number}")
                sync_points.in_use.wait(event, CPU)

        return switch

    def _back(self, *_: object) -> None:
        self._leaves.append(sync_points.in_use.record(CPU))
        self._checker.switch(self._caller)
