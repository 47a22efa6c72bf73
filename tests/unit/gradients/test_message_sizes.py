"""Numbers of another rank that say how much memory a message needs: too large ones are refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from pipegrad.comm.sync_points import Done
from pipegrad.errors import ReduceError
from pipegrad.gradients import tie_exchange
from pipegrad.gradients.tie_exchange import PairSum


def sending(*numbers: int) -> Any:
    """Returns a receive that takes these numbers, and is done."""

    def receive(*given: Any) -> Done:
        next(x for x in given if isinstance(x, torch.Tensor)).copy_(torch.tensor(numbers))
        return Done()

    return receive


@pytest.mark.parametrize("counts", [(5, 0), (-1, 0), (0, 2), (2**40, 0)])
def test_more_rows_than_a_buffer_has_are_refused_before_memory_is_made(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    buffer = torch.zeros(9)
    pair = PairSum([buffer[:8].view(4, 2), buffer[8:].view(1, 1)], back=mock.Mock())
    monkeypatch.setattr(tie_exchange, "receive", sending(*counts))
    with pytest.raises(ReduceError, match="more than there are"):
        pair._add_rows(buffer)
