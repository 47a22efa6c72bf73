"""Exporting: the state dict of the uncut model, from a checkpoint of any layout, in one process.

[Note: tied names] A checkpoint has a tied weight once, under the name of its lowest holder, and the
index has the other names. `load` returns all names, and tied names share one tensor, as in
``nn.Module.state_dict``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from pipegrad import run_files
from pipegrad.checkpoint.files import Files, write
from pipegrad.checkpoint.folders import find_checkpoint
from pipegrad.errors import CheckpointError, PipegradError
from pipegrad.gradients.main_params import parted
from pipegrad.model.suspects import same_bits

_MODEL = "model."


def load(checkpoint: str | Path) -> dict[str, Tensor]:
    """Returns the state dict of the uncut model, from a checkpoint of pipegrad.

    For example, ``model.load_state_dict(pipegrad.load("runs/run"))``. It has all names of the uncut
    model, and tied names share one tensor. It needs no process group and no GPU, verifies the
    checksums, and runs no code of the files.

    Args:
        checkpoint: The folder of a checkpoint, or of a run: then its newest checkpoint is taken.

    Raises:
        CheckpointError: If it is no whole checkpoint, if its bytes have changed, or if a parameter
            was saved in pieces without the `shards` of `State`.
    """
    folder = find_checkpoint(Path(checkpoint))
    try:
        files = Files(folder)
        files.verify()
        return _whole(files)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} {error}") from error


def export(
    checkpoint: str | Path,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Writes the state dict of the uncut model into a new safetensors file; returns it.

    For example, ``export("runs/run", "model.safetensors", dtype=torch.bfloat16)``. A file of torch
    is ``torch.save(load("runs/run"), "model.pt")``.

    Args:
        checkpoint: The folder of a checkpoint or of a run; see `load`.
        path: The new file, which ends in ``.safetensors``. Nothing may be there.
        dtype: The dtype of floating-point tensors; by default each keeps its own.

    Raises:
        CheckpointError: If `load` raises it, or the file is there already or cannot be written.
    """
    state = load(checkpoint)
    if dtype is not None:  # tied names still share a tensor
        new = {id(t): t.to(dtype) if t.is_floating_point() else t for t in state.values()}
        state = {name: new[id(tensor)] for name, tensor in state.items()}
    path = Path(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path}: expected a name that ends in .safetensors; for a file of torch: "
            f"torch.save(pipegrad.load({str(checkpoint)!r}), {path.name!r})"
        )
    try:
        if os.path.lexists(path):
            raise CheckpointError(f"{path} is there already: name another file, or remove it")
        if not path.parent.is_dir():
            raise CheckpointError(f"{path} cannot be written: there is no folder {path.parent}")
        # A file of this name is whole, also if this process is killed. Other users cannot enter the
        # folder.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.name}.") as folder:
            written = Path(folder) / path.name
            _write_safetensors(state, written)
            written.replace(path)
    except PipegradError:
        raise
    except Exception as error:
        why = run_files.why_not_written(error)
        raise CheckpointError(f"{str(path)!r} cannot be written: {why}") from error
    return state


def _whole(files: Files) -> dict[str, Tensor]:
    """Returns tensors by name; refuses those that differ from location to location."""
    whole: dict[str, Tensor] = {}
    places: dict[str, list[str]] = {}
    for key in files.index.tensors:
        if key.startswith(_MODEL):
            name, _ = parted(key.removeprefix(_MODEL))
            tensor = files.whole(key)
            places.setdefault(name, []).append(key.removeprefix(_MODEL))
            if not same_bits(whole.setdefault(name, tensor), tensor):
                raise CheckpointError(
                    f"has shards of {name}, as {' and '.join(sorted(places[name])[:2])}: a "
                    f"checkpoint does not say how tensor parallelism or experts cut a parameter, "
                    f"so it cannot be put together: declare it in the shards of State, or in "
                    f"parallel.shards, of the run that writes it. If replicas train alone (handler "
                    f"diloco), export a checkpoint of a step after which they have met"
                )
    for name, others in files.index.tied.items():
        whole |= dict.fromkeys(others, whole[name])
    return whole


def _write_safetensors(state: Mapping[str, Tensor], path: Path) -> None:
    """Writes a shared tensor once, under its first name; the metadata has its other names."""
    # Write a shared tensor once, because tensors of a file cannot share memory. `load_model` of
    # safetensors, and transformers, see in the model that names are tied. safetensors' own
    # `save_model` writes the same metadata.
    first: dict[int, str] = {}
    metadata = {"format": "pt"}  # transformers refuses files without it
    for name, tensor in state.items():
        stored = first.setdefault(id(tensor), name)
        if stored != name:
            metadata[name] = stored
    write(path, {name: state[name] for name in first.values()}, metadata)
