"""A model that was cut, on a rank that trains some of its stages: what still uses it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegrad import Scheduler, Topology, cut
from pipegrad.errors import StepError
from tests.support.gradients.cases import rank

pytestmark = pytest.mark.ranks(2)

TOKENS = torch.arange(24).reshape(4, 6) % 7


class Model(nn.Module):
    """An ordinary model, neither of transformers nor an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 7)

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embedding(tokens) * scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits: Tensor = self.head(x)
        return logits


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def scheduler_of(model: nn.Module, stages: int = 2) -> Scheduler:
    parts = cut(model, stages, example={"tokens": TOKENS[:1]})
    options: Any = {"schedule": "1f1b" if stages == 2 else "gpipe", "num_microbatches": 2}
    return Scheduler(parts, Topology.create(pipeline=stages), loss_fn=loss_fn, **options)


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))


@pytest.mark.parametrize("make", [Model, sequential])
def test_a_model_of_which_other_ranks_train_layers_is_no_more_used(
    make: Callable[[], nn.Module],
) -> None:
    """Loops for DDP evaluate it, and save it on rank 0: half of it was never trained."""
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    scheduler = scheduler_of(model)
    words = rf"trains its stage {rank()} alone: .* here cut\.modules\[{rank()}\]\.state_dict\(\)"
    for use in (
        lambda: model(TOKENS),
        model.state_dict,
        lambda: torch.save(model, io.BytesIO()),
    ):
        with pytest.raises(StepError, match=words):
            use()
    # What it was may be put into it, and its stages have that then.
    with torch.no_grad():
        expected = loss_fn(twin(TOKENS), TOKENS)
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(twin.state_dict())
    scheduler.sync.synchronize_parameters()
    assert scheduler.evaluate(TOKENS, target=TOKENS).loss == pytest.approx(expected.item())
    copy.deepcopy(model)(TOKENS)
    scheduler.close()


def test_a_model_that_this_rank_trains_whole_is_used_as_before() -> None:
    model = Model()
    scheduler = scheduler_of(model, stages=1)
    assert model(TOKENS).shape == (4, 6, 7)
    assert len(model.state_dict()) == 7
    scheduler.close()


def test_inputs_go_to_a_cut_model_by_position_as_to_the_uncut_one() -> None:
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    scheduler = scheduler_of(model)
    with torch.no_grad():
        expected = loss_fn(twin(TOKENS, 3.0), TOKENS).item()
    for inputs in ((TOKENS, 3.0), ((TOKENS, 3.0),)):
        assert scheduler.evaluate(*inputs, target=TOKENS).loss == pytest.approx(expected)
    by_name = scheduler.evaluate(TOKENS, scale=3.0, target=TOKENS)
    assert by_name.loss == pytest.approx(expected)
    with pytest.raises(StepError, match=r"3 inputs, expected at most \['tokens', 'scale'\]"):
        scheduler.step(TOKENS, 3.0, TOKENS)
    with pytest.raises(StepError, match=r"\['tokens'\] are given twice"):
        scheduler.step(TOKENS, tokens=TOKENS, target=TOKENS)
    scheduler.close()
