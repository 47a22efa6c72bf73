"""Checkpoints by torch.distributed.checkpoint, by the names of the uncut model: any cut reads any.

A checkpoint holds parameters, buffers, optimizer state and the step. Everything else comes from the
configuration of the run that reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pipegrad.gradients.sync import GradientSync
from pipegrad.train.config import Config

STEP = "step"


class State:
    """What a rank contributes to a checkpoint, and takes from one.

    Args:
        sync: Knows the parameters, and under which name each is known to all ranks.
        modules: This rank's stages.
        optimizer: Of this rank's parameters; None without any.
    """

    def __init__(
        self,
        sync: GradientSync,
        modules: dict[int, torch.nn.Module],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._optimizer = optimizer
        # A key is "stage.name" at the lowest stage that holds it, and names are the uncut model's.
        self._parameters = {
            record.key.partition(".")[2]: sync.parameter(record) for record in sync.records()
        }
        self._modules = modules
        self._own = {
            name for m in modules.values() for name, _ in m.named_parameters(remove_duplicate=False)
        }

    def tensors(self) -> dict[str, Tensor]:
        """Returns parameters and buffers by their keys in a checkpoint."""
        buffers = {
            name: found
            for module in self._modules.values()
            for name, found in module.state_dict().items()
            if name not in self._own and isinstance(found, Tensor)
        }
        named = {**self._parameters, **buffers}
        return {f"model.{name}": tensor.detach() for name, tensor in named.items()}

    def save(self, folder: Path, step: int) -> None:
        """Writes a checkpoint; every rank must call it. It is whole once it has ``.metadata``."""
        state: dict[str, Any] = {STEP: torch.tensor(step), **self.tensors()}
        for name, parameter in self._parameters.items():
            # get: asking a frozen parameter's state would make it one.
            kept = self._optimizer.state.get(parameter, {}) if self._optimizer else {}
            for key, value in kept.items():
                state[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
        save(state, checkpoint_id=folder)

    def check(self, config: Config, kept: set[str]) -> Metadata:
        """Returns what the checkpoint ``train.resume`` holds. Local.

        Args:
            config: The configuration.
            kept: What the optimizer keeps of a matrix.

        Raises:
            ConfigError: If it cannot be read, or is of another model or optimizer.
        """
        folder = Path(config.train.resume or "")
        try:
            metadata = FileSystemReader(folder).read_metadata()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the file
            config.refuse(
                "train.resume", "is not a whole checkpoint: it has no .metadata", cause=error
            )
        for key, tensor in self.tensors().items():
            found = metadata.state_dict_metadata.get(key)
            shape = tuple(found.size) if isinstance(found, TensorStorageMetadata) else "none"
            if shape != tuple(tensor.shape):
                config.refuse(
                    "train.resume",
                    f"it is of another model: {key.partition('.')[2]!r} is {tuple(tensor.shape)} "
                    f"here and {shape} there",
                )
        kept_there: dict[str, set[str]] = {}
        for key in metadata.state_dict_metadata:
            owner = self._owner(key)
            if owner is not None:
                kept_there.setdefault(owner, set()).add(key.rpartition(".")[2])
        for name, there in kept_there.items():
            parameter = self._parameters[name]
            if parameter.ndim == 2 and parameter.requires_grad and there != kept:
                config.refuse(
                    "optimizer",
                    f"it keeps {sorted(kept)} of {name!r}, but the optimizer of the checkpoint "
                    f"kept {sorted(there)}: choose the same",
                )
        return metadata

    def load(self, folder: Path, metadata: Metadata) -> int:
        """Reads a checkpoint into parameters, buffers and optimizer; returns its step.

        Every rank must call it, and make replicas equal then.
        """
        held = self.tensors()
        # Into memory of its own: a buffer may be a constant, expanded.
        state = {STEP: torch.tensor(0), **{key: held[key].contiguous().clone() for key in held}}
        for key, found in metadata.state_dict_metadata.items():
            if isinstance(found, TensorStorageMetadata) and self._owner(key) is not None:
                state[key] = torch.empty(found.size, dtype=found.properties.dtype)
        load(state, checkpoint_id=folder)
        for key, tensor in held.items():
            if not torch.equal(tensor, state[key]):
                tensor.copy_(state[key])
        if self._optimizer is not None:
            self._restore(self._optimizer, state)
        return int(state[STEP])

    def _owner(self, key: str) -> str | None:
        """Returns the parameter whose optimizer state a key is, if it is one of this rank's."""
        kind, _, path = key.partition(".")
        name = path.rpartition(".")[0]
        return name if kind == "optimizer" and name in self._parameters else None

    def _restore(self, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
        """Gives the optimizer its state by way of its own format, which places and casts it."""
        told = optimizer.state_dict()
        ordered = [p for group in optimizer.param_groups for p in group["params"]]
        index = {id(parameter): i for i, parameter in enumerate(ordered)}
        told["state"] = {}
        for key, value in state.items():
            name = self._owner(key)
            place = index.get(id(self._parameters[name])) if name is not None else None
            if place is not None:  # none is that of a parameter that is no longer trained
                told["state"].setdefault(place, {})[key.rpartition(".")[2]] = value
        optimizer.load_state_dict(told)
