"""Export: writes a state dict into one file, which appears under its name when it is whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from pipegrad import run_files
from pipegrad.errors import PipegradError, WeightsError
from pipegrad.partition.weights.files import extra
from pipegrad.train.checkpoint.writer.space import why_not_written

Write = Callable[[Mapping[str, Tensor], Path], None]


def converted(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns a state dict with floating-point tensors of another dtype; shared ones stay so."""
    own = {id(t): t.to(dtype) if t.is_floating_point() else t for t in state.values()}
    return {name: own[id(tensor)] for name, tensor in state.items()}


def write_file(state: Mapping[str, Tensor], path: Path, file_format: str) -> None:
    """Writes a state dict into a new file.

    Args:
        state: Tied names share one tensor.
        path: Of the file. Nothing may be there.
        file_format: A key of `FORMATS`.

    Raises:
        WeightsError: If the file is there already, or cannot be written.
        ConfigError: If a library is missing.
    """
    try:
        if os.path.lexists(path):
            raise WeightsError(f"{path} is there already: name another file, or remove it")
        if not path.parent.is_dir():
            raise WeightsError(f"{path} cannot be written: there is no folder {path.parent}")
        with run_files.private_folder(path) as folder:
            FORMATS[file_format](state, folder / path.name)
            run_files.publish(folder / path.name, path)
    except PipegradError:
        raise
    except Exception as error:  # of torch or safetensors, and OSErrors
        reason = why_not_written(path.parent, error)
        raise WeightsError(f"{str(path)!r} cannot be written: {reason}") from error


def _write_torch(state: Mapping[str, Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(dict(state), file)


def _write_safetensors(state: Mapping[str, Tensor], path: Path) -> None:
    """Writes a shared tensor once, under its first name; the metadata has its other names."""
    # The file cannot share memory. `load_model` of safetensors, and transformers, know that a model
    # ties names. The metadata is that of safetensors' own `save_model`.
    first: dict[int, str] = {}
    metadata = {"format": "pt"}  # transformers refuses files without it
    for name, tensor in state.items():
        kept = first.setdefault(id(tensor), name)
        if kept != name:
            metadata[name] = kept
    tensors = {name: state[name].contiguous() for name in first.values()}
    extra("safetensors.torch").save_file(tensors, path, metadata=metadata)


FORMATS: dict[str, Write] = {"safetensors": _write_safetensors, "torch": _write_torch}
