"""What models of transformers take and return: labels, their weights, samples, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from pipegrad import cut
from pipegrad.errors import StepError, TopologyError
from pipegrad.partition.hf.conventions import Conventions, sample_of
from tests.support.partition.families import DECODER, ENCODER, FAMILIES, HEADS, Family
from tests.support.partition.vision import SPREAD, VISION, seen

transformers = pytest.importorskip("transformers")

LABELS = torch.tensor([[-100, 5, 6, -100], [7, 8, 9, -100]])


def of(name: str) -> Conventions:
    return Conventions({**FAMILIES, **HEADS}[name].build())


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("Llama 3.2", 4),  # the first label of a row has no loss
        ("GPT-2", 4),
        ("BERT, next", 4),
        ("T5", 5),
        ("Whisper", 5),
        ("BERT", 5),
        ("Llama, tokens", 5),
        # Its loss does not shift labels. They were counted as if it did: gradients were wrong.
        ("BART, decoder alone", 5),
    ],
)
def test_labels_that_have_a_loss_are_counted(name: str, weight: int) -> None:
    conventions = of(name)
    assert conventions.labels == ("labels",)
    assert conventions.weight({"labels": LABELS}) == weight
    # DeBERTa leaves out all labels below 0, and other heads refuse them.
    assert conventions.weight({"labels": LABELS.where(LABELS >= 0, -1)}) == weight


def on_meta(kind: str, **options: Any) -> Any:
    """Returns a model of transformers' own sizes, without memory."""
    with torch.device("meta"):
        cls = getattr(transformers, kind)
        return cls(cls.config_class(**options))


DECODES = {"model_type": "bert", "is_decoder": True, "add_cross_attention": True}


@pytest.mark.parametrize(
    ("kind", "options", "weight"),
    [
        # They leave their loss to the language model inside, and shift labels themselves: all
        # labels were counted, and gradients were wrong by 4 %.
        ("BlipForConditionalGeneration", {}, 4),
        ("Kosmos2_5ForConditionalGeneration", {}, 4),
        ("MarianMTModel", {}, 5),
        ("EncoderDecoderModel", {"encoder": {"model_type": "bert"}, "decoder": DECODES}, 5),
        ("SegformerForSemanticSegmentation", {}, 8),  # a segmentation ignores 255 alone
    ],
)
def test_labels_are_counted_as_the_model_that_computes_the_loss_does(
    kind: str, options: dict[str, Any], weight: int
) -> None:
    conventions = Conventions(on_meta(kind, **options))
    assert conventions.labels == ("labels",)
    assert conventions.weight({"labels": LABELS}) == weight


def test_a_loss_over_sounds_is_offered_if_it_is_a_mean_over_samples() -> None:
    model = on_meta("WavLMForCTC", ctc_loss_reduction="mean", vocab_size=9, layerdrop=0.0)
    conventions = Conventions(model)
    assert conventions.weight(dict.fromkeys(conventions.labels, LABELS)) == 2
    model.config.ctc_loss_reduction = "sum"
    assert Conventions(model).labels == ()


@pytest.mark.parametrize("name", ["BERT, classes", "BERT, a number", "ViT", "BERT, answers"])
def test_other_losses_are_means_over_samples(name: str) -> None:
    conventions, family = of(name), {**FAMILIES, **HEADS}[name]
    batch = family.batch(1)
    labels = {label: batch[label] for label in conventions.labels}
    assert conventions.weight(labels) == len(batch[conventions.labels[0]])


@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize("seed", [100, 101])  # in the second, there are as many images as samples
def test_tokens_and_grids_tell_how_many_rows_a_sample_has(name: str, seed: int) -> None:
    family = VISION[name]
    batch, counts = family.batch(seed), list(SPREAD[seed % 2])
    found = Conventions(family.build()).rows_of(batch)
    assert found.keys() == ({*seen(batch)} if name != "Idefics3" else set())
    for rows, of_sample in found.items():
        assert sum(of_sample) == len(batch[rows])
        if "videos" not in name and (rows != "pixel_values" or "image_grid_thw" not in found):
            assert of_sample == counts
        assert {n for n, x in enumerate(of_sample) if x} <= {n for n, x in enumerate(counts) if x}


@pytest.mark.parametrize(
    ("kind", "weight", "mask"),
    [
        ("Qwen2Audio", 4, "attention_mask"),  # labels that it shifts were counted unshifted
        ("BioGptForTokenClassification", 5, "attention_mask"),
        ("BrosForTokenClassification", 5, "bbox_first_token_mask"),
    ],
)
def test_a_loss_that_leaves_out_what_is_masked_is_counted_or_refused(
    kind: str, weight: int, mask: str
) -> None:
    audio = VISION["Qwen2-Audio"].build if kind == "Qwen2Audio" else None
    conventions = Conventions(audio() if audio else on_meta(kind))
    assert conventions.weight({"labels": LABELS}) == weight
    conventions.check({"labels": LABELS}, {mask: (LABELS != -100).long()})
    with pytest.raises(StepError, match=f"labels count where {mask} is 0"):
        conventions.check({"labels": LABELS}, {mask: LABELS * 0})


def test_further_labels_are_refused() -> None:
    """The mean over LUKE's entities was weighed by tokens: gradients were off by 68 %."""
    given = {"labels": LABELS, "entity_labels": LABELS}
    with pytest.raises(StepError, match=r"\['entity_labels'\] are given .* loss_fn= and"):
        of("BERT").check({"labels": LABELS}, given)


def by_rows(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    losses = F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none").sum(1)
    return (losses / (labels[:, 1:] != -100).sum(1).clamp(min=1)).mean()


def summed(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="sum")


@pytest.mark.parametrize("loss", [None, by_rows, summed])
def test_the_first_training_forward_tells_whether_a_loss_is_one_mean(loss: Any) -> None:
    """A loss was weighed by its labels since its class had the name of one that is a mean."""
    family = FAMILIES["GPT-2"]
    family = Family(family.config, family.head, {**family.options, "resid_pdrop": 0.5})
    model: Any = family.build()
    if loss is not None:
        loss.__module__ = "transformers.loss"
        model.loss_function = loss
    (stage,) = cut(model, 1).stages([0], own_loss=True)
    batch = family.batch(1)
    with torch.no_grad():
        stage.forward([batch])
    for _ in range(2):
        torch.manual_seed(1)
        if loss is not None:
            with pytest.raises(StepError, match=r"no mean over its labels, .* loss_fn= and"):
                stage.forward([batch])
            continue
        found, after = stage.forward([batch])[-1], torch.get_rng_state()
        torch.manual_seed(1)  # the same random numbers as without a look
        assert found == model(**batch).loss * (batch["labels"][:, 1:] != -100).sum()
        assert torch.equal(after, torch.get_rng_state())


def test_a_class_of_ones_own_offers_no_loss() -> None:
    """A mean by class was weighed by labels, as that of its parent: gradients were off by 100 %."""

    class Own(transformers.BertForSequenceClassification):  # type: ignore[misc, name-defined]
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            return super().forward(input_ids=input_ids, labels=labels)

    kept = type("Kept", (transformers.BertForSequenceClassification,), {})
    config = transformers.BertConfig(**ENCODER)
    assert Conventions(Own(config)).labels == ()
    assert Conventions(kept(config)).labels == ("labels",)


@pytest.mark.parametrize(
    ("config", "head"),
    [
        ("BertConfig", "BertForPreTraining"),  # two means
        ("ElectraConfig", "ElectraForPreTraining"),  # a mean over what is not masked
        ("GPT2Config", "GPT2DoubleHeadsModel"),
        ("XLNetConfig", "XLNetForQuestionAnswering"),
        ("BertConfig", "BertModel"),  # no loss
    ],
)
def test_a_loss_that_is_not_one_mean_is_not_offered(config: str, head: str) -> None:
    """The loss of BertForPreTraining was weighed as if it were one mean: gradients were wrong."""
    sizes = {"n_layer": 1, "n_head": 2, "vocab_size": 61}
    wide = {"GPT2Config": {"n_embd": 16}, "XLNetConfig": {"d_model": 16, "d_inner": 8}}
    model = Family(config, head, sizes | wide[config] if config in wide else ENCODER).build()
    assert Conventions(model).labels == ()


def test_answers_behind_the_end_are_refused() -> None:
    """The model ignores them, each end by itself, so gradients were wrong."""
    conventions, text = of("BERT, answers"), {"input_ids": torch.ones(2, 5)}
    inside, outside = torch.tensor([1, 4]), torch.tensor([2, 5])
    conventions.check(dict.fromkeys(conventions.labels, inside), text)
    with pytest.raises(
        StepError, match=r"end_positions has answers behind .* the text of 5 tokens"
    ):
        conventions.check(dict(zip(conventions.labels, (inside, outside), strict=True)), text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"past_key_values": 1}, r"\['past_key_values'\] cannot be had in a pipeline"),
        ({"output_hidden_states": True}, "cannot be had"),
        ({"return_dict": False}, "needs the names of the outputs"),
        ({"num_items_in_batch": 7}, "which it counts itself"),
        ({"shift_labels": LABELS}, "which it counts itself"),
    ],
)
def test_arguments_that_a_pipeline_cannot_serve_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(StepError, match=message):
        of("Llama 3.2").arguments(arguments)
    # Those that ask for nothing are passed.
    given = {"use_cache": False, "past_key_values": None, "output_attentions": False}
    assert of("Llama 3.2").arguments(given) == given
    assert of("Llama 3.2").arguments(given | {"use_cache": True}) == given  # collators send it
    assert Conventions(nn.Linear(2, 2)).arguments({"x": 1}) == {"x": 1}


def test_labels_of_which_none_counts_give_a_number() -> None:
    conventions, nothing = of("Llama 3.2"), torch.full((2, 3), -100)
    weight = conventions.weight({"labels": nothing})
    assert torch.equal(conventions.safe({"labels": nothing}, weight)["labels"], 0 * nothing)  # type: ignore[arg-type]
    kept = conventions.safe({"labels": LABELS}, conventions.weight({"labels": LABELS}))
    assert torch.equal(kept["labels"], LABELS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_hidden_states": True}, "collects values of layers on all stages"),
        ({"layerdrop": 0.1}, "skips layers at random"),
    ],
)
def test_configurations_that_a_pipeline_cannot_serve_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TopologyError, match=message):
        Conventions(Family("LlamaConfig", "LlamaForCausalLM", DECODER | options).build())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sample_fits_the_model_and_its_dtype(name: str) -> None:
    """Whisper's sample was of float32 and too long, so a model of float64 could not be cut.

    T5 views its labels as one row, and ran three times, because those of the sample were a part.
    """
    model = FAMILIES[name].build()
    for value in sample_of(model).values():
        assert isinstance(value, torch.Tensor)
        assert value.dtype in (torch.long, FAMILIES[name].dtype)
        assert value.is_contiguous()
    model(**Conventions(model).arguments(sample_of(model)))


def test_a_model_that_takes_something_else_asks_for_an_example() -> None:
    with pytest.raises(TopologyError, match="Give example="):
        cut(HEADS["BERT, choices"].build(), 2)


@pytest.mark.parametrize("name", ["GPT-2", "OPT"])
def test_texts_that_are_longer_than_learnt_positions_are_refused(name: str) -> None:
    """The step ended with "IndexError: index out of range in self"."""
    model: Any = FAMILIES[name].build()
    longest = model.config.max_position_embeddings
    conventions = Conventions(model)
    conventions.arguments({"input_ids": torch.ones(2, longest)})
    long = {"input_ids": torch.ones(2, longest + 1)}
    conventions.arguments({**long, "position_ids": torch.zeros(2, longest + 1)})
    with pytest.raises(StepError, match=f"texts have {longest + 1} tokens, and .* {longest} "):
        conventions.arguments(long)
    rotates: Any = FAMILIES["Llama 3.2"].build()
    longer = {"input_ids": torch.ones(2, rotates.config.max_position_embeddings + 1)}
    Conventions(rotates).arguments(longer)
