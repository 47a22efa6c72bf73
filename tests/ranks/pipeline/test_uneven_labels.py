"""A mean of means over labels that do not all count: one warning, with the size of it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Stage, Topology
from tests.support.gradients.cases import rank

pytestmark = pytest.mark.ranks(2)
F = nn.functional


def labels(*ignored: int, value: int = -100) -> Tensor:
    """Returns labels of two microbatches, each of 2 x 4, with so many ignored ones."""
    given = torch.arange(16).reshape(4, 4) % 5
    for microbatch, number in enumerate(ignored):
        given[2 * microbatch : 2 * microbatch + 2].view(-1)[:number] = value
    return given


def cross_entropy(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def weighted(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="sum")
    return loss, (target != -100).sum()


class Entropy(nn.CrossEntropyLoss):
    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return super().forward(out.flatten(0, 1), target.flatten())


OTHER = {"loss_fn": Entropy(ignore_index=0)}
WEIGHTED = {"loss_fn": weighted, "loss_reduction": "token_mean"}
CASES: dict[str, tuple[Tensor, dict[str, Any], str]] = {
    "uneven": (labels(2, 5), {}, "3 to 6 labels that count. If loss_fn is a mean over them, a la"),
    "by how much": (labels(2, 5), {}, "a label of one microbatch weighs 2 times as much as one of"),
    "one has none": (labels(2, 8), {}, "have 0 to 6 labels that count"),
    "of a module": (labels(0, 4, value=0), OTHER, "targets have 0, "),
    "even": (labels(3, 3), {}, ""),
    "all count": (labels(), {}, ""),
    "weights": (labels(2, 5), WEIGHTED, ""),
    "sums": (labels(2, 5), {"loss_fn": Entropy(reduction="sum")}, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_uneven_labels_that_count_are_warned_of_once(name: str) -> None:
    target, options, words = CASES[name]
    torch.manual_seed(rank())
    module = nn.Embedding(5, 8) if rank() == 0 else nn.Linear(8, 5)
    scheduler = Scheduler(
        [Stage(module, rank())],
        Topology.create(pipeline=2),
        **{
            "schedule": "1f1b",
            "num_microbatches": 2,
            "loss_fn": cross_entropy,
            "handlers": ["noop"],
            **options,
        },
    )
    said = list[str]()
    for given in (labels(), target, target):  # the first step has nothing to say
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.step(torch.arange(16).reshape(4, 4) % 5, target=given)
        said += [str(w.message) for w in caught if "labels that count" in str(w.message)]
        module.zero_grad()
    assert len(said) == bool(words and rank() == 1)
    assert not said or words in said[0]
    scheduler.close()
