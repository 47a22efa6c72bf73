"""A shard takes its elements of a value that was saved as a whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipegrad import ParameterRecord
from pipegrad.gradients.main_params import MainParameter
from pipegrad.gradients.named_optimizer import NamedState


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        ((3, 1), [4.0, 5.0, 6.0, 7.0, 8.0]),
        ((1, 4), [1.0, 4.0, 7.0, 10.0, 2.0]),  # the memory goes down the columns
    ],
)
@pytest.mark.parametrize("is_flat", [False, True])
def test_a_shard_takes_its_elements_of_a_whole_in_the_order_of_memory(
    strides: tuple[int, int], expected: list[float], *, is_flat: bool
) -> None:
    record = ParameterRecord("0.w", "w", 0, (4, 3), torch.float32, True, (0,), 0)
    shard = nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.SGD([shard], lr=0.1, momentum=0.9)
    NamedState(
        optimizer,
        {"w": MainParameter(record, shard, begin=4, sharded=True)},
        [["w"]],
        strides={"0.w": strides},
        joined={"w": "w"},
    )
    whole = torch.arange(12.0).view(4, 3)
    in_memory = whole.reshape(-1) if strides == (3, 1) else whole.t().reshape(-1)
    state = optimizer.state_dict()
    state["state"] = {"w": {"momentum_buffer": in_memory if is_flat else whole}}
    optimizer.load_state_dict(state)
    assert optimizer.state[shard]["momentum_buffer"].tolist() == expected
