"""State: a rank's part of a training, by names of the uncut model.

[Note: any layout reads any checkpoint] A checkpoint has parameters, buffers, the state of the
optimizer, and the extra state of handlers and of your objects. Its keys are names of the uncut
model, because another cut must find them. Each rank writes slices of whole tensors: the elements
that it steps, its shard of a DTensor, its piece that `shards` declares. It reads the slices that
its own layout gives it.

Extra state is saved rank by rank. Another layout reads it if all ranks had the same.

[Note: pieces of a whole tensor] Tensor parallelism cuts a layer's matrix, and expert parallelism
the list of experts. `shards` declares such a cut, because only the model's code decides it: a fused
matrix may be cut in any order. Equal pieces in the order of ranks make the whole tensor. Other
tensors that differ along a dimension of the mesh have keys with a location, ``name[tp=1]``, and
only a run of the same sizes reads them. A DTensor declares its part itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad.checkpoint.files import Files, Part, Range
from pipegrad.comm import plain
from pipegrad.comm.agreement import agree
from pipegrad.errors import CheckpointError, PlanError
from pipegrad.gradients.main_params import Locations, parted, uncut_names
from pipegrad.gradients.named_optimizer import MASTER, parts_in
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.private import flat
from pipegrad.model.dtensor import as_dtensor, is_dtensor, local
from pipegrad.model.suspects import same_bits
from pipegrad.model.ties import plain_name
from pipegrad.pipeline.scheduler import Scheduler

HANDLERS, OPTIMIZER = "handlers", "optimizer"
_NAMES_SHOWN = 4
_OPTIMIZER_KEY = re.compile(r"optimizer\.(.*)\.([^.@]+)(@.*)?")
# Options of torch's optimizers that decide which state they keep: whether it is set, not its value.
_KEEPING = ("amsgrad", "centered", "momentum")


class Stateful(Protocol):
    """An object with extra state, such as a learning-rate schedule."""

    def state_dict(self) -> Any: ...  # noqa: ANN401 - numbers, text, lists, tables and tensors

    def load_state_dict(self, state: Any) -> object: ...  # noqa: ANN401 - as above


@dataclass(frozen=True)
class Place:
    """The box of a whole tensor that a rank has."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Place:
        """Returns the place of a tensor that is not cut."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    def part(self, values: Tensor, begin: int = 0) -> Part:
        """Returns elements of the box, from `begin` on, as a part of the whole tensor."""
        held = local(values).detach().reshape(-1)
        begin = begin if held.numel() else 0  # nothing lies between the ranges of other ranks
        return Part(self.shape, Range(self.offsets, self.sizes, begin, begin + held.numel()), held)

    def __str__(self) -> str:
        return f"@{[*self.offsets]}{[*self.sizes]}"


class State:
    """The state that this rank saves and resumes. Every rank makes it, after its optimizer.

    For example: ``State(scheduler, optimizer, extra={"rates": rates})``.

    Args:
        source: A `Scheduler`, or the `GradientSync` of `attach`.
        optimizer: Made by ``source.optimizer``; None to save and resume the model alone.
        extra: Objects with ``state_dict`` and ``load_state_dict``, by name. Their state is made of
            numbers, text, lists, tables and tensors.
        shards: Parameters of which each rank along one dimension of the mesh has an equal piece: a
            pattern of names -> the dimension of the tensor that is cut.

    Raises:
        PlanError: If `shards` fit no parameter, a sharded parameter is not contiguous, or the state
            of the optimizer has no names. On all ranks.
    """

    def __init__(
        self,
        source: Scheduler | GradientSync,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Mapping[str, Stateful] | None = None,
        shards: Mapping[str, int] | None = None,
    ) -> None:
        self.source, self.optimizer, self.extra = source, optimizer, dict(extra or {})
        self.sync = source.sync if isinstance(source, Scheduler) else source
        agree("the state of the training", lambda: self._set_up(self.sync, shards or {}))

    def _set_up(self, sync: GradientSync, shards: Mapping[str, int]) -> None:
        self.layout = [tuple(axis) for axis in sync.topology.axes]
        records, self.tied = sync.manifest.parameters, dict[str, list[str]]()
        for record in records:
            entries = sync.manifest.entries(record.key)
            first, *others = dict.fromkeys(name for e in entries for name in (e.name, *e.aliases))
            if others:
                self.tied[first] = others
        locations = Locations(sync.topology, sync.plan)
        names = uncut_names(records)
        # An optimizer has names of trained parameters alone.
        stepped = uncut_names([record for record in records if record.requires_grad])
        mains = {main.record.key: main for main in sync.main_parameters()}
        pieces = _declared(sync, locations, names, shards)
        self._places: dict[str, Place] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        # Main parameters, with the names that the optimizer has for them.
        self._mains: dict[str, tuple[Any, str]] = {}
        for record in sync.records():
            key, parameter = record.key, sync.parameter(record)
            place = _of_dtensor(parameter) if is_dtensor(parameter) else pieces.get(key)
            name = names[key] if place else names[key] + locations.of(key)
            self._places[name] = place or Place.whole(parameter.shape)
            self._parameters[name] = parameter
            if key in mains:
                self._mains[name] = mains[key], stepped[key] + locations.of(key)
                if mains[key].sharded and not parameter.is_contiguous():
                    raise PlanError(
                        f"{name!r} is sharded and not contiguous, so its rows fit into no other "
                        f"layout's checkpoint: make it .contiguous()"
                    )
        # Add the stage to names of buffers if each stage is a model, because names may be equal.
        are_apart = any(name == key for key, name in names.items())
        self._buffers: dict[str, tuple[int, str]] = {}
        for stage, module in sync.modules.items():
            own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
            for name in module.state_dict().keys() - own:
                full = f"{stage}." * are_apart + plain_name(name) + locations.of()
                self._buffers[full] = stage, name
        groups = [] if self.optimizer is None else self.optimizer.state_dict()["param_groups"]
        if groups and not any(isinstance(n, str) for group in groups for n in group["params"]):
            kind = type(self.optimizer).__name__
            raise PlanError(
                f"the state of this {kind} has no names: make it by "
                f"scheduler.optimizer(torch.optim.{kind}, ...)"
            )

    def tensors(self) -> dict[str, Tensor]:
        """Returns parameters and buffers by key; of a DTensor, this rank's shard.

        Sync: the caller waits for parameters before.
        """
        # Return shards, because some of torch's operators on DTensors communicate with all ranks.
        of_stages = {stage: module.state_dict() for stage, module in self.sync.modules.items()}
        buffers = {name: of_stages[stage][inner] for name, (stage, inner) in self._buffers.items()}
        held = {name: t for name, t in buffers.items() if isinstance(t, Tensor)}
        return {f"model.{n}": local(t).detach() for n, t in {**self._parameters, **held}.items()}

    def parts(self) -> dict[str, Part]:
        """Returns the parts of a checkpoint that this rank has, by key. Values are not copied.

        Sync: waits for parameters of other ranks; every rank must call it.

        Raises:
            PlanError: If an extra state is no plain data.
        """
        self.sync.wait_parameters()
        parts = {key: place.part(tensor) for key, tensor, place in self._located()}
        extra: dict[str, Any] = {name: of.state_dict() for name, of in self.extra.items()}
        if kept := self.source.state_dict():
            extra[HANDLERS] = kept
        if self.optimizer is not None:
            extra[OPTIMIZER] = _unnamed(self.optimizer.state_dict())
            extra[OPTIMIZER]["kinds"] = _kinds(self.optimizer)
            for name, (main, _) in self._mains.items():
                values = dict(self.optimizer.state.get(main.tensor, {}))
                if main.copied:
                    values[MASTER] = main.tensor
                place, shape = self._places[name], local(main.tensor).shape
                for key, value in values.items():
                    tensor, stem = local(torch.as_tensor(value)), f"optimizer.{name}.{key}"
                    # The step count of a parameter without dimensions has its shape, too.
                    if tensor.shape == shape and (tensor.ndim or key != "step"):
                        parts[stem] = place.part(tensor, main.begin)
                    else:
                        parts[f"{stem}{place}"] = Place.whole(tensor.shape).part(tensor)
        for name, state in extra.items():
            for key, tensor in _packed(name, state).items():
                parts[f"extra.{dist.get_rank()}.{key}"] = Place.whole(tensor.shape).part(tensor)
        return parts

    def check(self, files: Files, keys: set[str]) -> None:
        """Refuses a checkpoint of another model. Local.

        Args:
            files: The checkpoint.
            keys: The keys of `tensors` of all ranks.

        Raises:
            CheckpointError: If names or shapes differ.
        """
        saved = {key for key in files.index.tensors if key.startswith("model.")}
        complaints = []
        if extra := saved - keys:
            complaints.append(f"it has {_listed(extra)}, which the model does not have")
        if missing := keys - saved:
            complaints.append(f"the model has {_listed(missing)}, which it does not have")
        for key, _, place in self._located():
            if key in saved and files.shape(key) != place.shape:
                name = key.removeprefix("model.")
                complaints.append(f"{name!r} is {place.shape} here and {files.shape(key)} there")
        if complaints:
            raise CheckpointError(
                f"is of another model or layout: {'; '.join(complaints[:2])}: choose the model, "
                f"and where names have a location, as [tp=0], the layout and the handlers of the "
                f"run that wrote it"
            )

    def read(self, files: Files) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """Returns this rank's tensors by key, and the optimizer's state of parameters by name.

        Raises:
            CheckpointError: If they cannot be read, or do not fit.
        """
        tensors = {
            key: files.read(key, place.part(tensor).range).view(tensor.shape)
            for key, tensor, place in self._located()
        }
        places_of: dict[tuple[str, str], dict[str, str]] = {}
        for key in files.index.tensors:
            match = _OPTIMIZER_KEY.fullmatch(key)
            if match is not None and match[1] in self._mains and self.optimizer is not None:
                places_of.setdefault((match[1], match[2]), {})[match[3] or ""] = key
        state: dict[str, dict[str, Tensor]] = {}
        for (name, key), places in places_of.items():
            (main, stepped), place = self._mains[name], self._places[name]
            tensor = local(main.tensor)
            shapes = {files.shape(each) for each in places.values()}
            if "" in places and shapes == {place.shape}:
                wanted = place.part(tensor, main.begin).range
                value = files.read(places[""], wanted).view(tensor.shape)
                value = as_dtensor(value, main.tensor) if is_dtensor(main.tensor) else value
            elif str(place) in places:
                value = files.whole(places[str(place)])
            elif shapes == {()}:
                # Take the largest number of steps, because pieces may differ in it.
                value = torch.stack([files.whole(each) for each in places.values()]).amax()
            else:
                raise CheckpointError(
                    f"has 'optimizer.{name}.{key}' of {min(shapes)}, which is not kept for each "
                    f"element of the whole tensor {place.shape}: resume on the layout that wrote it"
                )
            state.setdefault(stepped, {})[key] = value
        return tensors, state

    def read_extra(self, files: Files, name: str) -> Any:  # noqa: ANN401 - plain data
        """Returns the extra state of a name; None if there is none.

        Raises:
            CheckpointError: If ranks had different ones, and this is another layout.
            MessageError: If it is no plain data.
        """
        ranks: Sequence[int] = range(math.prod(size for _, size in files.index.layout))
        if files.index.layout == self.layout:
            ranks = [dist.get_rank()]
        keys = [f"extra.{rank}.{name}" for rank in ranks]
        found = [_unpacked(files, key) for key in keys if key in files.index.tensors]
        if len(found) > 1 and len({plain.dumps(state) for state in found}) > 1:
            raise CheckpointError(
                f"has another state of {name!r} for each rank, so only the layout that wrote it "
                f"can read it: {files.index.layout}, and this is {self.layout}"
            )
        return found[0] if found else None

    def load(
        self,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Mapping[str, Tensor]],
        options: Mapping[str, Any] | None,
    ) -> None:
        """Sets parameters, buffers and the optimizer; every rank must call it. Replicas are equal.

        Args:
            tensors: Result of `read`.
            state: Result of `read`.
            options: The extra state of the optimizer; None to keep its options.
        """
        for key, tensor in self.tensors().items():
            # An expanded constant cannot be written to. If its value is right, it stays.
            if not same_bits(tensor, value := tensors[key].to(tensor.device)):
                tensor.copy_(value)
        # This makes replicas equal and sets main parameters from the parameters. The optimizer sets
        # master copies after it, because they are more precise than the parameters.
        self.sync.synchronize_parameters()
        if self.optimizer is not None:
            base = options or _unnamed(self.optimizer.state_dict())
            self.optimizer.load_state_dict({**base, "state": {**base["state"], **state}})

    def check_optimizer(self, saved: Mapping[str, Any] | None, *, options: bool) -> None:
        """Refuses the state of another optimizer, or of options that keep other state. Local.

        Args:
            saved: The extra state of the checkpoint's optimizer.
            options: True if its options are taken, too.

        Raises:
            CheckpointError: If the optimizer, or an option that decides what it keeps, differs.
        """
        if self.optimizer is None:
            return
        if saved is None:
            raise CheckpointError("has no state of an optimizer, but a model alone")
        if saved.get("kinds") != (kinds := _kinds(self.optimizer)):
            raise CheckpointError(
                f"is of another optimizer: of {saved.get('kinds')}, not {kinds}; make that one, or "
                f"a State without an optimizer, which takes the model alone"
            )
        if options:
            return
        there = {name: group for group in saved["param_groups"] for name in group["params"]}
        groups = self.optimizer.param_groups
        here = {id(tensor): group for group in groups for tensor in group["params"]}
        for name, (main, stepped) in self._mains.items():
            group = here[id(main.tensor)]
            of_file = there.get(parted(stepped)[0], group)
            for option in _KEEPING:
                if bool(group.get(option)) != bool(of_file.get(option)):
                    raise CheckpointError(
                        f"is of an optimizer that keeps other state: {option} of {name!r} is "
                        f"{group.get(option)} here, and {of_file.get(option)} there: take the "
                        f"options of the run that wrote it"
                    )

    def _located(self) -> Iterator[tuple[str, Tensor, Place]]:
        """Yields key, tensor and place of each parameter and buffer."""
        for key, tensor in self.tensors().items():
            place = self._places.get(key.removeprefix("model."))
            yield key, tensor, place or Place.whole(tensor.shape)


def _kinds(optimizer: torch.optim.Optimizer) -> list[str]:
    return [type(part).__name__ for part in parts_in(optimizer)]


def _unnamed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of an optimizer without parameters of the sync: yours have numbers."""
    return {**state, "state": {k: v for k, v in state["state"].items() if isinstance(k, int)}}


def _of_dtensor(parameter: Any) -> Place:  # noqa: ANN401 - a DTensor
    [chunk] = parameter.__create_chunk_list__()
    return Place(tuple(parameter.shape), tuple(chunk.offsets), tuple(chunk.sizes))


def _declared(
    sync: GradientSync, locations: Locations, names: Mapping[str, str], shards: Mapping[str, int]
) -> dict[str, Place]:
    """Returns the places of this rank's pieces that `shards` declares, by key.

    Raises:
        PlanError: If they fit no parameter, or replicas train alone.
    """
    for pattern in shards:
        matched = [name for name in names.values() if fnmatchcase(name, pattern)]
        if not matched:
            raise PlanError(f"shards: {pattern!r} matches no parameter")
        if sync.plan.independent_axes:
            raise PlanError(
                f"shards: replicas train alone by handler {sync.plan.independent_by!r}, and each "
                f"has {min(matched)!r}: a checkpoint would take replicas for pieces; leave it out, "
                f"or choose another handler"
            )
    places = {}
    for record in sync.records():
        name, location, shape = names[record.key], locations.of(record.key), list(record.shape)
        dims = {dim for pattern, dim in shards.items() if fnmatchcase(name, pattern)}
        if not dims:
            continue
        axis, _, coordinate = location.strip("[]").partition("=")
        dim, *others = dims
        if others or "," in location or not -len(shape) <= dim < len(shape):
            raise PlanError(
                f"shards: {name!r}, {record.shape} at {location or 'one place'}, is not cut along "
                f"dimension {sorted(dims)}: expected one dimension of it, and one of the mesh"
            )
        if location:  # else the dimension of the mesh has one rank, with the whole tensor
            offsets = [0] * len(shape)
            offsets[dim] = int(coordinate) * shape[dim]
            shape[dim] *= sync.topology.size(axis)
            places[record.key] = Place(tuple(shape), tuple(offsets), tuple(record.shape))
    return places


def _packed(name: str, state: Any) -> dict[str, Tensor]:  # noqa: ANN401 - plain data
    """Returns a state as tensors: its own, and a text with their descriptions in their positions.

    Raises:
        PlanError: If it is no plain data.
    """
    leaves, rebuilt = flat(state)
    tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
    described = [
        torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        if isinstance(leaf, Tensor)
        else leaf
        for _, leaf in leaves
    ]
    try:
        text = plain.dumps(rebuilt(described))
    except Exception as error:
        what = (
            f"handlers {sorted(state['handlers'])} keep" if name == HANDLERS else f"{name!r} keeps"
        )
        raise PlanError(
            f"no checkpoint can be written: what {what} from step to step is not of numbers, text, "
            f"lists, tables and tensors alone: {error}"
        ) from error
    packed = {name: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    return packed | {f"{name}.{number}": tensor for number, tensor in enumerate(tensors)}


def _unpacked(files: Files, key: str) -> Any:  # noqa: ANN401 - plain data
    """Returns the state that `_packed` was given."""
    numbers = count()
    leaves, rebuilt = flat(plain.loads(files.whole(key).numpy().tobytes()))
    stored = [
        files.whole(f"{key}.{next(numbers)}") if isinstance(leaf, Tensor) else leaf
        for _, leaf in leaves
    ]
    return rebuilt(stored)


def _listed(keys: set[str]) -> str:
    names = sorted(key.removeprefix("model.") for key in keys)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{', '.join(map(repr, names[:_NAMES_SHOWN]))}{more}"
