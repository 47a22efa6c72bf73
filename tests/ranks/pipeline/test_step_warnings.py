"""What a training step warns of once: dropout that is off, and labels that do not all count."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Topology
from pipegrad.errors import TopologyError
from tests.support.gradients.cases import rank, scheduled
from tests.support.pipeline.layers import make
from tests.support.ranked import gathered

pytestmark = pytest.mark.ranks(2)
F = nn.functional


def warned(words: str, *calls: Callable[[], object]) -> list[str]:
    """Returns the warnings with these words that calls give."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            call()
    return [str(w.message) for w in caught if words in str(w.message)]


# A training step in evaluation mode.

WORDS = "all modules of a rank are in evaluation mode, so '{}' drops nothing out"
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
    build, where = MODULES[name]
    module = build()
    scheduler, x, said = (
        make(module, module, num_microbatches=2, loss_fn=nn.MSELoss()),
        torch.ones(4, 4),
        list[list[str]](),
    )
    for trains in (True, False, False):
        module.train(trains)
        calls = lambda: scheduler.step(x, target=x), lambda: scheduler.evaluate(x, target=x)
        said.append(warned("evaluation mode", *calls))
        module.zero_grad()
    everywhere = gathered(said)  # one rank warns for the job
    assert [sum(map(len, each)) for each in zip(*everywhere, strict=True)] == [0, bool(where), 0]
    assert not said[1] or WORDS.format(where) in said[1][0]
    scheduler.close()


# BatchNorm sees the rows of a microbatch, and of one replica.


def normed(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, **options))


# Which ranks have one, and whether one warns. There are two pipelines if each has one stage.
NORMS: dict[str, tuple[tuple[bool, bool], int, int, bool]] = {
    "both stages": ((True, True), 2, 2, True),
    "the last stage": ((False, True), 2, 2, True),
    "none": ((False, False), 2, 2, False),
    "one microbatch": ((True, True), 2, 1, False),
    "replicas": ((True, True), 1, 1, True),
}


@pytest.mark.parametrize("name", NORMS)
def test_batch_norm_that_does_not_see_the_batch_is_warned_of_once(name: str) -> None:
    """Held-out losses of replicas differed by up to 0.012 from those of DDP, without a word."""
    has_norm, pipeline, number, warns = NORMS[name]
    torch.manual_seed(0)
    modules = [normed() if has_norm[i] else nn.Linear(4, 4) for i in range(pipeline)]
    scheduler, x = make(*modules, num_microbatches=number), torch.ones(4, 4) + rank()
    x = x if pipeline == 1 else torch.ones(4, 4)
    for module in modules:
        module.eval()
    frozen = warned("BatchNorm", lambda: scheduler.evaluate(x, target=x))
    for module in modules:
        module.train()
    said = list[str]()
    for _ in range(2):
        said += warned("BatchNorm", lambda: scheduler.step(x, target=x))
        scheduler.sync.drop_gradients()
    assert frozen == []
    everywhere = [each for each in gathered(len(said)) if each]  # one rank warns for the job
    assert everywhere == [1] * warns
    assert not said or has_norm[rank()]
    assert not said or ("of one of 2 replicas" in said[0]) == (pipeline == 1)
    assert not said or said[0].startswith("'1' of stage ")
    scheduler.close()


def test_batch_norm_that_is_frozen_is_not_warned_of() -> None:
    module = normed()
    module[1].eval()  # type: ignore[index]
    scheduler, x = make(module, module, num_microbatches=2), torch.ones(4, 4)
    assert warned("BatchNorm", lambda: scheduler.step(x, target=x)) == []
    scheduler.close()


@pytest.mark.ranks(4)
def test_a_sync_batch_norm_of_ranks_with_other_stages_is_refused() -> None:
    """Its collective waited for ranks that never come."""
    at = Topology.create(pipeline=2)
    for group, words in ((None, "a SyncBatchNorm is over ranks [0, 1, 2, 3]"), (at, "")):
        own = None if group is None else at.group_along("dp")
        module = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4, process_group=own))
        if not words:
            make(module, module, num_microbatches=2).close()
            continue
        with pytest.raises(TopologyError) as caught:
            make(module, module, num_microbatches=2)
        assert words in str(caught.value)


# A mean of means over labels that do not all count: with the size of it.


def labels(*ignored: int, value: int = -100) -> Tensor:
    """Returns labels of two microbatches, each of 2 x 4, with so many ignored ones."""
    given = torch.arange(16).reshape(4, 4) % 5
    for microbatch, number in enumerate(ignored):
        given[2 * microbatch : 2 * microbatch + 2].view(-1)[:number] = value
    return given


def cross_entropy(out: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten(), **options)


def weighted(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="sum")
    return loss, (target != -100).sum()


class Entropy(nn.CrossEntropyLoss):
    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return super().forward(out.flatten(0, 1), target.flatten())


class Composed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_tokens = nn.CrossEntropyLoss(weight=torch.ones(5))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.of_tokens(out.flatten(0, 1), target.flatten())
        return loss


def closed(**options: Any) -> dict[str, Any]:
    criterion = nn.CrossEntropyLoss(**options)
    return {"loss_fn": lambda out, y: criterion(out.flatten(0, 1), y.flatten())}


CLASSES, MEAN_BY_CLASS = torch.ones(5), "loss_fn has weights of classes"
OTHER = {"loss_fn": Entropy(ignore_index=0)}
PARTIAL = {"loss_fn": partial(cross_entropy, ignore_index=0)}
WEIGHTED = {"loss_fn": weighted, "loss_reduction": "token_mean"}
CASES: dict[str, tuple[Tensor, dict[str, Any], str]] = {
    "uneven": (labels(2, 5), {}, "3 to 6 labels that count. If loss_fn is a mean over them, a la"),
    "by how much": (labels(2, 5), {}, "a label of one microbatch weighs 2 times as much as one of"),
    "one has none": (labels(2, 8), {}, "have 0 to 6 labels that count"),
    "of a module": (labels(0, 4, value=0), OTHER, "targets have 0, "),
    "of a partial": (labels(0, 4, value=0), PARTIAL, "targets have 0, "),
    "of a closure": (labels(0, 4, value=0), closed(ignore_index=0), "targets have 0, "),
    "classes": (labels(), {"loss_fn": Entropy(weight=CLASSES)}, MEAN_BY_CLASS),
    "classes of a closure": (labels(), closed(weight=CLASSES), MEAN_BY_CLASS),
    "classes of a part": (labels(), {"loss_fn": Composed()}, MEAN_BY_CLASS),
    "sums by class": (labels(), closed(weight=CLASSES, reduction="sum"), ""),
    "even": (labels(3, 3), {}, ""),
    "all count": (labels(), {}, ""),
    "weights": (labels(2, 5), WEIGHTED, ""),
    "sums": (labels(2, 5), {"loss_fn": Entropy(reduction="sum")}, ""),
    "sums of a partial": (labels(2, 5), {"loss_fn": partial(cross_entropy, reduction="sum")}, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_uneven_labels_that_count_are_warned_of_once(name: str) -> None:
    target, options, words = CASES[name]
    torch.manual_seed(rank())
    module = nn.Embedding(5, 8) if rank() == 0 else nn.Linear(8, 5)
    scheduler = make(module, module, **{"num_microbatches": 2, "loss_fn": cross_entropy, **options})
    x, said = torch.arange(16).reshape(4, 4) % 5, list[str]()
    for given in (labels(), target, target):  # the first step has nothing to say of labels
        said += warned("loss_reduction", lambda: scheduler.step(x, target=given))  # noqa: B023
        module.zero_grad()
    assert len(said) == bool(words and rank() == 1)
    assert not said or words in said[0]
    scheduler.close()


def test_uneven_labels_of_torchs_mean_are_warned_of_over_replicas() -> None:
    """Their gradients were off by 57 %. In one pipeline they are right."""
    options: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "handlers": ["data-parallel"]}
    module = nn.Linear(4, 5)
    scheduler = scheduled(module, pipeline=1, **options)
    for target, number in ((torch.tensor([1, 2, 3, 4]), 0), (torch.tensor([1, 2, 3, -100]), 1)):
        x = torch.randn(4, 4)
        said = warned("token_mean", lambda: scheduler.step(x, target=target))  # noqa: B023
        assert len([words for each in gathered(said) for words in each]) == number
        module.zero_grad()
    scheduler.close()
