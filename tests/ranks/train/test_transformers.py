"""A job whose model is one of transformers trains as that model does in one process."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pipegrad.errors import ConfigError
from pipegrad.testing import run_ranks
from pipegrad.train.config import load
from pipegrad.train.data import read_corpus
from pipegrad.train.trainer import Trainer
from tests.support.rounding import ADAM_EPS, rounding
from tests.support.train.transformers_jobs import JOB, make_tokenizer, uncut, with_config

STEPS, TOKENS = 6, 8 * 16
OWNER = "gradient_handlers=[{name='pipeline-shared', placement='owner'}, 'sharded']"
CUTS = {
    1: {"alone": []},
    2: {"pipeline 2": [], "data 2": ["parallel.data=2"]},
    4: {
        "pipeline 4": [],
        "2 x 2": ["parallel.pipeline=2", "parallel.boundaries=['model.layers.1']"],
        "eager-1f1b": ["parallel.schedule=eager-1f1b", "train.loss_reduction=token_mean"],
        "interleaved, recomputed": [
            "parallel.pipeline=2",
            "parallel.schedule=interleaved-1f1b",
            "train.recompute=true",
        ],
        "zbv, 2 x 2": ["parallel.pipeline=2", "parallel.schedule=zbv"],
        "owner": ["parallel.pipeline=2", OWNER],
        "held out": ["eval.every=3", "eval.files='held_out.txt'", "eval.sample_every=6"],
        "a table": ["data={dataset='data_functions:masked'}", "train.loss_reduction='token_mean'"],
    },
}


def one_process(path: Path, masked: bool = False) -> list[tuple[float, float]]:
    """Returns loss and gradient norm of each step of the uncut model, trained by hand."""
    config = load(path)
    corpus, model = read_corpus(config), uncut(path.with_name("config.json"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=ADAM_EPS, weight_decay=0.0)
    found = []
    for step in range(1, STEPS + 1):
        tokens, target = corpus.batch(step, seed=0, size=8)
        if masked:
            ids, mask, labels = masked_batch(step)
            loss: Tensor = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        else:
            logits = model(input_ids=tokens).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found
