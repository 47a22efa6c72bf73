"""Dropout between the layers of an LSTM is no function of torch; an audit is without it, too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipegrad.audit import Audit

MICROBATCHES = 2


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x)[0][:, -1])
        return out


@pytest.mark.ranks(1)
def test_a_right_loop_over_an_lstm_that_drops_has_no_finding() -> None:
    model = Recurrent()
    module = copy.deepcopy(model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(inputs: Tensor, target: Tensor) -> None:
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            (functional.mse_loss(module(x), y) / MICROBATCHES).backward()
        optimizer.step()

    data = [(torch.randn(8, 5, 3), torch.randn(8, 2)) for _ in range(2)]
    report = Audit(
        step=step,
        modules=module,
        model=model,
        loss_fn=functional.mse_loss,
        batches=data,
        microbatches=MICROBATCHES,
    ).run()
    assert report.is_right, str(report)
    assert "dropout was 0 while numbers were compared" in report.notes
    assert module.layers.dropout == model.layers.dropout == 0.5
