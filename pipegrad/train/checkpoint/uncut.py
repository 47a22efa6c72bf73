"""Uncut: the state dict of the uncut model, from a checkpoint of any cut, in one process.

`load` returns it, and `write_file` writes it into one file, which appears under its name when it is
whole.

[Note: tied names] A checkpoint has a tied weight once, under the name of its lowest holder. The
values of the run in ``checkpoint.json`` have the other names. `load` returns all names, and tied
names share one tensor, as in ``nn.Module.state_dict``.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as read_into

from pipegrad import run_files
from pipegrad.errors import PipegradError, WeightsError
from pipegrad.gradients.main_params import parted
from pipegrad.model.manifest import Manifest
from pipegrad.model.suspects import same_bits
from pipegrad.partition.weights.files import extra, listed
from pipegrad.train.checkpoint.storage import (
    INDEX,
    STEP,
    CheckpointReader,
    Contents,
    DamageError,
    damaged,
    failure_message,
    newest_checkpoint,
    read_contents,
    step_of,
)

Write = Callable[[Mapping[str, Tensor], Path], None]
_TIED = "tied"  # among the values of the run
_MODEL = "model."


def tied_names(manifest: Manifest) -> dict[str, str]:
    """Returns what the values of a run say of tied names; nothing if there are none.

    It is JSON: each tied parameter's name in a checkpoint -> its other names.
    """
    tied: dict[str, list[str]] = {}
    for record in manifest.parameters:
        entries = manifest.entries(record.key)
        first, *others = dict.fromkeys(name for e in entries for name in (e.name, *e.aliases))
        if others:
            tied[first] = others
    return {_TIED: json.dumps(tied)} if tied else {}


def load(checkpoint: str | Path) -> dict[str, Tensor]:
    """Returns the state dict of the uncut model, from a checkpoint that `pipegrad train` wrote.

    It has all names of the uncut model, and tied names share one tensor. So
    ``model.load_state_dict(pipegrad.load("runs/run"))`` takes it. It needs no process group and no
    GPU, verifies the checksums, and runs no code of the files.

    Args:
        checkpoint: The folder of a checkpoint, or of a run: then its newest checkpoint is taken.

    Raises:
        WeightsError: If it is no whole checkpoint, if its bytes have changed, or if a parameter is
            there in shards that ``parallel.shards`` did not declare.
    """
    folder = find_checkpoint(Path(checkpoint))
    contents = _verified(folder)
    tensors = _whole(folder, _tensors(folder, contents))
    try:
        for name, others in json.loads(contents.run.get(_TIED, "{}")).items():
            tensors |= dict.fromkeys(map(str, others), tensors[name])
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise WeightsError(f"{folder} is damaged: it does not say which names are tied") from error
    return tensors


def find_checkpoint(path: Path) -> Path:
    """Returns the folder of a checkpoint; of a run's folder, its newest one, as a resume does.

    Raises:
        WeightsError: If there is none.
    """
    try:
        if (path / INDEX).exists():
            return path
        next(path.iterdir(), None)  # raises if it is no folder
        newest = newest_checkpoint(path)
    except run_files.PlantedError as error:
        raise WeightsError(f"{error}, or give it as the checkpoint") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(
            f"{str(path)!r} cannot be read: {reason}: give the folder of a checkpoint, as "
            f"runs/run/checkpoint-100, or of a run"
        ) from error
    if newest is None:
        raise WeightsError(
            f"{path} is neither a whole checkpoint (it has no {INDEX}) nor the folder of a run "
            f"with checkpoints (it has no checkpoint-N)"
        )
    return newest


def _verified(folder: Path) -> Contents:
    """Returns what a checkpoint has, after its bytes were verified."""
    try:
        contents = read_contents(folder)
        messages = damaged(folder, contents.checksums.items())
    except DamageError as error:
        raise WeightsError(f"{folder} {error}") from error
    if messages:
        raise WeightsError(f"{folder} is damaged: {messages[0]}: export another checkpoint")
    return contents


def _tensors(folder: Path, contents: Contents) -> dict[str, Tensor]:
    """Returns parameters and buffers by their keys in the checkpoint."""
    keys = [key for key in contents.tensors if key == STEP or key.startswith(_MODEL)]
    if {STEP}.issuperset(keys):
        raise WeightsError(f"{folder} has no model: no key begins with {_MODEL!r}")
    try:
        state = {key: contents.empty(key) for key in keys}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that there is one process
            read_into(state, storage_reader=CheckpointReader(folder, contents), no_dist=True)
        step = int(state.pop(STEP, torch.tensor(-1)))
    except (Exception, CheckpointException) as error:  # or too little memory
        raise WeightsError(f"{folder} cannot be read: {failure_message(error)}") from error
    if step_of(folder) not in (None, step):
        raise WeightsError(
            f"{folder} is the checkpoint of step {step} by what it has: give the folder the name "
            f"checkpoint-{step} again"
        )
    return {key.removeprefix(_MODEL): tensor for key, tensor in state.items()}


def _whole(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors without locations; refuses those that differ from location to location."""
    whole: dict[str, Tensor] = {}
    shards: set[str] = set()
    for name, tensor in tensors.items():
        stem, _ = parted(name)
        first = whole.setdefault(stem, tensor)
        if not (torch.equal(first, tensor) or same_bits(first, tensor)):
            shards.add(stem)
    if shards:
        raise WeightsError(
            f"{folder} has shards of {listed(shards)}, as {_places(tensors, min(shards))}: a "
            f"checkpoint does not say how tensor parallelism or experts cut a parameter, so it "
            f"cannot be put together: declare it in parallel.shards of the run that writes it, or "
            f"read the keys with torch.distributed.checkpoint. If replicas train alone (handler "
            f"diloco), export a checkpoint of a step after which they have met"
        )
    return whole


def _places(names: Iterable[str], stem: str) -> str:
    return " and ".join(sorted(name for name in names if parted(name)[0] == stem)[:2])


def converted(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns a state dict with floating-point tensors of another dtype; shared ones stay so."""
    new = {id(t): t.to(dtype) if t.is_floating_point() else t for t in state.values()}
    return {name: new[id(tensor)] for name, tensor in state.items()}


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
        # No other user can enter the folder, and a library opens files in it by name.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.name}.") as folder:
            written = Path(folder) / path.name
            FORMATS[file_format](state, written)
            with written.open("rb") as file:
                os.fsync(file.fileno())
            written.replace(path)
    except PipegradError:
        raise
    except Exception as error:  # of torch or safetensors, and OSErrors
        reason = run_files.why_not_written(path.parent, error)
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
        stored = first.setdefault(id(tensor), name)
        if stored != name:
            metadata[name] = stored
    tensors = {name: state[name].contiguous() for name in first.values()}
    extra("safetensors.torch").save_file(tensors, path, metadata=metadata)


FORMATS: dict[str, Write] = {"safetensors": _write_safetensors, "torch": _write_torch}
