"""Adapter: the parameters that peft adds to a model, saved alone. Only this file knows peft."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pipegrad.errors import WeightsError
from pipegrad.partition.weights.files import extra, write_shard

_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # PeftModel.from_pretrained expects it


def has_adapter(model: Any) -> bool:  # noqa: ANN401 - of any kind
    """Whether peft has added parameters: to peft's own model, or to the model inside of it."""
    return getattr(model, "peft_config", None) is not None


def adapter_state(stage: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """Returns the tensors of the adapter, by the names that peft saves them with.

    Args:
        stage: A stage of a model that has an adapter.
        state: All tensors of the stage, by name.

    Raises:
        WeightsError: If the model has several adapters.
    """
    names = list(stage.peft_config)
    if len(names) != 1:
        raise WeightsError(f"the model has adapters {sorted(names)}; expected one to save")
    state = extra("peft").get_peft_model_state_dict(
        stage, state, adapter_name=names[0], save_embedding_layers=False
    )
    return {_PREFIX + name.removeprefix(_PREFIX): tensor for name, tensor in state.items()}


def place_adapter(part: Path, model: Any, shards: Sequence[Path]) -> None:  # noqa: ANN401
    """Puts the adapter into one file, because peft reads no index, and moves it to its place.

    Args:
        part: The folder of what is being written, inside of the directory.
        model: The uncut model, for the configuration of its adapter.
        shards: What the ranks have written.
    """
    tensors = dict[str, torch.Tensor]()
    for path in shards:
        tensors |= extra("safetensors.torch").load_file(path)
    config = copy.copy(next(iter(model.peft_config.values())))
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config.inference_mode = True  # as peft saves it; whoever trains it further says so
    if config.task_type is None:  # then peft looks here for the class of the base
        kind = type(base)
        config.auto_mapping = {
            "base_model_class": kind.__name__.removeprefix("FSDP"),
            "parent_library": kind.__module__,
        }
    config.base_model_name_or_path = config.base_model_name_or_path or base.name_or_path
    config.save_pretrained(part)
    write_shard(part / _FILE, tensors)
    for file in (_FILE, "adapter_config.json"):
        (part / file).replace(part.parent / file)
