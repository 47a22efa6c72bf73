"""Checkpoints by torch.distributed.checkpoint, by the names of the uncut model: any cut reads any.

A checkpoint holds parameters, buffers, optimizer state, the step, and what handlers keep on each
rank, which only the same plan goes on from. Everything else comes from the configuration of the run
that reads it. What the optimizer keeps of each element of a parameter is
written flat, by each rank what it steps, and read by each rank what it steps.

What lives apart along a dimension of the mesh, as tensor-parallel shards and experts do, carries
its place there: ``name[tp=1]``. A run reads it with the same sizes only.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pipegrad.comm.agreement import agree
from pipegrad.errors import PlanError, in_words
from pipegrad.gradients.sync import GradientSync
from pipegrad.optimizer.main_params import MainParameter
from pipegrad.train.checkpoint.checksums import (
    METADATA,
    CheckedWriter,
    Checksums,
    DamageError,
    damaged,
    read_checksums,
)
from pipegrad.train.checkpoint.chunks import Row
from pipegrad.train.checkpoint.layout import Places, check_places
from pipegrad.train.config import Config, path_of

STEP = "step"
_NAMES_SHOWN = 4  # of the names that a model or a checkpoint lacks
_KEPT = "kept."  # and the rank
_PACK_SECONDS = 600.0  # for the slowest rank to write down its error feedback


class State:
    """What a rank contributes to a checkpoint, and takes from one.

    Args:
        sync: Knows the parameters, and under which name each is known to all ranks.
        modules: This rank's stages.
        optimizer: Made of ``sync.optimizer_parameters()``.

    Raises:
        PlanError: If rows of a parameter that does not lie in memory as it is written are sharded.
    """

    def __init__(
        self,
        sync: GradientSync,
        modules: dict[int, torch.nn.Module],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._optimizer = optimizer
        self._sync = sync
        self._kept: tuple[Tensor, bool] | None = None  # as packed, and whether it is this rank's
        self.kept: dict[str, Any] = {}
        # A key is "stage.name" at the lowest stage that holds it, and names are the uncut model's.
        locations = Places(sync.topology, sync.plan)
        self._place_of_buffers = locations.of()
        names = {r.key: r.key.partition(".")[2] + locations.of(r.key) for r in sync.records()}
        self._parameters = {names[record.key]: sync.parameter(record) for record in sync.records()}
        self._main_parameters = {names[one.record.key]: one for one in sync.main_parameters()}
        self._modules = modules
        self._own = {
            name for m in modules.values() for name, _ in m.named_parameters(remove_duplicate=False)
        }
        for name, one in self._main_parameters.items():
            if one.sharded and not self._parameters[name].is_contiguous():
                raise PlanError(
                    f"{name!r} is sharded and not contiguous, so its rows fit into no other cut's "
                    f"checkpoint: make it .contiguous()"
                )

    def tensors(self) -> dict[str, Tensor]:
        """Returns parameters and buffers by their keys in a checkpoint; wait for them before."""
        buffers = {
            name + self._place_of_buffers: found
            for module in self._modules.values()
            for name, found in module.state_dict().items()
            if name not in self._own and isinstance(found, Tensor)
        }
        named = {**self._parameters, **buffers}
        return {f"model.{name}": tensor.detach() for name, tensor in named.items()}

    def keys(self) -> list[str]:
        """Returns the keys of `tensors`."""
        return list(self.tensors())

    def save(self, folder: Path, step: int, run: Mapping[str, str]) -> None:
        """Writes a checkpoint; every rank must call it. It is whole once it has ``.metadata``.

        Args:
            folder: Where to.
            step: How many steps have been made.
            run: What the run is made of, for whoever goes on from it.

        Raises:
            CheckpointException: If a rank cannot write; on all ranks.
            PlanError: If what a handler keeps could not be read again; on all ranks, and nothing
                is written.
        """
        self._sync.wait_parameters()
        kept: dict[str, Tensor] = {}
        told = "what handlers keep"
        agree(told, lambda: kept.update(self._pack()), timeout_seconds=_PACK_SECONDS)
        state: dict[str, Any] = {STEP: torch.tensor(step), **self.tensors()}
        for name, one in self._main_parameters.items():
            if one.copied:
                state[f"stored.{name}"] = _row(one, one.tensor)
            for key, value in self._optimizer.state.get(one.tensor, {}).items():
                found = torch.as_tensor(value)
                each = found.shape == one.tensor.shape
                state[f"optimizer.{name}.{key}"] = _row(one, found) if each else found
        save({**state, **kept}, storage_writer=CheckedWriter(folder, run))

    def _pack(self) -> dict[str, Tensor]:
        """Returns what this rank's handlers keep by its key, or nothing."""
        kept = self._sync.state_dict()
        return {_own_key(): _packed(kept)} if kept else {}

    def check(
        self, config: Config, kept: set[str], held: set[str]
    ) -> tuple[Metadata, Checksums | None]:
        """Returns what the checkpoint ``train.resume`` holds, and its checksums. Local.

        Args:
            config: The configuration.
            kept: What the optimizer keeps of a matrix.
            held: The `keys` of all ranks.

        Raises:
            ConfigError: If it cannot be read, or is of another model or optimizer.
        """
        folder = path_of(config.train.resume or "")
        metadata, checksums = _read(config, folder)
        check_places(config, set(metadata.state_dict_metadata), held)
        _check_names(config, set(metadata.state_dict_metadata), held)
        for key, tensor in self.tensors().items():
            found = metadata.state_dict_metadata[key]
            shape = tuple(found.size) if isinstance(found, TensorStorageMetadata) else "none"
            if shape != tuple(tensor.shape):
                config.refuse(
                    "train.resume",
                    f"it is of another model: {key.partition('.')[2]!r} is {tuple(tensor.shape)} "
                    f"here and {shape} there",
                )
        kept_there: dict[str, set[str]] = {}
        for key in metadata.state_dict_metadata:
            owner = self._owner(key) if key.startswith("optimizer.") else None
            if owner is not None:
                kept_there.setdefault(owner, set()).add(key.rpartition(".")[2])
        self._check_rows(config, metadata)
        for name, there in kept_there.items():
            parameter = self._parameters[name]
            if parameter.ndim == 2 and parameter.requires_grad and there != kept:
                config.refuse(
                    "optimizer",
                    f"it keeps {sorted(kept)} of {name!r}, but the optimizer of the checkpoint "
                    f"kept {sorted(there)}: choose the same",
                )
        return metadata, checksums

    def _check_rows(self, config: Config, metadata: Metadata) -> None:
        """Refuses optimizer state of a shape that no rows can be taken of."""
        for key, found in metadata.state_dict_metadata.items():
            name = self._owner(key)
            if name not in self._main_parameters or not isinstance(found, TensorStorageMetadata):
                continue
            one = self._main_parameters[name]
            if one.sharded and tuple(found.size) not in ((), (one.record.numel,)):
                config.refuse(
                    "train.resume",
                    f"its {key!r} is {tuple(found.size)}, expected ({one.record.numel},): state of "
                    f"an optimizer that cannot be sharded, or of an older version",
                )

    def load(self, folder: Path, metadata: Metadata) -> int:
        """Reads a checkpoint into parameters, buffers and optimizer; returns its step.

        Every rank must call it. Replicas are equal afterwards.
        """
        self._sync.wait_parameters()
        held = self.tensors()
        # Into memory of its own: a buffer may be a constant, expanded.
        state = {STEP: torch.tensor(0), **{key: held[key].contiguous().clone() for key in held}}
        for key, found in metadata.state_dict_metadata.items():
            name = self._owner(key)
            if isinstance(found, TensorStorageMetadata) and name in self._main_parameters:
                one, dtype = self._main_parameters[name], found.properties.dtype
                each = tuple(found.size) == (one.record.numel,)
                made = torch.empty_like(one.tensor, dtype=dtype, device="cpu").detach()
                state[key] = _row(one, made) if each else torch.empty(found.size, dtype=dtype)
        kept = _kept_key(metadata)
        if kept is not None:
            state[kept] = _place_of(kept, metadata)
        load(state, checkpoint_id=folder)
        self._kept = (state[kept], kept == _own_key()) if kept else None
        for key, tensor in held.items():
            if not torch.equal(tensor, state[key]):
                tensor.copy_(state[key])
        self._sync.synchronize_parameters()
        for name, one in self._main_parameters.items():
            stored = state.get(f"stored.{name}")
            if one.copied and isinstance(stored, Row):
                one.tensor.detach().copy_(stored.local.view_as(one.tensor))
        self._restore(self._optimizer, state)
        return int(state[STEP])

    def unpack_kept(self) -> str:
        """Reads what the checkpoint kept of handlers, as `kept`; returns why it cannot, or ""."""
        packed, self._kept = self._kept, None
        try:
            self.kept = _unpacked(packed[0], mine=packed[1]) if packed else {}
        except PlanError as error:
            return str(error)
        return ""

    def _owner(self, key: str) -> str | None:
        """Returns the parameter that a key is the optimizer's state of, if this rank holds it."""
        kind, _, path = key.partition(".")
        name = path.rpartition(".")[0] if kind == "optimizer" else path
        return name if kind in ("optimizer", "stored") and name in self._parameters else None

    def _restore(self, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
        """Gives the optimizer its state by way of its own format, which places and casts it."""
        told = optimizer.state_dict()
        ordered = [p for group in optimizer.param_groups for p in group["params"]]
        index = {id(parameter): i for i, parameter in enumerate(ordered)}
        told["state"] = {}
        for key, value in state.items():
            name = self._owner(key)
            if key.startswith("optimizer.") and name in self._main_parameters:
                tensor = self._main_parameters[name].tensor
                found = value.local.view_as(tensor) if isinstance(value, Row) else value
                kept = told["state"].setdefault(index[id(tensor)], {})
                kept[key.rpartition(".")[2]] = found
        optimizer.load_state_dict(told)


def _read(config: Config, folder: Path) -> tuple[Metadata, Checksums | None]:
    """Returns the metadata of a checkpoint, and its checksums if it has any."""
    if "\0" in str(folder):
        config.refuse("train.resume", "is no path: it has a null character")
    try:
        checksums = read_checksums(folder)
        return FileSystemReader(folder).read_metadata(), checksums
    except DamageError as error:
        refuse_damaged(config, [str(error)], cause=error)
    except FileNotFoundError as error:
        told = f"is not a whole checkpoint: it has no {METADATA}"
        if not folder.exists():
            told = "there is no such folder, seen from the working directory"
        config.refuse("train.resume", told, cause=error)
    except OSError as error:
        told = f"{error.filename} cannot be read: {error.strerror}"
        config.refuse("train.resume", f"expected the folder of a checkpoint: {told}", cause=error)
    except Exception as error:  # noqa: BLE001 - whatever pickle says of a damaged file
        refuse_damaged(config, [f"{METADATA} cannot be read: {error!r}"], cause=error)


def refuse_damaged(
    config: Config, found: Sequence[str], *, cause: Exception | None = None
) -> NoReturn:
    """Refuses a checkpoint for what is wrong with its bytes."""
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    config.refuse(
        "train.resume",
        f"is damaged: {found[0]}{more}: restore the files, or go on from another checkpoint",
        cause=cause,
    )


def verify(folder: Path, checksums: Checksums) -> list[str]:
    """Returns what is wrong with the bytes of this rank's share of the pieces, in words."""
    return damaged(folder, checksums.pieces[dist.get_rank() :: dist.get_world_size()])


def _check_names(config: Config, there: set[str], here: set[str]) -> None:
    """Refuses a checkpoint that holds other parameters or buffers than the model, either way."""
    saved = {key for key in there if key.startswith("model.")}
    told = []
    if extra := saved - here:
        told.append(f"the checkpoint holds {_listed(extra)}, which the model does not have")
    if missing := here - saved:
        told.append(f"the model has {_listed(missing)}, which the checkpoint does not hold")
    if told:
        config.refuse(
            "train.resume",
            f"it is of another model: {'; '.join(told)}: choose the [model] of the run that "
            f"wrote it",
        )


def _listed(keys: set[str]) -> str:
    names = sorted(key.partition(".")[2] for key in keys)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{', '.join(map(repr, names[:_NAMES_SHOWN]))}{more}"


def _row(one: MainParameter, found: Tensor) -> Row:
    """Returns something of each element that a rank steps as part of the whole."""
    return Row.of(found.detach().reshape(-1), one.begin, one.record.numel)


def _own_key() -> str:
    return f"{_KEPT}{dist.get_rank()}"


def _kept_key(metadata: Metadata) -> str | None:
    """Returns where to read what this rank kept; if nothing, another's, which tells of which plan.

    None if no rank kept anything.
    """
    found = sorted(key for key in metadata.state_dict_metadata if key.startswith(_KEPT))
    return _own_key() if _own_key() in found else next(iter(found), None)


def _place_of(key: str, metadata: Metadata) -> Tensor:
    found = metadata.state_dict_metadata[key]
    assert isinstance(found, TensorStorageMetadata)
    return torch.empty(found.size, dtype=found.properties.dtype)


def _packed(kept: dict[str, Any]) -> Tensor:
    """Returns it as bytes: it is one rank's, and no other cut can make anything of its parts.

    Raises:
        PlanError: If it could not be read again.
    """
    file = io.BytesIO()
    try:
        torch.save(kept, file)
        packed = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        _unpacked(packed, mine=True)
    except Exception as error:
        raise PlanError(
            f"no checkpoint can be written: what handlers {sorted(kept['handlers'])} keep from "
            f"step to step is not of numbers, strings and CPU tensors alone: {in_words(error)}"
        ) from error
    return packed


def _unpacked(packed: Tensor, *, mine: bool) -> dict[str, Any]:
    """Returns what was packed; of another rank's no more than of which plan it is.

    Raises:
        PlanError: If torch will not read it.
    """
    try:
        file = io.BytesIO(packed.numpy().tobytes())
        kept: dict[str, Any] = torch.load(file, weights_only=True)
    except Exception as error:
        why = error.__context__ or error  # torch wraps it in advice
        raise PlanError(f"what handlers kept cannot be read again: {why}") from error
    return kept if mine else {**kept, "handlers": {}}
