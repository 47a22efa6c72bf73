"""A file of another stage is refused in one line; all other states load as torch loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegrad


class Model(nn.Module):
    """It is cut in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def cut(kind: str) -> tuple[nn.Module, Any]:
    if kind == "sequential":
        model: nn.Module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        return model, pipegrad.cut(model, 2)
    model = Model()
    return model, pipegrad.cut(model, 2, example={"x": torch.ones(2, 4)})


@pytest.mark.parametrize("kind", ["sequential", "structural"])
def test_a_state_of_another_stage_warns_in_one_line(kind: str) -> None:
    model, made = cut(kind)
    whole = model.state_dict()
    first, second = (made.modules[stage] for stage in range(2))
    other = second.state_dict()
    words = (
        "^the state has layers of stage 1, and this module is stage 0: load what a rank of stage 0 "
        "has saved$"
    )
    with (
        pytest.warns(UserWarning, match=words) as warned,
        pytest.raises(RuntimeError, match="Miss"),
    ):
        first.load_state_dict(other)
    assert [Path(each.filename).name for each in warned] == ["test_other_stage.py"]
    nested = nn.ModuleDict({"a": first})
    with pytest.warns(UserWarning, match=words):
        nested.load_state_dict({f"a.{n}": x for n, x in other.items()}, strict=False)
    # Its own state, that of the whole model, one with a part of it, and nothing.
    state = {name: x + 1 for name, x in first.state_dict().items()}
    first.load_state_dict(state)
    assert all(torch.equal(x, state[name]) for name, x in first.state_dict().items())
    model.load_state_dict(whole)
    first.load_state_dict(whole, strict=False)
    first.load_state_dict(other | {min(state): state[min(state)]}, strict=False)
    first.load_state_dict({}, strict=False)
    second.load_state_dict(other)
