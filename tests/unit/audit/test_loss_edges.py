"""Which losses of a rank an audit takes for right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipegrad.audit.states import losses

# Microbatches of 1 and 3 targets on replica 0; those of replica 1 make the whole another loss.
TRUTH: Any = SimpleNamespace(
    own=torch.tensor([3.5, 8.5], dtype=torch.float64),
    losses=torch.tensor([[2.0, 4.0], [8.0, 9.0]], dtype=torch.float64),
    loss=6.0625,
    loss_error=0.0,
)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (6.0625, None),
        (3.5, None),  # of the rows of the replica
        (6.0, "the sum over microbatches"),
        (23.0, "the sum over microbatches and replicas"),
        (12.125, "multiplied by the number of microbatches"),
        (3.0, "a mean of means: microbatches count alike"),
        (1.75, "divided by the number of microbatches twice"),
        (5.5, "not that of one process"),
    ],
)
def test_a_loss_is_that_of_all_targets_or_of_those_of_the_replica(
    loss: float, words: str | None
) -> None:
    seen: Any = SimpleNamespace(rank=0, replica=0, losses=[loss])
    found = [finding.cause for finding in losses([seen], TRUTH)]
    assert found == ([] if words is None else [f"the loss is {words}"])
