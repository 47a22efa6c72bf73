"""Steps of a cut on ranks: what is refused in words, what follows, evaluation, modes, dropout."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch

from pipegrad import Scheduler, cut
from pipegrad.errors import AgreementError
from tests.support.gradients.cases import outcome, rank
from tests.support.partition.families import FAMILIES, ROWS, VOCAB
from tests.support.partition.twins import Twins, difference
from tests.support.partition.vision import SPREAD, VISION, example
from tests.support.pipeline.schedulers import topology
from tests.support.ranked import gathered

pytestmark = pytest.mark.ranks(2, seconds=300)

pytest.importorskip("transformers")

LLAMA, GPT2 = FAMILIES["Llama 3.2"], FAMILIES["GPT-2"]
BATCH: dict[str, Any] = LLAMA.batch(1)
LABELS = BATCH["labels"]
# What a step is given in the place of a part of the batch -> words of the error on some rank.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a cache": ({"past_key_values": 1}, "['past_key_values'] cannot be had in a pipeline"),
    "no labels": ({"labels": None}, "needs ['labels'], of which the model computes its loss"),
    "a target": ({"target": LABELS}, "give these and no target="),
    "a list": ({"labels": LABELS.tolist()}, "is a list, expected a tensor"),
    "too few rows": ({n: x[:3] for n, x in BATCH.items()}, "cannot be cut into 4 microbatches"),
    "a token that there is not": (
        {"input_ids": BATCH["input_ids"].index_fill(0, torch.tensor([5]), VOCAB)},
        "index out of range",
    ),
}


def test_refusals_evaluations_and_steps_of_one_cut() -> None:
    twins = Twins(LLAMA.build)
    for name, (change, words) in REFUSED.items():
        given = {n: x for n, x in (BATCH | change).items() if x is not None}
        assert words in outcome(lambda given=given: twins.scheduler.step(**given)), name  # type: ignore[misc]
        for parameter in twins.held.values():
            parameter.grad = None
    twins.step(BATCH)
    # Evaluation is that of the uncut model and leaves modes.
    without = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
    outputs = twins.scheduler.evaluate(**without)
    assert outputs.loss.isnan()
    with torch.no_grad():
        if outputs.outputs:
            assert difference(outputs.outputs[0], twins.true(**without).logits) <= 1e-6
        for rows in (ROWS, 5):
            part = {name: value[:rows] for name, value in BATCH.items()}
            loss = twins.scheduler.evaluate(outputs=False, **part).loss
            assert difference(loss, twins.true(**part).loss) <= 1e-6
    assert all(module.training for stage in twins.own for module in stage.modules())
    twins.step(BATCH)
    assert max(twins.close()) <= 1e-6


def test_rows_of_images_are_refused_in_words_and_the_next_step_is_right() -> None:
    family = VISION["LLaVA"]
    batch, right = family.batch(100), [*SPREAD[0]]
    twins = Twins(family.build, cut={"example": example(family)})

    def said(counts: list[int], **change: Any) -> set[str]:
        given = {**batch, **change, "rows_of": {"pixel_values": counts}}
        return set(gathered(outcome(lambda: twins.scheduler.step(**given))))

    (words,) = said([1] * ROWS)
    assert "rows_of['pixel_values'] adds up to 8, and the tensor has 7 rows" in words
    (words,) = said([7])
    assert "has 1 numbers, and the batch has 8 samples" in words
    # All ranks of a pipeline are given the same.
    (words,) = said(right if rank() else right[::-1])
    assert "given different tensors as 'rows_of'" in words
    for parameter in twins.held.values():
        parameter.grad = None
    twins.step(batch, given={**batch, "rows_of": {"pixel_values": right}})
    twins.step(batch)
    assert max(twins.close()) <= 1e-6


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_frozen_tower_costs_no_backward(is_alone: bool) -> None:
    """A stage of the tower and of embeddings, which are frozen, too, or not."""
    family = VISION["LLaVA"]

    def frozen() -> Any:
        model: Any = family.build()
        model.model.vision_tower.requires_grad_(False)
        model.get_input_embeddings().requires_grad_(not is_alone)
        return model

    boundary = "model.multi_modal_projector"
    twins = Twins(frozen, cut={"example": example(family), "boundaries": [boundary]})
    twins.step(family.batch(100))
    given: Any = family.batch(101)
    with mock.patch("torch.autograd.backward", wraps=torch.autograd.backward) as ran:
        twins.scheduler.step(given)
    back = [c for c in twins.scheduler.program.channels if c.kind == "B"]
    links = [twins.scheduler.program.links[channel.link].name for channel in back]
    assert links == ([] if is_alone else ["model.language_model.embed_tokens"])
    assert ran.call_count == (0 if is_alone and not rank() else 4)  # microbatches
    assert max(twins.close()) <= 1e-6


def test_one_model_may_have_several_cuts_and_schedulers() -> None:
    model = LLAMA.build()
    for boundary, schedule, number in ((3, "1f1b", 4), (5, "eager-1f1b", 4), (3, "1f1b", 2)):
        options: Any = {"schedule": schedule, "num_microbatches": number}
        twins = Twins(lambda: model, cut={"boundaries": [boundary]}, **options)
        twins.true = LLAMA.build()
        twins.step(BATCH)
        assert max(twins.close()) <= 1e-6
    assert difference(copy.deepcopy(model)(**BATCH).loss, LLAMA.build()(**BATCH).loss) <= 1e-6


def test_dropout_follows_seeds_and_modes() -> None:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    model: Any = type(GPT2)(GPT2.config, GPT2.head, dict(GPT2.options) | dropout).build()
    parts = cut(model, 2)
    scheduler = Scheduler(parts, topology(2), schedule="1f1b", num_microbatches=4)
    batch: dict[str, Any] = GPT2.batch(1)

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        result = scheduler.step(**batch).loss.item()
        for module in parts.modules.values():
            module.zero_grad()
        return result

    first = loss(3)
    assert abs(loss(3) - first) <= 1e-6
    assert loss(4) != first
    quiet = scheduler.evaluate(outputs=False, **batch).loss.item()
    for module in parts.modules.values():
        module.eval()
    still = loss(5)
    scheduler.close()
    with torch.no_grad():
        true = copy.deepcopy(model).eval()(**batch).loss.item()
    assert [quiet, still] == pytest.approx([true, true], abs=1e-6, rel=0)


def test_ranks_of_a_pipeline_have_one_batch() -> None:
    """A loader that divides data over all ranks gives each rank of a pipeline its own batch.

    It was accepted: the pipeline trained on inputs and labels that do not belong together.
    """
    twins, batch = Twins(LLAMA.build), dict[str, Any](LLAMA.batch(rank()))
    words = "^ranks 0 and 1 were given different tensors as 'input_ids'"
    with pytest.raises(AgreementError, match=words) as caught:
        twins.scheduler.step(**batch)
    assert len(set(gathered(str(caught.value)))) == 1
    twins.close()
