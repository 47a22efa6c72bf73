"""Models of transformers in traced parts: loss and gradients are those of the uncut model."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from pipegrad.partition.traced.model import TracedModel
from tests.support.pairwise import pairwise
from tests.support.rounding import rounding
from tests.unit.partition.test_traced import Run, compare

transformers: Any = pytest.importorskip("transformers")

VOCABULARY, WIDTH, LAYERS, ROWS, LENGTH = 96, 32, 4, 2, 8
HEADS: dict[str, Any] = {"num_attention_heads": 4, "intermediate_size": 64}
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, **HEADS}
SPECIAL: dict[str, Any] = {
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Llama": (
        "LlamaForCausalLM",
        {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True},
        r"model\.layers\.\d+",
    ),
    "GPT2": (
        "GPT2LMHeadModel",
        {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "bos_token_id": 0, "eos_token_id": 2},
        r"transformer\.h\.\d+",
    ),
    "Bert": ("BertForMaskedLM", SIZES, r"bert\.encoder\.layer\.\d+"),
    "T5": (
        "T5ForConditionalGeneration",
        {
            "d_model": WIDTH,
            "num_layers": LAYERS,
            "num_heads": 4,
            "d_ff": 64,
            "d_kv": 8,
            "decoder_start_token_id": 0,
            "tie_word_embeddings": True,
        },
        r"(en|de)coder\.block\.\d+",
    ),
    "Bart": (
        "BartForConditionalGeneration",
        {
            "d_model": WIDTH,
            "encoder_layers": LAYERS,
            "decoder_layers": LAYERS,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            **SPECIAL,
        },
        r"model\.(en|de)coder\.layers\.\d+",
    ),
}


def made(name: str) -> tuple[torch.nn.Module, list[str]]:
    """Returns a model in training mode, with dropout, and the paths of its layers."""
    kind, options, pattern = CASES[name]
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **options)
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, kind)(config).train()
    return model, [path for path, _ in model.named_modules() if re.fullmatch(pattern, path)]


def batch(name: str) -> dict[str, object]:
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return given | ({} if name == "Bert" else {"use_cache": False})


@pytest.mark.parametrize(
    ("name", "num_stages", "dtype"), pairwise(CASES, (2, 4), (torch.float32, torch.float64))
)
def test_loss_and_gradients_are_those_of_the_uncut_model(
    name: str, num_stages: int, dtype: torch.dtype
) -> None:
    model, layers = made(name)
    boundaries = [len(layers) * stage // num_stages for stage in range(1, num_stages)]
    # An element of the embedding is the sum over the vocabulary's logits of all tokens.
    tolerance = rounding(ROWS * LENGTH * VOCABULARY, dtype=dtype)
    compare(model.to(dtype), batch(name), layers, boundaries, tolerance=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_evaluation_mode_has_no_dropout(name: str) -> None:
    model, layers = made(name)
    parts = TracedModel(model, batch(name), layers).parts([2])
    for part in parts:
        part.module.eval()
    with torch.no_grad():
        returned = Run(parts, batch(name)).returned
        expected = model.eval()(**batch(name))
    assert type(returned) is type(expected)
    assert list(returned) == list(expected)
    tolerance = rounding(WIDTH * LAYERS)
    torch.testing.assert_close(returned.logits, expected.logits, rtol=0, atol=tolerance)
