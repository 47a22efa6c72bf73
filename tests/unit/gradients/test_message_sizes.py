"""Numbers of another rank that say how much memory a message needs: too large ones are refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from pipegrad.comm.sync_points import Done
from pipegrad.errors import ReduceError, StepError
from pipegrad.gradients import tie_exchange
from pipegrad.gradients.tie_exchange import PairSum, Rows
from pipegrad.observe.links import Wires


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
    pair = PairSum([Rows(0, 4, 2), Rows(8, 1, 1)], back=mock.Mock())
    monkeypatch.setattr(tie_exchange, "receive", sending(*counts))
    with pytest.raises(ReduceError, match="more than there are"):
        pair._add_rows(torch.zeros(9))


@pytest.mark.parametrize("number", [-1, 2**40])
def test_a_size_that_no_probe_has_is_refused(number: int) -> None:
    edges = mock.Mock(**{"host.return_value": (None, 0)})
    wires = Wires(edges, 0, torch.device("cpu"))
    with (
        mock.patch("pipegrad.comm.sync_points.in_use.receive", sending(number)),
        pytest.raises(StepError, match=f"rank 1 has sent {number}, expected a number of bytes"),
    ):
        wires.hear(1)
