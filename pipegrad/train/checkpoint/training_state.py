"""Training state: the part of one rank in a checkpoint. Names are those of the uncut model.

[Note: any cut reads any checkpoint] A checkpoint has parameters, buffers, optimizer state, the
step, the loss scale, and the state of handlers. Keys are names of the uncut model, so another cut
finds them. The optimizer's state of a parameter is flat. Each rank writes the chunk that it steps,
and reads the chunk that it steps, so chunks of writer and reader may differ. The state of handlers
belongs to one plan: only the same plan reads it. The position in the data, the learning rate and
all random numbers follow from the step. Everything else comes from the configuration.

Tensor-parallel shards and experts differ along a dimension of the mesh. If ``parallel.shards`` says
how they are cut, they are parts of whole tensors: see [Note: pieces of a whole tensor]. Otherwise
their keys have a location, ``name[tp=1]``, and only a run with the same sizes reads them.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from pipegrad.comm.agreement import agree
from pipegrad.errors import PlanError, in_words
from pipegrad.gradients.main_params import Chunk, Locations, parted
from pipegrad.gradients.named_optimizer import MASTER, parts_in
from pipegrad.model.dtensor import as_dtensor, is_dtensor, local
from pipegrad.model.suspects import same_bits
from pipegrad.pipeline.scheduler import Scheduler
from pipegrad.train.checkpoint.shards import Shard
from pipegrad.train.checkpoint.storage import STEP, CheckpointReader, Contents, DamageError
from pipegrad.train.config import Config
from pipegrad.train.optimizer import KEYS_OF_PARTS, Update

COMMON = "common"  # the key of what all ranks have alike
HANDLERS = "handlers."  # of keys of handler state; the rank follows
_NAMES_SHOWN = 4  # names that a message lists


class TrainingState:
    """The state of one rank that a checkpoint saves and loads.

    Args:
        scheduler: Its gradient layer has the parameters and their keys.
        modules: Stage -> module, for the stages of this rank.
        optimizer: Made by ``sync.optimizer``.
        update: Has the loss scale, and counts the steps that were skipped.
        shards: What `find_shards` has returned.

    Raises:
        PlanError: If a sharded parameter is not contiguous.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        modules: dict[int, torch.nn.Module],
        optimizer: torch.optim.Optimizer,
        *,
        update: Update,
        shards: Mapping[str, Shard],
    ) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._sync = sync = scheduler.sync
        self._update = update
        self._read: dict[str, Tensor] = {}  # what `load` has read of the state that is packed
        # A key is "stage.name" at the lowest holder. Its name is that of the uncut model.
        locations = Locations(sync.topology, sync.plan)
        self._buffer_location = locations.of()
        plain = {r.key: r.key.partition(".")[2] for r in sync.records()}
        located = {key: name + locations.of(key) for key, name in plain.items()}
        names = {key: plain[key] if key in shards else located[key] for key in plain}
        # What an optimizer calls the parameters; and the locations of pieces.
        self._located = {names[key]: located[key] for key in plain}
        self._shards = {names[key]: shard for key, shard in shards.items()}
        wholes = {names[r.key]: Shard.whole(r.shape) for r in sync.records()}
        self._pieces = {**wholes, **self._shards}
        self._parameters = {names[record.key]: sync.parameter(record) for record in sync.records()}
        self._main_parameters = {names[main.record.key]: main for main in sync.main_parameters()}
        self._modules = modules
        self._own_parameter_names = {
            name for m in modules.values() for name, _ in m.named_parameters(remove_duplicate=False)
        }
        for name, main in self._main_parameters.items():
            if main.sharded and not self._parameters[name].is_contiguous():
                raise PlanError(
                    f"{name!r} is sharded and not contiguous, so its rows fit into no other cut's "
                    f"checkpoint: make it .contiguous()"
                )

    def tensors(self) -> dict[str, Tensor]:
        """Returns parameters and buffers by their keys in a checkpoint; of a DTensor, its own part.

        Whole DTensors would not do: some of torch's operators on them talk to all ranks of the job.

        Sync: the caller waits for parameters before.
        """
        buffers = {
            name + self._buffer_location: tensor
            for module in self._modules.values()
            for name, tensor in module.state_dict().items()
            if name not in self._own_parameter_names and isinstance(tensor, Tensor)
        }
        tensors = {**self._parameters, **buffers}
        return {f"model.{name}": local(tensor).detach() for name, tensor in tensors.items()}

    def state_dict(self, step: int) -> dict[str, Tensor]:
        """Returns what this rank writes of a checkpoint after a step. Local.

        Values are not copied, but those of buffers: a forward writes them, and a forward does not
        wait for a checkpoint.

        Raises:
            PlanError: If the state of a handler could not be read again. Perhaps on this rank
                alone.
        """
        # The parameter sync of the last step may still write.
        self._sync.wait_parameters()
        parameters = {f"model.{name}" for name in self._parameters}
        model = {key: t if key in parameters else t.clone() for key, t in self.tensors().items()}
        state: dict[str, Any] = {STEP: torch.tensor(step), **self._parts(model)}
        # State with the shape of a main parameter is written as a chunk of the whole parameter.
        # Other state, such as a step count, has no elements to divide and is written whole.
        for name, main in self._main_parameters.items():
            whole = self._shards[name].shape if name in self._shards else (main.record.numel,)
            if main.copied:
                state[f"stored.{name}"] = self._chunk(name, main.tensor, whole)
            for key, value in self._optimizer.state.get(main.tensor, {}).items():
                stem, tensor = f"optimizer.{name}.{key}", torch.as_tensor(value)
                if tensor.shape == main.tensor.shape:
                    state[stem] = self._chunk(name, tensor, whole)
                else:
                    state[stem + self._location(name)] = tensor
        state[COMMON] = pack({"update": self._update.state_dict()})
        if kept := self._scheduler.state_dict():
            try:
                state[f"{HANDLERS}{dist.get_rank()}"] = pack(kept)
            except Exception as error:
                raise PlanError(
                    f"no checkpoint can be written: what handlers {sorted(kept['handlers'])} keep "
                    f"from step to step is not of numbers, strings and CPU tensors alone: "
                    f"{in_words(error)}"
                ) from error
        return state

    def check(
        self, config: Config, contents: Contents, own_names: Sequence[set[str]], keys: set[str]
    ) -> None:
        """Refuses a checkpoint of another model or optimizer. Local.

        Args:
            config: The configuration.
            contents: Of the checkpoint.
            own_names: Names of the state that each part of the optimizer of this run keeps for a
                matrix.
            keys: The keys of `tensors` of all ranks.

        Raises:
            ConfigError: If it is.
        """
        saved = contents.tensors
        check_keys(config, set(saved), keys)
        for key, tensor in self._parts(self.tensors()).items():
            if saved[key].size != tensor.shape:
                config.refuse(
                    "train.resume",
                    f"it is of another model: {key.partition('.')[2]!r} is {tuple(tensor.shape)} "
                    f"here and {tuple(saved[key].size)} there",
                )
        self._check_state(config, saved)
        names_of: dict[str, set[str]] = {}
        for stem in self._saved_state(saved):
            if stem.startswith("optimizer."):
                names_of.setdefault(str(self._owner(stem)), set()).add(_state_name(stem))
        for part, optimizer in enumerate(parts_in(self._optimizer)):
            steps = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
            for name, names in names_of.items():
                main = self._main_parameters[name]
                if id(main.tensor) not in steps or len(main.record.shape) != 2:
                    continue
                if names != own_names[part]:
                    config.refuse(
                        KEYS_OF_PARTS[part],
                        f"it keeps {sorted(own_names[part])} of {name!r}, but the optimizer of the "
                        f"checkpoint kept {sorted(names)}: choose the same",
                    )

    def _check_state(self, config: Config, tensors: Mapping[str, TensorStorageMetadata]) -> None:
        """Refuses state of the optimizer that does not fit what this rank steps."""
        for stem, saved in self._saved_state(tensors).items():
            name = str(self._owner(stem))
            main = self._main_parameters[name]
            sizes = [tuple(one.size) for one in saved.values()]
            if all(not s or self._chunk(name, main.tensor, s) is not None for s in sizes):
                continue
            if main.sharded or stem.startswith("stored."):
                config.refuse(
                    "train.resume",
                    f"its {stem!r} is {sizes[0]}, expected {self._pieces[name].shape} or its "
                    f"elements: state of an optimizer that cannot be sharded, or of another "
                    f"parallel.shards",
                )
            if saved.keys() != set(self._pieces[name].locations):
                config.refuse(
                    "train.resume",
                    f"its {stem!r} is not kept for each element of the whole tensor: choose the "
                    f"parallel.dimensions and parallel.shards of the run that wrote it",
                )

    def load(self, folder: Path, contents: Contents) -> int:
        """Reads a checkpoint into parameters, buffers and optimizer; returns its step.

        Every rank must call it. Replicas are equal after it.
        """
        self._sync.wait_parameters()
        held = self.tensors()
        # It reads into new tensors, because a buffer may be an expanded constant, whose elements
        # share memory.
        empty = {key: tensor.contiguous().clone() for key, tensor in held.items()}
        state = {STEP: torch.tensor(0), **self._parts(empty)}
        for stem, saved in self._saved_state(contents.tensors).items():
            name = str(self._owner(stem))
            # The numbers of all pieces are read if they are other pieces than here.
            is_same = saved.keys() == set(self._pieces[name].locations)
            for location in [self._location(name)] if is_same else saved:
                size, dtype = saved[location].size, saved[location].properties.dtype
                main = self._main_parameters[name]
                values = torch.empty_like(main.tensor, dtype=dtype, device="cpu")
                part = self._chunk(name, values, tuple(size))
                state[stem + location] = torch.empty(size, dtype=dtype) if part is None else part
        # A rank without handler state reads that of another rank. It says which plan the state
        # belongs to, and all ranks must refuse another plan alike.
        handlers = sorted(key for key in contents.tensors if key.startswith(HANDLERS))
        own = f"{HANDLERS}{dist.get_rank()}"
        packed = [own] if own in handlers else handlers[:1]
        packed += [COMMON] if COMMON in contents.tensors else []
        self._read = {key: contents.empty(key) for key in packed}
        state.update(self._read)
        load(state, storage_reader=CheckpointReader(folder, contents))
        for key, tensor in held.items():
            # An expanded constant cannot be written to. If its value is right, it stays.
            if not same_bits(tensor, empty[key]):
                tensor.copy_(empty[key])
        # This makes replicas equal and sets main parameters from the parameters. The optimizer sets
        # master copies after it, because they are more precise than the parameters.
        self._sync.synchronize_parameters()
        self._restore(self._optimizer, state)
        return int(state[STEP])

    def restore(self, step: int) -> None:
        """Sets loss scale and learning rate as `load` has read them; every rank must call it.

        Raises:
            PipegradError: If they cannot be read; on all ranks.
        """

        def restored() -> None:
            read = self._read.get(COMMON)
            common = {} if read is None else unpack_entry(COMMON, read)
            try:
                self._update.restore(common.get("update"), step)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise DamageError(f"its {COMMON!r} is of another version: {error!r}") from error

        agree("what all ranks have alike", restored)

    def handler_state(self) -> tuple[dict[str, Any], str]:
        """Returns what `load` has read of handlers and codecs; and why it cannot be read, or "".

        Of another rank it is only the description of its plan.
        """
        for key in self._read.keys() - {COMMON}:
            try:
                state = unpack(self._read[key])
            except Exception as error:  # noqa: BLE001 - whatever torch says
                reason = error.__context__ or error  # torch's own error only adds advice to it
                return {}, f"the state of handlers cannot be read again: {reason}"
            is_own = key == f"{HANDLERS}{dist.get_rank()}"
            return state if is_own else {"plan": state.get("plan"), "handlers": {}}, ""
        return {}, ""

    def _owner(self, key: str) -> str | None:
        """Returns the parameter of an optimizer key; None if this rank does not hold it."""
        kind, _, path = key.partition(".")
        name = path.rpartition(".")[0] if kind == "optimizer" else path
        return name if kind in ("optimizer", "stored") and name in self._parameters else None

    def _saved_state(
        self, tensors: Mapping[str, TensorStorageMetadata]
    ) -> dict[str, dict[str, TensorStorageMetadata]]:
        """Returns state of what this rank steps: key without location -> location -> state."""
        state: dict[str, dict[str, TensorStorageMetadata]] = {}
        for key, saved in tensors.items():
            if self._owner(key) in self._main_parameters:
                stem, location = parted(key) if key.startswith("optimizer.") else (key, "")
                state.setdefault(stem, {})[location] = saved
        return state

    def _location(self, name: str) -> str:
        """Returns the location of a declared piece; "" of what has it in its name."""
        return self._located[name].removeprefix(name)

    def _chunk(self, name: str, values: Tensor, shape: tuple[int, ...]) -> Chunk | None:
        """Returns values of a rank as a chunk of a tensor; None if that is of no such shape.

        The tensor has an element for each of the whole parameter, in its shape or flat.
        """
        main, piece = self._main_parameters[name], self._pieces[name]
        if shape == (main.record.numel,) and len(piece.locations) == 1:
            return Chunk.of(values.detach().reshape(-1), main.begin, shape[0])
        return piece.chunk(values, main.begin) if shape and shape == piece.shape else None

    def _parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns tensors by key, and pieces as parts of whole tensors."""
        shards = {f"model.{name}": shard for name, shard in self._shards.items()}
        return {k: shards[k].chunk(t) if k in shards else t for k, t in tensors.items()}

    def _restore(self, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
        """Sets the state of the optimizer, and master copies."""
        named: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            name = self._owner(key)
            if name not in self._main_parameters:
                continue
            main, states = self._main_parameters[name], named.setdefault(self._located[name], {})
            if isinstance(value, Chunk):
                part = value.local.view_as(local(main.tensor))
                is_part = is_dtensor(main.tensor)
                states[_state_name(key)] = as_dtensor(part, main.tensor) if is_part else part
            else:
                # Pieces may differ in their number of steps. That of the whole is the largest.
                last = states.get(_state_name(key), value)
                states[_state_name(key)] = value.maximum(last) if value.ndim == 0 else value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": named})


def pack(state: dict[str, Any]) -> Tensor:
    """Returns a state as bytes, ``(numel,)`` of uint8.

    Raises:
        Exception: If it could not be read again: it is not of numbers, strings and CPU tensors.
    """
    file = io.BytesIO()
    torch.save(state, file)
    packed = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    # It is read back at once, because an error at the next resume is too late.
    unpack(packed)
    return packed


def unpack(packed: Tensor) -> dict[str, Any]:
    """Returns a state from bytes. Reading executes nothing.

    Raises:
        Exception: If torch cannot read it.
    """
    file = io.BytesIO(packed.numpy().tobytes())
    # torch would also inflate what was deflated, to a thousand times its size, and read the same
    # bytes for many entries. It writes neither.
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not is_stored or sum(entry.file_size for entry in entries) > packed.numel():
        raise ValueError("its entries are compressed, or share bytes: torch writes none so")
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def unpack_entry(key: str, packed: Tensor) -> dict[str, Any]:
    """Returns the state of an entry of a checkpoint, as `unpack` does.

    Raises:
        DamageError: If torch cannot read it.
    """
    try:
        return unpack(packed)
    except Exception as error:
        raise DamageError(f"its {key!r} cannot be read: {error!r}".partition("\\n")[0]) from error


def _state_name(key: str) -> str:
    """Returns the optimizer's name of a state, from its key in a checkpoint."""
    return MASTER if key.startswith("stored.") else parted(key)[0].rpartition(".")[2]


def check_keys(config: Config, saved: set[str], here: set[str]) -> None:
    """Refuses a checkpoint with other parameters or buffers than the model, or in other locations.

    Args:
        config: The configuration.
        saved: All keys of the checkpoint. Those of the optimizer are none of its business.
        here: The keys of all ranks of this run.

    Raises:
        ConfigError: If keys differ.
    """
    saved = {key for key in saved if key.startswith("model.")}
    extra, missing = saved - here, here - saved
    apart = _stems(extra | missing) & _stems(saved) & _stems(here)
    complaints = []
    if apart:
        of_saved, of_run = (_locations(keys, min(apart)) for keys in (saved, here))
        config.refuse(
            "train.resume",
            f"{min(apart).partition('.')[2]!r} is there in the locations {of_saved}, and here in "
            f"{of_run}: choose the parallel.dimensions, the parallel.data, the parallel.shards and "
            f"the handlers of the run that wrote it",
        )
    if extra:
        complaints.append(f"the checkpoint holds {_listed(extra)}, which the model does not have")
    if missing:
        complaints.append(f"the model has {_listed(missing)}, which the checkpoint does not hold")
    if complaints:
        config.refuse(
            "train.resume",
            f"it is of another model: {'; '.join(complaints)}: choose the [model] of the run that "
            f"wrote it",
        )


def _stems(keys: set[str]) -> set[str]:
    return {parted(key)[0] for key in keys}


def _locations(keys: set[str], stem: str) -> str:
    """Returns in words where a tensor of a checkpoint or a run lies."""
    locations = sorted(location for key, location in map(parted, keys) if key == stem)
    return " ".join(location or "(everywhere the same)" for location in locations)


def _listed(keys: set[str]) -> str:
    names = sorted(key.partition(".")[2] for key in keys)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{', '.join(map(repr, names[:_NAMES_SHOWN]))}{more}"
