"""A training step in evaluation mode: right, and one warning if there is dropout."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipegrad import Scheduler, Stage, Topology
from tests.support.gradients.cases import rank

pytestmark = pytest.mark.ranks(2)
WORDS = "all modules of this rank are in evaluation mode, so '{}' drops nothing out"
# What a stage has, and what is warned of.
MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), "1"),
    "attention": (lambda: Attends(0.2), "attention"),
    "dropout of nothing": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), ""),
    "none": (lambda: nn.Linear(4, 4), ""),
}


class Attends(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.attention(*[x.unsqueeze(1)] * 3)[0]
        return out.squeeze(1)


@pytest.mark.parametrize("name", MODULES)
def test_dropout_that_is_off_in_a_training_step_is_warned_of_once(name: str) -> None:
    make, where = MODULES[name]
    module = make()
    scheduler = Scheduler(
        [Stage(module, rank())],
        Topology.create(pipeline=2),
        schedule="1f1b",
        num_microbatches=2,
        loss_fn=nn.MSELoss(),
        handlers=["noop"],
    )
    said = list[list[str]]()
    x = torch.ones(4, 4)
    for trains in (True, False, False):
        module.train(trains)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.step(x, target=x)
            scheduler.evaluate(x, target=x)
        said.append([str(w.message) for w in caught if "evaluation mode" in str(w.message)])
        module.zero_grad()
    assert [len(each) for each in said] == [0, bool(where), 0]
    assert not where or WORDS.format(where) in said[1][0]
    scheduler.close()
