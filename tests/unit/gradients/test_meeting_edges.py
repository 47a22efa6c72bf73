"""The state of meetings is of the moment in which it was taken."""

from __future__ import annotations

import torch

from pipegrad.gradients.meetings import _saved


def test_saved_tensors_do_not_follow_the_ones_that_train_on() -> None:
    momentum = torch.ones(3, requires_grad=True)
    saved = _saved({2: momentum})
    with torch.no_grad():
        momentum.add_(1.0)
    assert saved[2].tolist() == [1.0, 1.0, 1.0]
    assert not saved[2].requires_grad
