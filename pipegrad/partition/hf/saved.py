"""Saved: the directory of a transformers model, written by the first rank.

The other ranks send the tensors of their stages to the first rank, one after the other. It writes
shards into a folder inside of the directory, under temporary names. Then it removes the index of an
older model, moves the shards into place, and writes the index last, because a loader reads no
shards without an index. An older model stays whole until all shards are written.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad import run_files
from pipegrad.comm.agreement import AGREE_SECONDS, agree, agree_keeping, slow_seconds
from pipegrad.errors import WeightsError
from pipegrad.model.ties import plain_name
from pipegrad.partition.hf.adapter import adapter_names, has_adapter, place_adapters
from pipegrad.partition.hf.files import INDEX, extra, listed, write_shard
from pipegrad.partition.hf.gathered import collected
from pipegrad.partition.hf.pretrained import first_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VERB = "cut.save_pretrained()"  # in messages: the method that all ranks must call
_PART = ".pipegrad-part"  # the temporary folder of unfinished files
_OLD_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_TO_NUMBER = re.compile(r".*?\.\d+\.|.*")
DEFAULT_SHARD_BYTES = 5 * 10**9


def save_stages(
    directory: str | Path,
    model: PreTrainedModel,
    stages: Mapping[int, nn.Module],
    *,
    tied: Iterable[Collection[str]] = (),
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes a directory for ``from_pretrained`` of transformers. All ranks call it; it blocks.

    A tied weight is written once. Names and layouts are as in ``save_pretrained`` of transformers.
    With adapters of peft, only the adapters are written, with the names and folders of peft's
    ``save_pretrained``. All ranks of a DTensor's mesh must hold the stage, because DTensors are
    gathered, one after the other. The first rank needs memory for a file.

    Args:
        directory: A path on the first rank, which makes the directory if it is missing, and
            replaces weights of an older model there.
        model: The uncut model, for its class, configuration and generation configuration. Its
            values are not used.
        stages: Stage -> module, for the stages of this rank, with the names of the uncut model.
        tied: Groups of names of one tensor each, as `pipegrad.find_tied` returns them.
        max_shard_bytes: Size of a file. A file may be larger, because no layer is split.

    Raises:
        WeightsError: If a file cannot be written, or a stage has no values. All ranks raise it, or
            an AgreementError that lists the errors. The older model stays.
    """
    part = Path(directory) / _PART
    writes = not dist.is_initialized() or dist.get_rank() == 0
    first = first_names(model, tied)
    moves, errors = list[Callable[[], None]](), list[Exception]()

    def prepare() -> tuple[dict[str, Tensor], list[str]]:
        if max_shard_bytes < 1:
            raise WeightsError(f"max_shard_bytes is {max_shard_bytes}, expected at least 1")
        if writes:
            _make_empty(part)
            _write_generation_config(part, model)
        needed = adapter_names(model) if has_adapter(model) else None
        states = [_state(stage, first, needed) for stage in stages.values()]
        state = {name: tensor for state in states for name, tensor in state.items()}
        return state, sorted(state)

    try:
        state, names = agree_keeping(_VERB, prepare)
        values = collected(state, frozenset[str]().union(*names) if writes else ())
        if writes:
            try:
                moves.append(_write(part, model, first, values, max_shard_bytes))
            except Exception as error:  # noqa: BLE001 - `_finish` raises it on all ranks
                errors.append(error)
        # A rank that failed to write also sends all values, because sending is a collective.
        for _ in values:
            pass
        patience = slow_seconds(torch.device("cpu"), AGREE_SECONDS)
        agree(_VERB, partial(_finish, moves, errors), timeout_seconds=patience)
    finally:
        if writes:
            shutil.rmtree(part, ignore_errors=True)


def _finish(moves: Iterable[Callable[[], None]], errors: Iterable[Exception]) -> None:
    """Moves the written files to their place."""
    for error in errors:
        raise error
    try:
        for move in moves:
            move()
    except OSError as error:
        raise WeightsError(f"{error.filename} cannot be written: {error.strerror}") from error


class _Shards:
    """Writes layers into the folder `part`, in files of about so many bytes."""

    def __init__(self, part: Path, max_bytes: int) -> None:
        self._part, self._max_bytes = part, max_bytes
        self._pending = dict[str, Tensor]()
        self.files = list[list[str]]()  # the names of each
        self.numel = self.num_bytes = 0
        self.dtype: str | None = None  # of the first floating-point tensor

    def add(self, layer: Mapping[str, Tensor]) -> None:
        held = sum(tensor.nbytes for tensor in self._pending.values())
        if held and held + sum(tensor.nbytes for tensor in layer.values()) > self._max_bytes:
            self.flush()
        for name, tensor in layer.items():
            self._pending[name] = tensor.contiguous()
            self.numel += tensor.numel()
            self.num_bytes += tensor.nbytes
            if self.dtype is None and tensor.is_floating_point():
                self.dtype = str(tensor.dtype).removeprefix("torch.")

    def flush(self) -> None:
        write_shard(self._part / f"{len(self.files)}.safetensors", self._pending)
        self.files.append([*self._pending])
        self._pending.clear()


def _write(
    part: Path,
    model: Any,  # noqa: ANN401 - a PreTrainedModel, or peft's
    first: Mapping[str, str],
    values: Iterator[tuple[str, Tensor]],
    max_shard_bytes: int,
) -> Callable[[], None]:
    """Writes the shards of a model; returns a function that moves them to their place.

    With adapters of peft, the returned function also writes them.
    """
    if has_adapter(model):
        return partial(place_adapters, part, model, first, dict(values))
    revert: Any = extra("transformers.core_model_loading").revert_weight_conversion
    shards = _Shards(part, max_shard_bytes)
    # A converter takes tensors of one layer, whose names are alike up to the first number.
    for _, layer in groupby(values, lambda named: _TO_NUMBER.match(named[0])[0]):  # type: ignore[index]
        shards.add(revert(model, {name: tensor.cpu() for name, tensor in layer}))
    shards.flush()
    return partial(_place, part, model, shards)


def _state(
    stage: nn.Module, first: Mapping[str, str], needed: Collection[str] | None
) -> dict[str, Tensor]:
    """Returns the tensors of a stage that are saved, by the first of their names.

    Raises:
        WeightsError: If a tensor has no values.
    """
    ignored = getattr(stage, "_keys_to_ignore_on_save", None) or ()
    state = {
        plain_name(name): tensor
        for name, tensor in stage.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
        and (name not in ignored if needed is None else plain_name(name) in needed)
    }
    without = [name for name, tensor in state.items() if tensor.is_meta]
    if without:
        raise WeightsError(f"{listed(without)} of a stage have no values: load or start it first")
    return {first.get(name, name): tensor for name, tensor in reversed(state.items())}


def _make_empty(part: Path) -> None:
    """Makes an empty folder for unfinished files, without the files of an earlier writer."""
    try:
        run_files.remove(part)
        part.mkdir(parents=True)
    except OSError as error:
        raise WeightsError(f"{part.parent} cannot be written: {error.strerror}") from error


def _write_generation_config(part: Path, model: Any) -> None:  # noqa: ANN401 - of any kind
    """Writes the generation configuration, first because transformers refuses some of them."""
    if has_adapter(model) or not model.can_generate():
        return
    try:
        model.generation_config.save_pretrained(part)
    except ValueError as error:
        raise WeightsError(f"the model's generation_config cannot be saved: {error}") from error


def _place(part: Path, model: Any, shards: _Shards) -> None:  # noqa: ANN401 - of any kind
    """Moves the written shards to their place, and the index last."""
    folder, number = part.parent, len(shards.files)
    files = [f"model-{i + 1:05}-of-{number:05}.safetensors" for i in range(number)]
    index = {
        "metadata": {"total_parameters": shards.numel, "total_size": shards.num_bytes},
        "weight_map": {
            name: file for names, file in zip(shards.files, files, strict=True) for name in names
        },
    }
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 makes a class
    config.dtype = shards.dtype or config.dtype
    if getattr(model, "_auto_class", None) is not None:  # its code came from a directory
        extra("transformers.dynamic_module_utils").custom_object_save(model, part, config)
    config.save_pretrained(part)
    (part / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    (folder / INDEX).unlink(missing_ok=True)
    for path in folder.iterdir():
        if _OLD_SHARD.fullmatch(path.name):
            path.unlink()
    for number, file in enumerate(files):
        (part / f"{number}.safetensors").replace(folder / file)
    files_beside = [*part.glob("*.py"), *part.glob("*.json")]
    for path in sorted(files_beside, key=lambda path: path.name == INDEX):
        path.replace(folder / path.name)
