"""Views of one storage: which of them have bytes in common, wherever they begin."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipegrad.errors import PlanError
from pipegrad.model.ties import refuse_partly_shared


def views(*ranges: tuple[int, int]) -> list[tuple[str, nn.Parameter]]:
    flat = torch.zeros(32)
    return [(f"p{i}", nn.Parameter(flat[begin:end])) for i, (begin, end) in enumerate(ranges)]


def test_pieces_of_one_flat_tensor_that_only_touch_are_no_shared_memory() -> None:
    refuse_partly_shared(views((0, 8), (8, 12), (12, 13), (20, 32)))


def test_views_with_a_common_byte_are_refused_in_any_order() -> None:
    with pytest.raises(PlanError, match=r"'p0' \(8,\) and 'p2' \(8,\)"):
        refuse_partly_shared(views((0, 8), (20, 24), (4, 12)))
