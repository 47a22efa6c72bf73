"""Models of transformers in traced parts: loss and gradients are those of the uncut model."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipegrad.partition.traced.model import TracedModel
from tests.support.pairwise import pairwise
from tests.support.partition.families import FAMILIES, ROWS, TOKENS, VOCAB, WIDTH
from tests.support.rounding import rounding
from tests.unit.partition.test_traced import Run, compare

pytest.importorskip("transformers")

# The paths of layers, and what has dropout.
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Llama 3.2": (r"model\.layers\.\d+", ("attention_dropout",)),
    "GPT-2": (r"transformer\.h\.\d+", ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    "BERT": (
        r"bert\.encoder\.layer\.\d+",
        ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
    "T5": (r"(en|de)coder\.block\.\d+", ("dropout_rate",)),
    "BART": (r"model\.(en|de)coder\.layers\.\d+", ("dropout",)),
}


def made(name: str, dtype: torch.dtype) -> tuple[Any, list[str], dict[str, Any]]:
    """Returns a model in training mode, with dropout, the paths of its layers, and a batch."""
    pattern, dropout = CASES[name]
    family = FAMILIES[name].with_layers(4)
    options = {**family.options, **dict.fromkeys(dropout, 0.1)}
    model = replace(family, options=options, dtype=dtype).build()
    layers = [path for path, _ in model.named_modules() if re.fullmatch(pattern, path)]
    more = {} if name == "BERT" else {"use_cache": False}
    return model, layers, {**family.batch(1), **more}


@pytest.mark.parametrize(
    ("name", "num_stages", "dtype"), pairwise(CASES, (2, 4), (torch.float32, torch.float64))
)
def test_loss_and_gradients_are_those_of_the_uncut_model(
    name: str, num_stages: int, dtype: torch.dtype
) -> None:
    model, layers, batch = made(name, dtype)
    boundaries = [len(layers) * stage // num_stages for stage in range(1, num_stages)]
    # An element of the embedding is the sum over the vocabulary's logits of all tokens.
    compare(
        model, batch, layers, boundaries, tolerance=rounding(ROWS * TOKENS * VOCAB, dtype=dtype)
    )


@pytest.mark.parametrize("name", CASES)
def test_evaluation_mode_has_no_dropout(name: str) -> None:
    model, layers, batch = made(name, torch.float32)
    parts = TracedModel(model, batch, layers).parts([2])
    for part in parts:
        part.module.eval()
    with torch.no_grad():
        returned = Run(parts, batch).returned
        expected = model.eval()(**batch)
    assert type(returned) is type(expected)
    assert list(returned) == list(expected)
    tolerance = rounding(WIDTH * len(layers))
    torch.testing.assert_close(returned.logits, expected.logits, rtol=0, atol=tolerance)
