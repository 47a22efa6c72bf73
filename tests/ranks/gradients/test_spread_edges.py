"""The spread of copies, in roundings of the largest element: the same number on all ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from pipegrad.gradients.drift.drift import _spread
from tests.support.gradients.cases import rank


@pytest.mark.ranks(2)
def test_copies_that_differ_have_one_spread_on_all_ranks() -> None:
    group = dist.group.WORLD
    assert group is not None
    eps = torch.finfo(torch.float32).eps
    parameter = torch.tensor([1.0, 0.25 + rank() * 8 * eps])
    assert _spread(parameter, group) == pytest.approx(8.0)
    assert _spread(torch.ones(3), group) == 0.0
    assert _spread(torch.tensor([rank()]), group) == math.inf
