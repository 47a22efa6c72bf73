"""Gathered: sends values of stages to the ranks that need them, one tensor after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegrad.comm.agreement import AGREE_SECONDS, agree, agree_keeping, slow_seconds
from pipegrad.comm.collectives import VALUES, receive, send
from pipegrad.comm.watch import Bounded
from pipegrad.errors import TopologyError, WeightsError
from pipegrad.model.dtensor import is_dtensor
from pipegrad.model.ties import plain_name
from pipegrad.partition.hf.files import listed, put

# Name -> tensors by id, each with the modules and attributes that have it.
_Places = dict[str, dict[int, tuple[Tensor, list[tuple[nn.Module, str]]]]]


def tensors_of(modules: Collection[nn.Module], first: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns the parameters and buffers of stages, by the one name of each; see `first_names`."""
    named = chain.from_iterable(tensors_by_name(module).items() for module in modules)
    names = ((plain_name(name), tensor) for name, tensor in named)
    return {first.get(name, name): tensor for name, tensor in names}


def collected(held: Mapping[str, Tensor], wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields the wanted tensors by name, from this rank or from other ranks. All ranks call it.

    Host and device need memory for one tensor at a time. DTensors are gathered.

    Raises:
        AgreementError: If a rank does not call it.

    Sync: the host waits for each message, and on a device the current stream.
    """
    held = {name: tensor for name, tensor in held.items() if not tensor.is_meta}
    device = next((tensor.device for tensor in held.values()), torch.device("cpu"))
    seconds = slow_seconds(device, AGREE_SECONDS)
    specs = {name: (tuple(x.shape), x.dtype) for name, x in held.items()}
    replies = agree("gather the stages", lambda: (specs, sorted(wanted)), timeout_seconds=seconds)
    here, ranks = (dist.get_rank() if dist.is_initialized() else 0), range(len(replies))
    wants = [frozenset(names) for _, names in replies]
    for name in sorted(frozenset[str]().union(*wants)):
        holders = [rank for rank in ranks if name in replies[rank][0]]
        if not holders:
            continue
        tensor = held.get(name)
        if tensor is not None:
            tensor = (tensor.full_tensor() if is_dtensor(tensor) else tensor).detach().contiguous()
        takers = [rank for rank in ranks if name in wants[rank] and rank not in holders]
        if here in takers:
            shape, dtype = replies[holders[0]][0][name]
            tensor = torch.empty(shape, dtype=dtype, device=device)
        if tensor is None:
            continue
        memory = tensor.reshape(-1).view(torch.uint8)  # backends do not send every dtype
        for rank in takers if len(memory) else ():
            with Bounded("gather()", tuple(ranks), within_seconds=seconds):
                if here == holders[0]:
                    send(memory, rank, None, VALUES).wait()
                elif here == rank:
                    receive(memory, holders[0], None, VALUES).wait()
        if name in wanted:
            yield name, tensor


@torch.no_grad()
def gather_stages(
    held: Mapping[str, Tensor], first: Mapping[str, str], model: nn.Module | None, cut: object
) -> None:
    """Puts the values of all stages into a model; see `Cut.gather`.

    Quantized weights are left out: they are frozen, and layers may pack them anew when they run.

    Args:
        held: The tensors of this rank's stages, by the first name of each.
        first: Any name of a tensor in the uncut model -> its first name.
        model: The model on this rank that gets the values; None for none.
        cut: The model that was cut; None if it no longer exists.
    """

    def check() -> tuple[_Places, tuple[dict[str, Any], dict[str, Any]]]:
        if without := [name for name, tensor in held.items() if tensor.is_meta]:
            raise WeightsError(f"{listed(without)} of a stage have no values: load it first")
        places = {} if model is None else _places_in(model, first, cut)
        wanted = {n: tuple(x.shape) for n, of in places.items() for x, _ in of.values()}
        return places, (wanted, {n: tuple(x.shape) for n, x in held.items()})

    places, replies = agree_keeping("gather the stages", check)
    true = {name: shape for _, shapes in replies for name, shape in shapes.items()}
    for name, shape in ((n, shape) for wanted, _ in replies for n, shape in wanted.items()):
        if shape != true.get(name, shape):
            raise WeightsError(f"{name} has shape {shape}, and in the stages {true[name]}")
    for name, value in collected(held, places.keys()):
        for tensor, of in places.pop(name).values():
            if tensor.is_meta:
                put(of, value.clone())
            else:
                tensor.copy_(value)
    nowhere = [name for name, of in places.items() if any(x.is_meta for x, _ in of.values())]
    if nowhere:  # the same on all ranks that have such a model
        raise WeightsError(f"no stage uses {listed(nowhere)}: give these values yourself")


def _places_in(model: nn.Module, first: Mapping[str, str], cut: object) -> _Places:
    """Returns the places of each name in a model.

    Raises:
        TopologyError: If it is the model that was cut.
        WeightsError: If it has other names or ties than the model that was cut.
    """
    if model is cut:
        raise TopologyError(
            "gather() was given the model that was cut, whose tensors are those of the stages: "
            "give another one, such as copy.deepcopy(model)"
        )
    tensors = tensors_by_name(model)
    if different := sorted(tensors.keys() ^ first.keys()):
        raise WeightsError(
            f"{type(model).__name__} is no twin of the model that was cut: only one of them has "
            f"{listed(different)}"
        )
    names, places = defaultdict[int, set[str]](set), defaultdict[str, dict[int, Any]](dict)
    for name, tensor in tensors.items():
        is_number = tensor.is_floating_point() or tensor.is_complex()
        if isinstance(tensor, nn.Parameter) and not is_number:
            continue  # a quantized weight
        path, _, attribute = name.rpartition(".")
        names[id(tensor)].add(first[name])
        _, of = places[first[name]].setdefault(id(tensor), (tensor, []))
        of.append((model.get_submodule(path), attribute))
    if tied := next((sorted(tied) for tied in names.values() if len(tied) > 1), None):
        raise WeightsError(f"the model ties {tied}, and the model that was cut does not")
    return dict(places)


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a model, a tied one under each of its names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return dict(chain(parameters, model.named_buffers(remove_duplicate=False)))
