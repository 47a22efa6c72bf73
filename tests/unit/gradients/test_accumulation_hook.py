"""The hook of the gradient layer: when it is called, and what stays on the parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipegrad.gradients.accumulation_hook import AccumulationHook


class Layer:
    """Notes when it is called; it may pause the hook as soon as it is."""

    def __init__(self, *, pauses: bool = False) -> None:
        self.parameter = nn.Parameter(torch.ones(2))
        self.calls = list[str]()
        self.pauses = pauses
        self.hook = AccumulationHook(self.accumulated)
        self.hook.follow(self.parameter)

    def accumulated(self, parameter: nn.Parameter) -> None:
        assert parameter is self.parameter
        self.calls.append("layer")
        if self.pauses:
            self.hook.pause()

    def add_hook(self, name: str) -> None:
        self.parameter.register_post_accumulate_grad_hook(lambda _: self.calls.append(name))

    def backward(self) -> list[str]:
        self.calls.clear()
        self.parameter.sum().backward()
        return [*self.calls]


def test_a_paused_hook_is_not_called_until_it_resumes() -> None:
    layer = Layer(pauses=True)
    layer.add_hook("user")
    assert [layer.backward() for _ in range(3)] == [["layer", "user"], ["user"], ["user"]]
    layer.hook.resume()
    assert layer.backward() == ["user", "layer"]
    # A hook of a user that comes during the pause runs before ours.
    layer = Layer()
    layer.hook.pause()
    layer.add_hook("user")
    assert layer.backward() == ["user"]
    layer.hook.follow(layer.parameter)  # the next step
    assert layer.backward() == ["user", "layer"]


def test_a_hook_may_pause_while_others_go_through_the_hooks() -> None:
    """FSDP2 does so: it calls the hooks of a shard itself. A removed hook would be an error."""
    layer = Layer(pauses=True)
    layer.add_hook("user")
    hooks = layer.parameter._post_accumulate_grad_hooks
    assert hooks is not None
    for hook in hooks.values():
        hook(layer.parameter)
    assert layer.calls == ["layer", "user"]


@pytest.mark.parametrize("is_paused", [False, True])
def test_nothing_is_left_of_a_removed_hook(*, is_paused: bool) -> None:
    layer = Layer()
    if is_paused:
        layer.hook.pause()
    layer.hook.remove()
    for verb in (layer.hook.pause, layer.hook.resume):
        verb()
        assert not layer.parameter._post_accumulate_grad_hooks
    assert layer.backward() == []
