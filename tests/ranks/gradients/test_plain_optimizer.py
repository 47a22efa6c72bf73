"""An optimizer of torch that a loop made before the cut: right, or refused."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegrad
from pipegrad.errors import StepError

pytestmark = pytest.mark.ranks(4)
X = torch.arange(32.0).reshape(8, 4) / 32


def trained(*, early: bool, **options: Any) -> list[Tensor]:
    """Returns this rank's parameters after three steps."""
    torch.manual_seed(0)
    model, topology = (
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))),
        pipegrad.Topology.create(pipeline=2),
    )
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    cut = pipegrad.cut(model, 2)
    options = {"schedule": "1f1b", "num_microbatches": 2, "loss_fn": nn.MSELoss(), **options}
    with closing(pipegrad.Scheduler(cut, topology, **options)) as scheduler:
        optimizer = plain if early else scheduler.optimizer(torch.optim.AdamW, lr=0.1)
        for number in range(3):
            x = X * (1 + number + topology.coordinate("dp"))
            scheduler.step(x, target=x.flip(0))
            optimizer.step()
            optimizer.zero_grad()
        return [x.detach() for x in cut.modules[topology.coordinate("pp")].parameters()]


def test_it_trains_as_the_schedulers_own_does_with_the_default_handlers() -> None:
    assert all(map(torch.equal, trained(early=True), trained(early=False)))


@pytest.mark.parametrize(
    "options",
    [{"handlers": ["sharded"]}, {"master_dtype": torch.float64}],
    ids=["shards", "master"],
)
def test_it_is_refused_where_gradients_are_elsewhere(options: dict[str, Any]) -> None:
    with pytest.raises(
        StepError,
        match=r"sync\.optimizer(_parameters)?\(\), not of module\.parameters\(\)",
    ):
        trained(early=True, **options)
