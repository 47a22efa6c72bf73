"""Uncut: the state dict of the uncut model, from a checkpoint of any cut, in one process.

[Note: tied names] A checkpoint has a tied weight once, under the name of its lowest holder. The
values of the run in ``checksums.json`` have the other names. `load` returns all names, and tied
names share one tensor, as in ``nn.Module.state_dict``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_into

from pipegrad import run_files
from pipegrad.errors import WeightsError, in_words
from pipegrad.model.manifest import Manifest
from pipegrad.partition.weights.files import listed
from pipegrad.train.checkpoint.checksums import (
    METADATA,
    STEP,
    Checksums,
    DamageError,
    ReadError,
    damaged,
)
from pipegrad.train.checkpoint.folders import checkpoints, step_of
from pipegrad.train.checkpoint.layout import parted
from pipegrad.train.checkpoint.metadata import CheckpointReader
from pipegrad.train.checkpoint.validate import read_metadata

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
    metadata, checksums = _read(folder)
    tensors = _whole(folder, _tensors(folder, metadata))
    try:
        for name, others in json.loads(checksums.run.get(_TIED, "{}")).items():
            tensors |= dict.fromkeys(map(str, others), tensors[name])
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise WeightsError(f"{folder} is damaged: it does not say which names are tied") from error
    return tensors


def find_checkpoint(path: Path) -> Path:
    """Returns the folder of a checkpoint; of a run's folder, its newest whole one.

    Raises:
        WeightsError: If there is none.
    """
    try:
        if (path / METADATA).exists():
            return path
        next(path.iterdir(), None)  # raises if it is no folder
        whole = [folder for folder in checkpoints(path) if (folder / METADATA).exists()]
        for folder in whole[:1]:
            run_files.refuse_planted(folder)
    except run_files.PlantedError as error:
        raise WeightsError(f"{error}, or give it as the checkpoint") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(
            f"{str(path)!r} cannot be read: {reason}: give the folder of a checkpoint, as "
            f"runs/run/checkpoint-100, or of a run"
        ) from error
    if not whole:
        raise WeightsError(
            f"{path} is neither a whole checkpoint (it has no {METADATA}) nor the folder of a run "
            f"with checkpoints (it has no checkpoint-N that is whole)"
        )
    return whole[0]


def _read(folder: Path) -> tuple[Metadata, Checksums]:
    """Returns metadata and checksums, after the bytes of the model were verified."""
    try:
        metadata, checksums = read_metadata(folder)
        messages = damaged(folder, [p for p in checksums.pieces if _is_read(p.key)])
    except DamageError as error:
        raise WeightsError(f"{folder} {error}") from error
    except ReadError as error:
        raise WeightsError(str(error)) from error
    if messages:
        raise WeightsError(f"{folder} is damaged: {messages[0]}: export another checkpoint")
    return metadata, checksums


def _tensors(folder: Path, metadata: Metadata) -> dict[str, Tensor]:
    """Returns parameters and buffers by their keys in the checkpoint."""
    saved = {
        key: value
        for key, value in metadata.state_dict_metadata.items()
        if _is_read(key) and isinstance(value, TensorStorageMetadata)
    }
    if saved.keys() <= {STEP}:
        raise WeightsError(f"{folder} has no model: no key begins with {_MODEL!r}")
    try:
        state = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in saved.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that there is one process
            read_into(state, storage_reader=CheckpointReader(folder), no_dist=True)
        step = int(state.pop(STEP, torch.tensor(-1)))
    except Exception as error:  # a CheckpointException, or too little memory
        raise WeightsError(f"{folder} cannot be read: {in_words(error)}") from error
    if step_of(folder) not in (None, step):
        raise WeightsError(
            f"{folder} is the checkpoint of step {step} by what it has: give the folder the name "
            f"checkpoint-{step} again"
        )
    return {key.removeprefix(_MODEL): tensor for key, tensor in state.items()}


def _is_read(key: str) -> bool:
    return key == STEP or key.startswith(_MODEL)


def _whole(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors without locations; refuses those that differ from location to location."""
    whole: dict[str, Tensor] = {}
    shards: set[str] = set()
    for name, tensor in tensors.items():
        stem, _ = parted(name)
        if not torch.equal(whole.setdefault(stem, tensor), tensor):
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
