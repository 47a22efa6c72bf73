"""Imports transformers, if it is there; the fork server does it once for all ranks."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
