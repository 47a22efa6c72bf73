"""Generation: transformers' own ``generate`` on every rank of a pipeline, over layers of all ranks.

[Note: generation] Every rank has a copy of the uncut model without memory, in which the layers of
its stages are the real ones. On each rank transformers runs the same loop over this copy. Each
layer runs on its own rank, which sends the layer's outputs to the other ranks. All ranks choose the
same tokens, because all code between layers, encoders, beams, processors and criteria gets the same
values everywhere.

The states of a layer are only in the cache of the layer's rank. On other ranks, the cache entry is
on the meta device and has the same shapes, also after a copy to another device, because lengths
and masks depend on them. The attributes of an entry travel with the result of the layer.
"""
# ruff: noqa: ANN401 - layers take and return anything

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad.comm import plain
from pipegrad.comm.activity import Activity
from pipegrad.comm.agreement import agree, same
from pipegrad.comm.collectives import broadcast
from pipegrad.comm.watch import Bounded
from pipegrad.errors import StepError, following, in_words, refuse
from pipegrad.interop.private import tree_flatten, tree_map
from pipegrad.model.wrappers import is_fsdp2, is_imported_kind
from pipegrad.partition.cutting.calls import Change, Watch, apply, find, roots_of
from pipegrad.partition.cutting.copies import like, twin, with_class, with_tensors
from pipegrad.partition.cutting.layers import Part
from pipegrad.partition.cutting.stage_module import OwnLayer
from pipegrad.partition.cutting.stand_ins import filled
from pipegrad.partition.hf.files import listed
from pipegrad.partition.hf.gathered import collected, tensors_by_name, tensors_of
from pipegrad.pipeline.scheduler import evaluating
from pipegrad.plugins.written import written
from pipegrad.topology import Topology

_MOST_BYTES = 2**15  # of the message of a layer
_MOST_SECONDS = 600.0  # for a message of a layer
_ATOMS = (type(None), bool, int, float, str, torch.dtype)
_TOLD = (*_ATOMS, torch.device, Tensor, dict)  # types of a cache entry's attributes to send
_CACHE = "transformers.cache_utils", "Cache"
_GATHER = "gather the model by cut.gather(), and generate there"


class Link:
    """Sends the outputs of layers to all ranks of a pipeline.

    Attributes:
        ranks: The global ranks of the pipeline.
        here: The global rank of this process.
        is_inside: True while a layer of this rank runs.
    """

    def __init__(self, topology: Topology | None, device: torch.device) -> None:
        self.topology = topology
        self._group = None if topology is None else topology.group_along(topology.pipeline)
        self.ranks = (0,) if topology is None else topology.ranks_along(topology.pipeline)
        self.here = 0 if topology is None else dist.get_rank()
        self.device = device
        self.is_inside = False

    def send(self, message: object, tensors: Sequence[Tensor] = ()) -> None:
        """Sends plain data and tensors to all other ranks. Sync: the current stream."""
        if len(self.ranks) == 1:
            return
        content = plain.dumps(message).ljust(_MOST_BYTES)
        if len(content) > _MOST_BYTES:
            raise StepError(f"it returns too many values for a message: {_GATHER}")
        head = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device)
        for tensor in (head, *tensors):
            self._broadcast(tensor.detach().contiguous(), self.here)

    def receive(self, rank: int) -> Any:
        """Returns the plain data that a rank sends. The host waits for it."""
        head = self.tensor((_MOST_BYTES,), torch.uint8, rank)
        return plain.loads(head.cpu().numpy().tobytes())

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
        """Returns a tensor that a rank sends."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self._broadcast(tensor, rank)
        return tensor

    def shared(self, tensors: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Returns the tensors of one rank on all ranks; `tensors` of the others are ignored."""
        if rank != self.here:
            return [self.tensor(shape, dtype, rank) for shape, dtype in self.receive(rank)]
        self.send([(tuple(tensor.shape), tensor.dtype) for tensor in tensors], tensors)
        return list(tensors)

    def _broadcast(self, tensor: Tensor, rank: int) -> None:
        if tensor.numel():
            memory = tensor.reshape(-1).view(torch.uint8)  # backends do not send every dtype
            with Activity("generate()", self.ranks, within_seconds=_MOST_SECONDS):
                broadcast(memory, rank, self._group)


@dataclass(frozen=True)
class _Layer:
    """The position of a `SharedLayer` in the model, in the cache and among the ranks.

    Attributes:
        name: Name in the uncut model.
        rank: The global rank that runs it.
        link: Link to the other ranks.
        indices: Indices of its entries in a cache.
        changes: Changes of its arguments, which other layers may read; see [Note: changes].
    """

    name: str
    rank: int
    link: Link
    indices: tuple[int, ...]
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class CacheAt:
    """In a message: one of the caches that the layer was given."""

    number: int


class SharedLayer(nn.Module):
    """A layer that one rank of a pipeline runs for all of them."""

    def _pipegrad_call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the layer, or receives its result."""
        layer: _Layer = vars(self)["_pipegrad_shared"]
        link = layer.link
        caches = [x for x in (*args, *kwargs.values()) if is_imported_kind(x, *_CACHE)]
        if layer.rank != link.here and link.is_inside:
            words = f"a layer calls layer {layer.name!r}, which is on another rank: {_GATHER}"
            raise StepError(words)
        if layer.rank != link.here:
            return _received(layer, caches, roots_of(self, args, kwargs))
        if link.is_inside:
            return call(*args, **kwargs)
        link.is_inside = True
        before = [plain.dumps(entry) for entry in _entries(layer, caches)]
        watch, tensors = Watch(self, args, kwargs, layer.changes), list[Tensor]()
        try:
            result = call(*args, **kwargs)
            packed = _packed([result, watch.values()], caches, tensors)
            # Send only entries that have changed, because a layer that shares modules with others
            # also has their entries.
            entries = [x for x in _entries(layer, caches) if plain.dumps(x) not in before]
            link.send([packed, entries], tensors)
        except Exception as error:
            link.send(in_words(error))
            raise
        finally:
            link.is_inside = False
        return result


def _received(layer: _Layer, caches: Sequence[Any], roots: Mapping[str, Any]) -> Any:
    """Returns the result of another rank's layer, and applies the layer's changes."""
    link = layer.link
    message = link.receive(layer.rank)
    if isinstance(message, str):
        words = f"layer {layer.name!r} failed on rank {layer.rank}: {message}"
        raise following(StepError(words))
    packed, entries = message
    result, changed = _unpacked(packed, caches, lambda x: link.tensor(x.shape, x.dtype, layer.rank))
    for change, values in zip(layer.changes, changed, strict=True):
        if values:
            apply(change, values, find(roots, change.path))

    def remote(x: Tensor) -> Tensor:
        return x.as_subclass(_RemoteCache) if x.is_meta else x.to(link.device)

    parts = [part for cache in caches for part in _parts_of(cache)]
    for at, index, flag, state in entries:
        cache, part = parts[at]
        while len(part.layers) <= index:
            part.layers.append(part.layer_class_to_replicate())
        vars(part.layers[index]).update(_unpacked(state, caches, remote))
        if flag is not None:
            cache.is_updated[index] = flag
    return result


def _entries(layer: _Layer, caches: Sequence[Any]) -> list[Any]:
    """Returns the attributes of the layer's cache entries as plain data."""
    parts = [part for cache in caches for part in _parts_of(cache)]
    entries = list[Any]()
    for at, (cache, part) in enumerate(parts):
        flags = getattr(cache, "is_updated", None) or {}
        for i in layer.indices:
            if i < len(part.layers):
                held = {k: x for k, x in vars(part.layers[i]).items() if isinstance(x, _TOLD)}
                entries.append((at, i, flags.get(i), _packed(held, ())))
    return entries


class _RemoteCache(Tensor):
    """A cache entry of another rank's layer: it has a shape only, also after a copy."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.cpu, Tensor.cuda, Tensor.to):  # of any dtype, because no code reads it
            return args[0]
        named = {k: x for k, x in (kwargs or {}).items() if k != "device"}
        return super().__torch_function__(func, types, args, named)  # type: ignore[no-untyped-call]


def _parts_of(cache: Any) -> list[tuple[Any, Any]]:
    """Returns a cache with each cache inside of it: an encoder-decoder's cache has two."""
    parts = (getattr(cache, f"{name}_attention_cache", None) for name in ("self", "cross"))
    return [(cache, part) for part in parts if part is not None] or [(cache, cache)]


def _packed(value: Any, caches: Sequence[Any], tensors: list[Tensor] | None = None) -> Any:
    """Returns a value as plain data, with tensors on the meta device instead of its tensors."""

    def packed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            is_number = leaf.numel() == 1 and not (leaf.is_floating_point() or leaf.is_meta)
            if tensors is not None:
                tensors.append(leaf)
            elif is_number:  # such as a length
                return leaf.cpu()
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        if isinstance(leaf, torch.device):
            return torch.device("meta")
        number = next((i for i, cache in enumerate(caches) if cache is leaf), None)
        if number is None and not isinstance(leaf, _ATOMS):
            raise StepError(f"it returns a {type(leaf).__name__}, which cannot be sent: {_GATHER}")
        return leaf if number is None else CacheAt(number)

    return tree_map(packed, value, is_leaf=lambda x: type(x) not in (tuple, list, dict))


def _unpacked(packed: Any, caches: Sequence[Any], tensor_of: Callable[[Tensor], Tensor]) -> Any:
    """Returns the value that `_packed` packed, with tensors for the tensors on the meta device."""

    def unpacked(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return tensor_of(leaf)
        return caches[leaf.number] if isinstance(leaf, CacheAt) else leaf

    return tree_map(unpacked, packed)


def generate(
    uncut: nn.Module,
    parts: Sequence[Part],
    held: Sequence[int],
    topology: Topology | None,
    *,
    inputs: Sequence[object],
    named: Mapping[str, object],
) -> Any:
    """Returns the result of the uncut model's ``generate``; see `Cut.generate`."""
    stages = [part.module for part in parts]
    device = next(p.device for stage in held for p in stages[stage].parameters())
    link = Link(topology, device)

    def check() -> str:
        config = named.get("generation_config") or getattr(uncut, "generation_config", None)
        known = tensors_by_name(uncut)
        there = {id(known[n]) for stage in stages for n in tensors_by_name(stage) if n in known}
        lost = [n for n, x in uncut.named_parameters() if id(x) not in there]
        parts = [part for stage in held for part in stages[stage].modules()]
        refuse(
            StepError,
            {
                "max_time would end the text of each rank at another token: leave it": (
                    named.get("max_time", getattr(config, "max_time", None)) is not None
                ),
                f"the model divides its weights by powers of two when it generates, and they are "
                f"trained: {_GATHER}": getattr(uncut.config, "rescale_every", 0),
                f"no stage has {listed(lost)}: the sample of the cut did not use it, and "
                f"generate() may: {_GATHER}": lost,
                f"FSDP2 shards the stages, and gathers layers in a step alone: {_GATHER}": any(
                    map(is_fsdp2, parts)
                ),
            },
        )
        leaves = tree_flatten((inputs, dict(named)))[0]
        return written([x for x in leaves if isinstance(x, (*_ATOMS, Tensor))])

    if topology is not None:
        digests = agree("generate", check, ranks=link.ranks)
        same("what to generate from", dict(zip(link.ranks, digests, strict=True)))
    else:
        check()
    needed = frozenset[str]().union(*(part.used for part in parts))
    with torch.no_grad(), evaluating([stages[i] for i in held]):
        model = _shared_model(uncut, stages, held, link, needed)
        with Bounded("generate()"), _draws_of_first(link):
            # Without compilation, because a compiled graph cannot have messages between ranks.
            return model.generate(*inputs, **{"disable_compile": True, **named})


@contextlib.contextmanager
def _draws_of_first(link: Link) -> Iterator[None]:
    """Lets all ranks draw the first rank's random numbers; the others keep their own state."""
    on_device = () if link.device.type == "cpu" else (link.device,)
    devices = [torch.get_device_module(device) for device in on_device]
    states = [torch.get_rng_state(), *(x.get_rng_state(link.device) for x in devices)]
    cpu, *others = link.shared([state.to(link.device) for state in states], link.ranks[0])
    forked = torch.random.fork_rng(on_device, device_type=link.device.type)
    with contextlib.nullcontext() if link.here == link.ranks[0] else forked:
        torch.set_rng_state(cpu.cpu())
        for module, state in zip(devices, others, strict=True):
            module.set_rng_state(state.cpu(), link.device)
        yield


def _shared_model(
    uncut: nn.Module,
    stages: Sequence[nn.Module],
    held: Sequence[int],
    link: Link,
    needed: Collection[str],
) -> Any:
    """Returns a copy of the uncut model whose layers all ranks of a pipeline call together.

    All ranks call it. On each rank, the layers of its stages are the stages' own.
    """
    layers = _layers_of(stages, link)
    here = tensors_of([stages[stage] for stage in held], {})
    if len(link.ranks) > 1:
        here |= dict(collected(here, {name for name in needed if name not in here}))
    known = tensors_by_name(uncut)
    values = {id(known[name]): x for name, x in here.items() if name in known}
    # Dtypes of the stages, because they may have been converted after the cut.
    floats = {name: x for name, x in here.items() if name in known and x.is_floating_point()}
    dtypes = {known[name].dtype: x.dtype for name, x in floats.items()}

    def value(tensor: Tensor) -> Tensor:
        if id(tensor) in values:
            return values[id(tensor)]
        if not tensor.is_meta:
            return tensor.to(link.device)
        new = filled(tensor.shape, dtypes.get(tensor.dtype, tensor.dtype), link.device)
        return like(tensor, new)

    memo = {
        id(uncut.get_submodule(name)): twin(stages[stage].get_submodule(name))
        for name, (stage, _) in layers.items()
        if stage in held
    }
    model: Any = with_tensors(uncut, value, memo)
    for name, (_, layer) in layers.items():
        shared = with_class(model.get_submodule(name), SharedLayer)
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
            rank = 0 if link.topology is None else link.topology.ranks_of([stage])[0]
            layers[name] = stage, _Layer(name, rank, link, tuple(sorted(indices)), given)
    return layers
