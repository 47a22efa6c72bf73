"""Options as text, which ranks compare: by value, whatever they are. Issue 16, point 10 (1.13)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from pipegrad.plugins.written import written


@pytest.mark.parametrize("first", [{"b", "a"}, {"x": {1, 2}, "y": (1.0, None)}, [torch.ones(5000)]])
def test_equal_options_are_written_alike(first: Any) -> None:
    """Sets and tensors of the same values were refused, or agreed."""
    again = copy.deepcopy(first)
    if isinstance(again, dict):
        again = dict(reversed(again.items()))
    assert written(first) == written(again)
    assert written([first]) != written([[*first, 0]])


def test_options_are_written_by_value() -> None:
    """No address, and all elements of a tensor."""

    class Plain:
        def __init__(self, value: object) -> None:
            self.value = value

    one, other = torch.zeros(5000), torch.zeros(5000)
    other[2500] = 1
    assert written(one) != written(other)
    assert written(Plain(1)) == written(Plain(1)) != written(Plain(2))
    assert "0x" not in written([Plain(lambda: 1), object(), print])
    assert written(1) != written(1.0) != written("1.0")
    assert written(lambda: 1) != written(lambda: 2)
    loop: list[object] = []
    loop.append(loop)
    assert written(loop) == "[...]"
