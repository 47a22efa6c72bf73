"""Saved: the directory of a transformers model, written by the ranks that hold its stages.

[Note: a directory is whole or is not there] Each rank writes its shards into a folder inside of the
directory, under temporary names. When all ranks have written, the first rank removes the index of
an older model, moves the shards into place, and writes the index last. Without an index nobody
takes shards for a model. An older model stays whole until all ranks have written.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from pipegrad import run_files
from pipegrad.comm.agreement import AGREE_SECONDS, agree, agree_keeping, slow_seconds
from pipegrad.errors import WeightsError
from pipegrad.model.dtensor import is_dtensor
from pipegrad.model.ties import plain_name
from pipegrad.partition.weights.adapter import adapter_sources, has_adapter, place_adapters
from pipegrad.partition.weights.files import INDEX, extra, listed, write_shard
from pipegrad.partition.weights.pretrained import first_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VERB = "cut.save_pretrained()"  # in messages: what all ranks must call
_PART = ".pipegrad-part"  # the folder of what is being written
_OLD_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
# A layer: the name up to its first number. A converter of transformers takes tensors of one layer.
_LAYER = re.compile(r"(.*?\.\d+)\.")
DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class _Shard:
    """A file that a rank has written.

    Attributes:
        stage: Whose tensors it has.
        number: Among the files of its stage.
        names: Of its tensors.
        num_bytes: Of its tensors.
        numel: Of its tensors.
        dtype: Of its first floating-point tensor, for example "bfloat16"; None if it has none.
    """

    stage: int
    number: int
    names: tuple[str, ...]
    num_bytes: int
    numel: int
    dtype: str | None

    @property
    def file(self) -> str:
        """Its temporary name."""
        return f"{self.stage}-{self.number}.safetensors"


def save_stages(
    directory: str | Path,
    model: PreTrainedModel,
    stages: Mapping[int, nn.Module],
    *,
    tied: Iterable[Collection[str]] = (),
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes what ``from_pretrained`` of transformers reads. All ranks call it; it blocks.

    A stage that several ranks hold is written by the first of them. A tied weight is written once.
    Names and layouts are those that ``save_pretrained`` of transformers writes. With adapters of
    peft, only these are written, with the names and folders of peft's ``save_pretrained``. DTensors
    are gathered, one after the other, so all ranks of their mesh must hold the stage.

    Args:
        directory: All ranks must see it. It is made if it is missing. Weights of an older model
            there are replaced.
        model: The uncut model, for its class, configuration and generation configuration. Its
            values are not used.
        stages: Stage -> module, for the stages of this rank, with the names of the uncut model.
        tied: Names of one tensor each, as `pipegrad.find_tied` returns them.
        max_shard_bytes: Size of a file. A layer is not split, so a file may be larger.

    Raises:
        WeightsError: If a file cannot be written, or a stage has no values. All ranks raise it, or
            an AgreementError that lists the errors. The older model stays.
    """
    part = Path(directory) / _PART
    patience = slow_seconds(_device_of(stages), AGREE_SECONDS)
    rank = dist.get_rank() if dist.is_initialized() else 0
    first = first_names(model, tied)
    # Of the uncut model; see [Note: what peft saves].
    needed = adapter_sources(model).names if has_adapter(model) else None

    def prepare() -> tuple[dict[int, dict[str, torch.Tensor]], dict[int, list[str]]]:
        if max_shard_bytes < 1:
            raise WeightsError(f"max_shard_bytes is {max_shard_bytes}, expected at least 1")
        if rank == 0:
            _make_empty(part)
            _write_generation_config(part, model)
        states = {index: _state(stage, first, needed) for index, stage in sorted(stages.items())}
        return states, {index: sorted(state) for index, state in states.items()}

    try:
        states, names = agree_keeping(_VERB, prepare, timeout_seconds=patience)
        write = partial(_write_stages, part, model, states, names, max_shard_bytes)
        written = agree(_VERB, write, timeout_seconds=patience)
        shards = sorted(chain(*written), key=lambda shard: (shard.stage, shard.number))
        finish = partial(_place, part, model, first, shards) if rank == 0 else _nothing
        agree(_VERB, finish, timeout_seconds=patience)
    finally:
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)


def _write_stages(
    part: Path,
    model: Any,  # noqa: ANN401 - a PreTrainedModel
    states: Mapping[int, Mapping[str, torch.Tensor]],
    names_of: Sequence[Mapping[int, Sequence[str]]],
    max_shard_bytes: int,
) -> list[_Shard]:
    """Writes into the folder `part` what this rank has to write, and returns its files.

    Args:
        part: The folder.
        model: The uncut model.
        states: The tensors of each stage of this rank.
        names_of: For each rank, the names of each stage. A tied tensor has one name.
        max_shard_bytes: As `save_stages`.
    """
    # The first stage that holds a tensor, and the first rank of that stage, write it.
    writers = {
        name: (stage, rank)
        for stage, rank in sorted(
            ((stage, rank) for rank, by_stage in enumerate(names_of) for stage in by_stage),
            reverse=True,  # the first ones last, so they stay
        )
        for name in names_of[rank][stage]
    }
    own_rank = dist.get_rank() if dist.is_initialized() else 0
    shards, failure = list[_Shard](), None
    for stage, state in states.items():
        names = [name for name in names_of[own_rank][stage] if writers[name][0] == stage]
        layers = _gathered_layers(state, names)
        try:
            if names and writers[names[0]][1] == own_rank:
                shards += _write_stage(part, model, stage, layers, max_shard_bytes)
        except Exception as error:  # noqa: BLE001 - it is raised below
            failure = failure or error
        # Gathering is a collective of all ranks that hold the stage. So a rank that writes nothing,
        # or could not write, goes through all layers, and fails when all are done.
        for _ in layers:
            pass
    if failure is not None:
        raise failure
    return shards


def _gathered_layers(
    state: Mapping[str, torch.Tensor], names: Iterable[str]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the tensors of each layer, in the order of the model. All ranks of a mesh call it."""
    by_layer = defaultdict[str, list[str]](list)
    for name in names:
        layer = _LAYER.match(name)
        by_layer[layer[1] if layer else name].append(name)
    order: Any = extra("transformers.core_model_loading").dot_natural_key
    for layer_name in sorted(by_layer, key=order):
        tensors = {name: state[name] for name in by_layer[layer_name]}
        yield {n: t.full_tensor() if is_dtensor(t) else t for n, t in tensors.items()}


def _write_stage(
    part: Path,
    model: Any,  # noqa: ANN401 - a PreTrainedModel
    stage: int,
    layers: Iterable[Mapping[str, torch.Tensor]],
    max_shard_bytes: int,
) -> list[_Shard]:
    """Writes the layers of a stage into the folder `part`, and returns its files."""
    shards, pending = list[_Shard](), dict[str, torch.Tensor]()

    def write() -> None:
        floats = (t.dtype for t in pending.values() if t.is_floating_point())
        shard = _Shard(
            stage=stage,
            number=len(shards),
            names=tuple(pending),
            num_bytes=_num_bytes(pending),
            numel=sum(tensor.numel() for tensor in pending.values()),
            dtype=next((str(dtype).removeprefix("torch.") for dtype in floats), None),
        )
        write_shard(part / shard.file, pending)
        shards.append(shard)
        pending.clear()

    for layer in layers:
        tensors = {name: t.detach().cpu().contiguous() for name, t in layer.items()}
        if not has_adapter(model):
            loading: Any = extra("transformers.core_model_loading")
            tensors = loading.revert_weight_conversion(model, tensors)
        if pending and _num_bytes(pending) + _num_bytes(tensors) > max_shard_bytes:
            write()
        pending |= {name: tensor.contiguous() for name, tensor in tensors.items()}
    if pending:
        write()
    return shards


def _nothing() -> None:
    """What ranks do that only wait for another rank."""


def _device_of(stages: Mapping[int, nn.Module]) -> torch.device:
    tensors = (parameter for stage in stages.values() for parameter in stage.parameters())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _state(
    stage: nn.Module, first: Mapping[str, str], needed: Collection[str] | None
) -> dict[str, torch.Tensor]:
    """Returns the tensors of a stage that are saved, by the first of their names.

    Args:
        stage: A stage.
        first: For each name the one name of its tensor.
        needed: Names of an adapter's tensors; None if all are saved.

    Raises:
        WeightsError: If a tensor has no values.
    """
    ignored = getattr(stage, "_keys_to_ignore_on_save", None) or ()
    state = {
        plain_name(name): tensor
        for name, tensor in stage.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
        and (name not in ignored if needed is None else plain_name(name) in needed)
    }
    without = [name for name, tensor in state.items() if tensor.is_meta]
    if without:
        raise WeightsError(f"{listed(without)} of a stage have no values: load or start it first")
    return {first.get(name, name): tensor for name, tensor in reversed(state.items())}


def _num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _make_empty(part: Path) -> None:
    """Makes the folder for what is being written; what a writer that ended left there goes."""
    try:
        run_files.remove(part)
        part.mkdir(parents=True)
    except OSError as error:
        raise WeightsError(f"{part.parent} cannot be written: {error.strerror}") from error


def _write_generation_config(part: Path, model: Any) -> None:  # noqa: ANN401 - of any kind
    """Writes it first: transformers refuses some of them, before anything else was written."""
    if has_adapter(model) or not model.can_generate():
        return
    try:
        model.generation_config.save_pretrained(part)
    except ValueError as error:
        raise WeightsError(f"the model's generation_config cannot be saved: {error}") from error


def _place(
    part: Path,
    model: Any,  # noqa: ANN401 - of any kind
    first: Mapping[str, str],
    shards: Sequence[_Shard],
) -> None:
    """Moves what was written to its place. See [Note: a directory is whole or is not there]."""
    missing = [shard.file for shard in shards if not (part / shard.file).exists()]
    if missing:
        raise WeightsError(
            f"{part} lacks {listed(missing)}, which other ranks wrote: all ranks must see the same "
            f"directory"
        )
    try:
        if has_adapter(model):
            place_adapters(part, model, first, [part / shard.file for shard in shards])
        else:
            _place_model(part, model, shards)
    except OSError as error:
        raise WeightsError(f"{error.filename} cannot be written: {error.strerror}") from error


def _place_model(part: Path, model: Any, shards: Sequence[_Shard]) -> None:  # noqa: ANN401
    folder = part.parent
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    index = {
        "metadata": {
            "total_parameters": sum(shard.numel for shard in shards),
            "total_size": sum(shard.num_bytes for shard in shards),
        },
        "weight_map": {
            name: file for shard, file in zip(shards, files, strict=True) for name in shard.names
        },
    }
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 makes a class
    config.dtype = next((shard.dtype for shard in shards if shard.dtype), config.dtype)
    if getattr(model, "_auto_class", None) is not None:  # of code that a directory had
        extra("transformers.dynamic_module_utils").custom_object_save(model, part, config)
    config.save_pretrained(part)
    (part / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    (folder / INDEX).unlink(missing_ok=True)
    for path in folder.iterdir():
        if _OLD_SHARD.fullmatch(path.name):
            path.unlink()
    for shard, file in zip(shards, files, strict=True):
        (part / shard.file).replace(folder / file)
    files_beside = [*part.glob("*.py"), *part.glob("*.json")]
    for path in sorted(files_beside, key=lambda path: path.name == INDEX):
        path.replace(folder / path.name)
