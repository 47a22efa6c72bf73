"""Texts in chunks of time on ranks: loss and gradients of the whole text in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import with_transformers  # noqa: F401 - a fork server imports it once
from tests.support.partition.families import FAMILIES, HEADS, ROWS, TOKENS, Family
from tests.support.partition.twins import Twins, difference

pytest.importorskip("transformers")
pytestmark = pytest.mark.ranks(2, seconds=400.0)  # the first case imports transformers

MOST = 1e-6  # losses and norms of transformers compute in float32, whatever the dtype of the model
Batch = dict[str, Tensor]


def masked(batch: Batch) -> Batch:
    """Padding on both sides."""
    return batch


def whole(batch: Batch) -> Batch:
    """No padding, and no mask."""
    return {name: x for name, x in batch.items() if name != "attention_mask"}


def packed(batch: Batch) -> Batch:
    """Two documents in a row, the second of which begins inside of a chunk."""
    positions = torch.cat([torch.arange(4), torch.arange(TOKENS - 4)])
    return whole(batch) | {"position_ids": positions.repeat(ROWS, 1)}


def square(batch: Batch) -> Batch:
    """A mask for each token and each key, by which a token sees itself and the six before it."""
    ahead = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    mask = ((ahead >= 0) & (ahead < 7)).repeat(ROWS, 1, 1, 1)
    return batch | {"attention_mask": mask}


def added(batch: Batch) -> Batch:
    """The same mask, as what is added to scores."""
    mask = square(batch)["attention_mask"]
    return batch | {"attention_mask": torch.where(mask, 0.0, -torch.inf).double()}


# Rotated positions, learnt ones, and those that a mask makes; windows.
MODELS = {n: FAMILIES[n].with_layers(4) for n in ("Llama 3.2", "GPT-2", "OPT", "Gemma3")}
MODELS["tokens"] = HEADS["Llama, tokens"]
MODELS["eager"] = replace(
    MODELS["Gemma3"], options={**MODELS["Gemma3"].options, "attn_implementation": "eager"}
)
SMALL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "pad_token_id": 0}
ROTATED = SMALL | {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
ROTATED |= {"intermediate_size": 24, "num_experts_per_tok": 1, "experts_implementation": "eager"}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
# What attention does in its own way.
MODELS["distances in scores"] = Family(
    "BloomConfig", "BloomForCausalLM", SMALL | {"n_layer": 2, "n_head": 2}
)
MODELS["chunks of its own"] = Family(
    "Llama4TextConfig",
    "Llama4ForCausalLM",
    ROTATED
    | {"head_dim": 8, "intermediate_size_mlp": 24, "num_local_experts": 2}
    | {"attention_chunk_size": 4, "no_rope_layer_interval": 2},
)
MODELS["sinks"] = Family(
    "GptOssConfig",
    "GptOssForCausalLM",
    ROTATED | {"head_dim": 8, "num_local_experts": 4, "sliding_window": 4},
)
MODELS["latent keys"] = Family(
    "DeepseekV3Config",
    "DeepseekV3ForCausalLM",
    ROTATED | LATENT | {"v_head_dim": 8, "first_k_dense_replace": 2},
)
WAYS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "chunked-1f1b"},
    "split": {"schedule": "chunked-zb-h1"},
    "recompute": {"schedule": "chunked-1f1b", "recompute": True},
    "split, recompute": {"schedule": "chunked-zb-h1", "recompute": True},
}
CHUNKS: dict[str, Any] = {"3": 3, "uneven": (5, 1, 3, 2), "single": TOKENS}
KINDS: dict[str, Callable[[Batch], Batch]] = {
    function.__name__: function for function in (masked, whole, packed, square, added)
}


def twins(family: Family, **options: Any) -> Twins:
    def prepare(cut: Any) -> None:
        stages = cut.stages
        cut.stages = lambda *args, **named: stages(*args, **named, recompute=recompute)

    recompute = options.pop("recompute", False)
    return Twins(family.build, cut={"carry": "cache"}, prepare=prepare, **options)


@pytest.mark.parametrize(
    ("model", "way", "chunks", "kind"),
    [
        ("Llama 3.2", "split", "uneven", "packed"),
        ("Llama 3.2", "split, recompute", "3", "masked"),
        ("GPT-2", "recompute", "3", "whole"),
        ("GPT-2", "1f1b", "uneven", "square"),
        ("OPT", "1f1b", "3", "masked"),
        ("Gemma3", "split", "uneven", "masked"),
        ("Gemma3", "recompute", "single", "packed"),
        ("eager", "1f1b", "uneven", "added"),
        ("tokens", "split", "uneven", "masked"),
        ("distances in scores", "1f1b", "3", "whole"),
        ("chunks of its own", "split", "uneven", "packed"),
        ("sinks", "1f1b", "uneven", "packed"),
        ("latent keys", "split", "3", "masked"),
    ],
)
def test_chunks_have_the_gradients_of_the_whole_text(
    model: str, way: str, chunks: str, kind: str
) -> None:
    family = MODELS[model]
    pair = twins(family, **WAYS[way])
    config: Any = pair.true.config
    config.use_cache = False  # else transformers hides no documents from each other
    for seed in (1, 2):
        batch: Any = KINDS[kind](family.batch(seed))
        pair.step(batch, given=batch | {"chunks": CHUNKS[chunks]})
        pair.step(batch)  # in a pipeline without chunks
        loss = pair.scheduler.evaluate(**batch, chunks=CHUNKS[chunks]).loss
        assert difference(loss, pair.true(**batch).loss) <= MOST
    errors = pair.close()
    assert max(errors, default=0.0) <= MOST, errors
