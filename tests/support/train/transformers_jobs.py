"""Jobs whose model is one of transformers: configurations, batches, and the uncut model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipegrad.partition.hf.pretrained import load_stages, meta_model
from tests.support import with_transformers  # noqa: F401

SEED = 3
HERE = "tests.support.train.transformers_jobs"
SIZES = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
JOB = """
[model]
config = "config.json"
[data]
batch_size = 8
sequence_length = 16
[gradients]
clip_norm = 1.0
[optimizer]
lr = 1e-2
eps = 1e-3
weight_decay = 0.0
[train]
seed = 3
device = "cpu"
steps = 6
"""


def with_config(folder: Path, **changes: object) -> Path:
    """Writes a job and the configuration of its model into a folder; returns the job."""
    (folder / "config.json").write_text(json.dumps(SIZES | changes))
    path = folder / "job.toml"
    path.write_text(JOB)
    return path


def uncut(config: Path) -> Any:
    """Returns the uncut model of a config.json, with the values that stages of it start from."""
    model = meta_model(config)
    load_stages(None, model, [model], seed=SEED)
    return model


def masked_batch(number: int) -> dict[str, Tensor]:
    """Returns a batch as a collator makes it: filled up on the right, labels of -100 there."""
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(3, 13, (8,), generator=generator)
    ids = torch.randint(1, 256, (8, int(lengths.max())), generator=generator)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    ids = ids * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


def masked(*, data_rank: int, num_data_ranks: int) -> Iterator[dict[str, Tensor]]:
    for number in range(1, 100):
        batch = masked_batch(number)
        yield {name: x.chunk(num_data_ranks)[data_rank] for name, x in batch.items()}


def unknown_name() -> list[dict[str, Tensor]]:
    batch = masked_batch(1)
    return [{**batch, "length": batch["attention_mask"].sum(1)}]


def too_long() -> list[Tensor]:
    return [torch.ones(8, 41, dtype=torch.long)]


def without_tokens() -> list[dict[str, Tensor]]:
    batch = masked_batch(1)
    return [{"attention_mask": batch["attention_mask"], "labels": batch["labels"]}]


def make_tokenizer(file: Path, vocabulary: int = 256) -> None:
    """Writes a tokenizer of single characters."""
    import tokenizers

    words = {chr(32 + number): number for number in range(vocabulary)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="!"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(file))
