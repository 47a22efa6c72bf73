"""Generation: transformers' own ``generate`` on every rank of a pipeline, over layers of all ranks.

[Note: generation] Every rank has a copy of the uncut model without memory, in which the layers of
its stages are the real ones. On each rank transformers runs the same loop over this copy. A layer
runs where it is, and its rank sends what it returns to the others: so all code between layers,
encoders, beams, processors and criteria see the same values everywhere, and choose the same tokens.

A cache has the states of a layer where the layer is. On other ranks its entry has the same shapes,
on the meta device, also if it is copied to another, so lengths and masks are right. What an entry
says of itself travels with the result of the layer.
"""
# ruff: noqa: ANN401 - layers take and return anything

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad.comm import plain
from pipegrad.comm.activity import Activity
from pipegrad.comm.agreement import agree, same
from pipegrad.comm.collectives import broadcast
from pipegrad.comm.watch import Bounded
from pipegrad.errors import StepError, following, in_words
from pipegrad.interop.private import tree_flatten
from pipegrad.model.wrappers import is_fsdp2, is_imported_kind
from pipegrad.partition.layers import Part
from pipegrad.partition.structural.calls import Change, Watch, apply, find, roots_of
from pipegrad.partition.structural.shallow import as_kind, twin
from pipegrad.partition.structural.stage_module import OwnLayer
from pipegrad.partition.structural.stand_ins import filled
from pipegrad.partition.weights.files import listed
from pipegrad.partition.weights.gathered import collected, tensors_by_name
from pipegrad.pipeline.scheduler import evaluating
from pipegrad.topology import Topology

_HEAD_BYTES = 4096  # of the first message of a layer; few need a second one
_MOST_SECONDS = 600.0  # for what one layer returns
_ATOMS = (type(None), bool, int, float, str)


class Link:
    """Sends what layers return to all ranks of a pipeline.

    Args:
        topology: With the stages of its ranks; None if one process has them all.
        device: Of the stages.

    Attributes:
        ranks: The global ranks of the pipeline.
        device: The argument.
        is_inside: Whether a layer of this rank runs.
    """

    def __init__(self, topology: Topology | None, device: torch.device) -> None:
        self._topology = topology
        self._group = None if topology is None else topology.group_along(topology.pipeline)
        self.ranks = (0,) if topology is None else topology.ranks_along(topology.pipeline)
        self.device = device
        self.is_inside = False

    def rank_of(self, stage: int) -> int:
        """Returns the global rank of a stage."""
        return 0 if self._topology is None else self._topology.ranks_of([stage])[0]

    @property
    def here(self) -> int:
        """The global rank of this process."""
        return 0 if self._topology is None else dist.get_rank()

    def send(self, message: object, tensors: Sequence[Tensor] = ()) -> None:
        """Sends plain data and tensors to all other ranks. Sync: the current stream."""
        if len(self.ranks) == 1:
            return
        content = plain.dumps(message)
        size = len(content).to_bytes(8, "little")
        first = (size + content)[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0")
        rest = content[_HEAD_BYTES - 8 :]
        for part in (first, rest):
            if part:
                head = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                self._broadcast(head.to(self.device), self.here)
        for tensor in tensors:
            self._broadcast(tensor.detach().contiguous(), self.here)

    def receive(self, rank: int) -> Any:
        """Returns the plain data that a rank sends. The host waits for it."""
        head = torch.empty(_HEAD_BYTES, dtype=torch.uint8, device=self.device)
        self._broadcast(head, rank)
        content = head.cpu().numpy().tobytes()
        size = int.from_bytes(content[:8], "little")
        if size > _HEAD_BYTES - 8:
            rest = torch.empty(size + 8 - _HEAD_BYTES, dtype=torch.uint8, device=self.device)
            self._broadcast(rest, rank)
            content += rest.cpu().numpy().tobytes()
        return plain.loads(content[8 : 8 + size])

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
        """Returns a tensor that a rank sends."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self._broadcast(tensor, rank)
        return tensor

    def shared(self, tensors: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Returns the tensors of one rank on all ranks. Others give any."""
        if rank != self.here:
            return [self.tensor(shape, dtype, rank) for shape, dtype in self.receive(rank)]
        self.send([(tuple(tensor.shape), tensor.dtype) for tensor in tensors], tensors)
        return list(tensors)

    def _broadcast(self, tensor: Tensor, rank: int) -> None:
        if tensor.numel():
            memory = tensor.reshape(-1).view(torch.uint8)  # backends do not send every dtype
            with Activity("generate()", self.ranks, within_seconds=_MOST_SECONDS):
                broadcast(memory, rank, self._group)


class SharedLayer(nn.Module):
    """A layer that one rank of a pipeline runs for all of them."""

    def _pipegrad_call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the layer, or receives what it returns."""
        layer: _Layer = vars(self)["_pipegrad_shared"]
        link = layer.link
        is_here = layer.rank == link.here
        if link.is_inside:
            if not is_here:
                raise StepError(
                    f"a layer calls layer {layer.name!r}, which is on another rank: gather the "
                    f"model by cut.gather(), and generate there"
                )
            return call(*args, **kwargs)
        caches = [x for x in (*args, *kwargs.values()) if _is_cache(x)]
        if not is_here:
            result, changed = layer.received(caches)
            roots = roots_of(self, args, kwargs) if changed else {}
            for change, values in zip(layer.changes, changed, strict=True):
                if values:
                    apply(change, values, find(roots, change.path))
            return result
        link.is_inside = True
        before = [layer.entries(cache) for cache in caches]
        watch, tensors = Watch(self, args, kwargs, layer.changes), list[Tensor]()
        try:
            result = call(*args, **kwargs)
            entries = [
                layer.entries(cache, known) for cache, known in zip(caches, before, strict=True)
            ]
            message = [_packed([result, watch.values()], tensors, caches), entries]
        except Exception as error:
            link.send(in_words(error))
            raise
        finally:
            link.is_inside = False
        link.send(message, tensors)
        return result


@dataclass(frozen=True)
class _Layer:
    """What a `SharedLayer` knows of itself.

    Attributes:
        name: In the uncut model.
        rank: The global rank that runs it.
        link: To the other ranks.
        indices: Of its entries in a cache.
        changes: Of what it is given, which other layers may read; see [Note: changes].
    """

    name: str
    rank: int
    link: Link
    indices: tuple[int, ...]
    changes: tuple[Change, ...]

    def received(self, caches: Sequence[Any]) -> Any:
        """Returns what the layer returned and changed, and gives caches what it says of them."""
        message = self.link.receive(self.rank)
        if isinstance(message, str):
            words = f"layer {self.name!r} failed on rank {self.rank}: {message}"
            raise following(StepError(words))
        packed, states = message
        result = _unpacked(
            packed, caches, lambda shape, dtype: self.link.tensor(shape, dtype, self.rank)
        )
        for cache, parts in zip(caches, states, strict=True):
            for part, (entries, flags) in zip(_parts_of(cache), parts, strict=True):
                for index, state in entries.items():
                    while len(part.layers) <= index:
                        part.layers.append(part.layer_class_to_replicate())
                    vars(part.layers[index]).update(_described(state, self.link.device))
                if flags:
                    cache.is_updated.update(flags)
        return result

    def entries(self, cache: Any, known: Sequence[Any] = ()) -> list[Any]:
        """Returns what the layer's entries in a cache say of themselves, if that is not known.

        A layer may share modules with others, and has their entries then, which stay as they are.
        """
        flags = getattr(cache, "is_updated", None) or {}
        said = [
            [
                {i: _said(vars(part.layers[i])) for i in self.indices if i < len(part.layers)},
                {i: flags[i] for i in self.indices if i in flags},
            ]
            for part in _parts_of(cache)
        ]
        for (entries, _), (others, _) in zip(said, known, strict=False):
            for i in [i for i, other in others.items() if entries[i] == other]:
                del entries[i]
        return said


class _Elsewhere(Tensor):
    """The shape of what a layer of another rank remembers. It stays one when it is copied."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {k: x for k, x in (kwargs or {}).items() if k != "device"}
        if func in (Tensor.cpu, Tensor.cuda):
            return args[0]
        if func is Tensor.to:
            args = [getattr(x, "dtype", x) if i else x for i, x in enumerate(args)]
            args = [x for x in args if not isinstance(x, str | torch.device)]
            if not named and len(args) == 1:
                return args[0]
        return super().__torch_function__(func, types, args, named)  # type: ignore[no-untyped-call]


def _is_cache(value: object) -> bool:
    return is_imported_kind(value, "transformers.cache_utils", "Cache")


def _parts_of(cache: Any) -> list[Any]:
    """Returns the caches inside of one: that of an encoder-decoder has two."""
    parts = (getattr(cache, f"{name}_attention_cache", None) for name in ("self", "cross"))
    return [part for part in parts if part is not None] or [cache]


def _said(value: Any) -> Any:
    """Returns the attributes of an entry as plain data: of a tensor the shape."""
    if isinstance(value, Tensor):
        is_number = value.numel() == 1 and not value.is_floating_point()  # such as a length
        at = value.item() if is_number and not value.is_meta else None
        return ["tensor", tuple(value.shape), value.dtype, at]
    if isinstance(value, dict):
        said = {key: _said(x) for key, x in value.items()}
        return ["dict", {key: x for key, x in said.items() if x is not None}]
    if isinstance(value, torch.device):
        return ["device"]
    return ["value", value] if isinstance(value, (*_ATOMS, torch.dtype)) else None


def _described(said: Any, device: torch.device) -> Any:
    """Returns what `_said` stands for, with tensors on the meta device."""
    kind, *of = said
    if kind == "tensor":
        shape, dtype, at = of
        if at is not None:
            return torch.full(shape, at, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device="meta").as_subclass(_Elsewhere)
    if kind == "device":
        return torch.device("meta")
    return {k: _described(x, device) for k, x in of[0].items()} if kind == "dict" else of[0]


def _packed(value: Any, tensors: list[Tensor], caches: Sequence[Any]) -> Any:
    """Returns what a layer returned as plain data, and collects its tensors."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", tuple(value.shape), value.dtype]
    if type(value) in (tuple, list):
        return [type(value).__name__, [_packed(x, tensors, caches) for x in value]]
    if type(value) is dict:
        return ["dict", {key: _packed(x, tensors, caches) for key, x in value.items()}]
    if isinstance(value, _ATOMS):
        return ["value", value]
    number = next((i for i, cache in enumerate(caches) if cache is value), None)
    if number is None:
        raise StepError(
            f"it returns a {type(value).__name__}, which cannot be sent: gather the model by "
            f"cut.gather(), and generate there"
        )
    return ["cache", number]


def _unpacked(packed: Any, caches: Sequence[Any], tensor: Callable[..., Tensor]) -> Any:
    kind, *of = packed
    if kind == "tensor":
        return tensor(*of)
    if kind == "dict":
        return {key: _unpacked(x, caches, tensor) for key, x in of[0].items()}
    if kind in ("tuple", "list"):
        items = [_unpacked(x, caches, tensor) for x in of[0]]
        return tuple(items) if kind == "tuple" else items
    return caches[of[0]] if kind == "cache" else of[0]


def generate(
    uncut: nn.Module,
    parts: Sequence[Part],
    held: Sequence[int],
    topology: Topology | None,
    *,
    inputs: Sequence[object],
    named: Mapping[str, object],
) -> Any:
    """Returns what ``generate`` of the uncut model returns; see `Cut.generate`.

    Args:
        uncut: The model of transformers or peft, on the meta device.
        parts: All stages.
        held: Those of this rank.
        topology: With the stages of ranks; None if this process has them all.
        inputs: Of ``generate``, by position.
        named: Of ``generate``, by name.
    """
    stages = [part.module for part in parts]
    device = next(p.device for stage in held for p in stages[stage].parameters())
    link = Link(topology, device)

    def check() -> str:
        config = named.get("generation_config") or getattr(uncut, "generation_config", None)
        if named.get("max_time", getattr(config, "max_time", None)) is not None:
            raise StepError("max_time would end the text of each rank at another token: leave it")
        if getattr(uncut.config, "rescale_every", 0):
            raise StepError(
                "the model divides its weights by powers of two when it generates, and they are "
                "trained: gather the model by cut.gather(), and generate there"
            )
        if lost := _lost(uncut, stages):
            raise StepError(
                f"no stage has {listed(lost)}: the sample of the cut did not use it, and "
                f"generate() may. Gather the model by cut.gather(), and generate there"
            )
        if any(is_fsdp2(x) for stage in held for x in stages[stage].modules()):
            raise StepError(
                "FSDP2 shards the stages, and gathers layers in a step alone: gather the model by "
                "cut.gather(), and generate there"
            )
        leaves = tree_flatten((inputs, dict(named)))[0]
        return " ".join(_digest(x) for x in leaves if isinstance(x, (*_ATOMS, Tensor)))

    if topology is not None:
        digests = agree("generate", check, ranks=link.ranks)
        same("what to generate from", dict(zip(link.ranks, digests, strict=True)))
    else:
        check()
    needed = frozenset[str]().union(*(part.used for part in parts))
    with torch.no_grad(), evaluating([stages[i] for i in held]):
        model = _shared_model(uncut, stages, held, link, needed)
        with Bounded("generate()"), _draws_of_first(link):
            # A graph of compiled code would have messages between ranks inside.
            return model.generate(*inputs, **{"disable_compile": True, **named})


def _lost(uncut: nn.Module, stages: Sequence[nn.Module]) -> list[str]:
    """Returns the parameters of an uncut model that no stage has."""
    known = tensors_by_name(uncut)
    there = {id(known[n]) for stage in stages for n in tensors_by_name(stage) if n in known}
    return [n for n, x in known.items() if isinstance(x, nn.Parameter) and id(x) not in there]


def _digest(value: object) -> str:
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{tuple(value.shape)} {hashlib.sha256(content).hexdigest()[:12]}"
    return repr(value)


@contextlib.contextmanager
def _draws_of_first(link: Link) -> Iterator[None]:
    """Lets all ranks draw the random numbers of the first rank; only there they count as drawn."""
    on_device = () if link.device.type == "cpu" else (link.device,)
    devices = [torch.get_device_module(device) for device in on_device]
    first = link.ranks[0]
    if link.here == first:
        states = [torch.get_rng_state(), *(x.get_rng_state(link.device) for x in devices)]
        link.send(states)
        yield
        return
    cpu, *others = link.receive(first)
    with torch.random.fork_rng(on_device, device_type=link.device.type):
        torch.set_rng_state(cpu)
        for module, state in zip(devices, others, strict=True):
            module.set_rng_state(state, link.device)
        yield


def _shared_model(
    uncut: nn.Module,
    stages: Sequence[nn.Module],
    held: Sequence[int],
    link: Link,
    needed: Collection[str],
) -> Any:
    """Returns a copy of the uncut model whose layers all ranks of a pipeline call together.

    All ranks call it. The layers of this rank are those of its stages.

    Args:
        uncut: The uncut model.
        stages: All of them.
        held: Those of this rank.
        link: Between the ranks.
        needed: Names of what code between layers uses on any stage: it runs on every rank.
    """
    layers = _layers_of(stages, link)
    here: dict[str, Tensor] = {}
    for stage in held:
        here |= tensors_by_name(stages[stage])
    if len(link.ranks) > 1:
        here |= dict(collected(here, {name for name in needed if name not in here}))
    known = tensors_by_name(uncut)
    values = {id(known[name]): x for name, x in here.items() if name in known}
    # The stages may have been converted behind the cut.
    floats = {name: x for name, x in here.items() if name in known and x.is_floating_point()}
    dtypes = {known[name].dtype: x.dtype for name, x in floats.items()}

    def value(tensor: Tensor) -> Tensor:
        if id(tensor) in values:
            return values[id(tensor)]
        if not tensor.is_meta:
            return tensor.to(link.device)
        new = filled(tensor.shape, dtypes.get(tensor.dtype, tensor.dtype), link.device)
        return nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new

    leaves = chain.from_iterable(tree_flatten(vars(part))[0] for part in uncut.modules())
    memo: dict[int, Any] = {id(x): value(x) for x in leaves if isinstance(x, Tensor)}
    memo |= {
        id(uncut.get_submodule(name)): twin(stages[stage].get_submodule(name))
        for name, (stage, _) in layers.items()
        if stage in held
    }
    model: Any = copy.deepcopy(uncut, memo)
    for name, (_, layer) in layers.items():
        shared = as_kind(model.get_submodule(name), SharedLayer)
        vars(shared)["_pipegrad_shared"] = layer
    return model.eval()


def _layers_of(stages: Sequence[nn.Module], link: Link) -> dict[str, tuple[int, _Layer]]:
    """Returns each layer by name, with the first stage that has it."""
    layers = dict[str, tuple[int, _Layer]]()
    for stage, module in enumerate(stages):
        for name, part in module.named_modules():
            if not isinstance(part, OwnLayer) or name in layers:
                continue
            parts: Iterable[Any] = part.modules()
            indices = {x.layer_idx for x in parts if hasattr(x, "layer_idx")} - {None}
            calls = vars(part)["_pipegrad_run"][0].flow.calls
            changes = dict.fromkeys(c for x in calls if x.layer == name for c in x.changes)
            given = tuple(c for c in changes if not (c.is_inside or c.is_heard))
            rank = link.rank_of(stage)
            layers[name] = stage, _Layer(name, rank, link, tuple(sorted(indices)), given)
    return layers
