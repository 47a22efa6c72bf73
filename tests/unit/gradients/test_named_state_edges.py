"""Master copies are in the state of an optimizer, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from pipegrad import ParameterRecord
from pipegrad.gradients.main_params import MainParameter
from pipegrad.gradients.named_optimizer import NamedState


@pytest.mark.parametrize("copied", [True, False])
def test_only_a_master_copy_is_saved_as_one(*, copied: bool) -> None:
    record = ParameterRecord("0.w", "w", 0, (2, 3), torch.bfloat16, True, (0,), 0)
    dtype = torch.float32 if copied else torch.bfloat16
    parameter = torch.nn.Parameter(torch.ones(2, 3, dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    main = {"w": MainParameter(record, parameter)}
    NamedState(optimizer, main, [["w"]], strides={"0.w": (3, 1)}, joined={"w": "w"})
    state = optimizer.state_dict()["state"]
    assert {name: list(own) for name, own in state.items()} == ({"w": ["master"]} if copied else {})
