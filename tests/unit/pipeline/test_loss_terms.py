"""What loss_fn may return, how metrics of microbatches are reduced, and how outputs are joined."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pipegrad.errors import StepError
from pipegrad.pipeline.batch import joined
from pipegrad.pipeline.loss_message import LossTerms, loss_parts

LOSS, CPU = torch.tensor(2.0), torch.device("cpu")


def terms(**options: Any) -> LossTerms:
    settings = {"is_weighted": False, "is_last": True, "expected": None, "taken": (), **options}
    return LossTerms(settings.pop("divisor", 1.0), CPU, **settings)


@pytest.mark.parametrize(
    ("returned", "is_weighted", "wanted"),
    [
        (LOSS, False, (LOSS, None, {})),
        ((LOSS, {"a": 1}), False, (LOSS, None, {"a": 1})),
        ([LOSS, {}], False, (LOSS, None, {})),
        ((LOSS, 3), True, (LOSS, 3, {})),
        ((LOSS, 0, {"a": True}), True, (LOSS, 0, {"a": True})),
    ],
)
def test_a_loss_has_a_weight_and_metrics(returned: Any, is_weighted: bool, wanted: Any) -> None:
    assert loss_parts(returned, is_weighted=is_weighted) == wanted


MEAN, WEIGHTED = "expected a tensor of one element or (loss, metrics)", "(sum of losses, weight)"


@pytest.mark.parametrize(
    ("returned", "is_weighted", "words"),
    [
        (None, False, f"returned None, {MEAN}"),
        (torch.ones(2), False, MEAN),
        ((), False, MEAN),
        ((LOSS, 3), False, "returned ['Tensor', 'int'], expected"),
        ((LOSS, torch.tensor(3)), False, "make the Scheduler with loss_reduction='token_mean'"),
        (LOSS, True, WEIGHTED),
        ((LOSS, {}), True, "returned ['Tensor', 'dict'], expected"),
        ((LOSS, torch.ones(2)), True, WEIGHTED),
        ((LOSS, 3, {}, {}), True, WEIGHTED),
        ((LOSS, -1), True, "returned the weight -1, expected a number from 0 on"),
        ((LOSS, math.inf), True, "returned the weight inf"),
        ((LOSS, {"a": "b"}), False, "returned the metric 'a' as 'b', expected a name, and a"),
        ((LOSS, {"a": torch.ones(2)}), False, "or a tensor of one element"),
        ((LOSS, {1: 2.0}), False, "returned the metric 1 as 2.0"),
        ((LOSS, {"a": LOSS * 1j}), False, "returned the metric 'a' as tensor(0.+2.j)"),
    ],
)
def test_anything_else_is_refused(returned: Any, is_weighted: bool, words: str) -> None:
    with pytest.raises(StepError) as caught:
        loss_parts(returned, is_weighted=is_weighted)
    assert words in str(caught.value)


def test_metrics_are_means_over_microbatches_or_by_weight_and_not_at_all_if_it_is_zero() -> None:
    step = terms(divisor=8.0)
    for value in (1, 4.0, torch.tensor([7], requires_grad=False)):
        step.add((LOSS.half().reshape(1, 1), None, {"a": value}))
    assert (step.total.item(), step.metric("a").item(), step.metrics) == (0.75, 4.0, ("a",))
    step = terms(is_weighted=True)
    for value, weight in ((1.0, 3), (torch.tensor(math.nan), torch.tensor(0)), (2.0, 1.5)):
        step.add((LOSS, weight, {"a": value}))
    assert (step.total.item(), step.weight.item(), step.metric("a").item()) == (6.0, 4.5, 6.0)


def test_losses_of_stages_are_summed_and_what_is_overwritten_later_keeps_its_value() -> None:
    value, step = torch.tensor(1.0, dtype=torch.float64), terms(taken=("aux",))
    step.add((value, None, {"a": value}))
    step.add_auxiliary("aux", value, 0)
    value.fill_(100.0)
    assert [step.total.item(), step.metric("a").item(), step.metric("aux").item()] == [2.0, 1, 1]
    # Those of one name are summed, and divided as the loss.
    step = terms(divisor=4.0, is_last=False, taken=("aux",))
    for _ in range(2):
        step.add_auxiliary("aux", torch.tensor([3.0], dtype=torch.bfloat16), 0)
    assert (step.total.item(), step.metric("aux").item(), step.metrics) == (1.5, 1.5, None)
    with pytest.raises(StepError, match=r"the metrics \['aux'\], which are names of losses of"):
        step.add((LOSS, None, {"aux": 1, "b": 2}))


def test_without_a_loss_the_rank_of_the_last_stage_has_nan_and_others_zero() -> None:
    last, other = terms(expected=("a",)), terms(expected=("a",), is_last=False)
    assert math.isnan(last.total.item())
    assert math.isnan(last.metric("a").item())
    assert (other.total.item(), other.metric("a").item(), other.weight.item()) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("later", [{}, {"a": 1, "b": 2}, {"b": 1}])
@pytest.mark.parametrize("is_known", [True, False])
def test_names_do_not_change(later: Any, is_known: bool) -> None:
    step = terms(expected=("a",) if is_known else None)
    step.add((LOSS, None, {"a": 1}))
    with pytest.raises(StepError) as caught:
        step.add((LOSS, None, later))
    assert f"metrics {sorted(later)}, expected ['a'], which all ranks know" in str(caught.value)


def test_outputs_are_joined_along_their_first_dimension_alone() -> None:
    """Ragged ones stay apart: one that is padded, or a guess, would be wrong without a word."""
    rows, scalars = [torch.ones(1, 3), torch.zeros(2, 3)], [torch.tensor(1), torch.tensor(2)]
    ragged, mixed = [torch.ones(2, 3), torch.ones(2, 4)], [torch.ones(2), torch.ones(2, 1)]
    found: Any = joined(list(zip(rows, scalars, ragged, mixed, strict=True)))
    assert found[0].shape == (3, 3)
    assert found[1].tolist() == [1, 2]
    assert [[tuple(part.shape) for part in parts] for parts in found[2:]] == [
        [(2, 3), (2, 4)],
        [(2,), (2, 1)],
    ]
    assert joined([]) == ()
