"""Imports transformers and what it loads late, if they are there; the fork server does it once."""

from __future__ import annotations

import contextlib
import importlib

for name in (
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.encoder_decoder",
    "transformers.tokenization_utils_tokenizers",
    "transformers.convert_slow_tokenizer",
    "peft",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
