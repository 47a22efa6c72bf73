"""An optimizer of main parameters, whose state has names of the uncut model."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from pipegrad.errors import PlanError
from pipegrad.gradients.chunks import Chunk
from pipegrad.gradients.joined_optimizer import JoinedOptimizer
from pipegrad.gradients.main_params import (
    MainParameter,
    NamedGroupOf,
    group_keys,
    grouped,
)
from pipegrad.gradients.names import uncut_names
from pipegrad.gradients.parts import Part
from pipegrad.plugins.handler import ParameterRecord
from pipegrad.plugins.written import written

_MASTER = "master"  # the name of a master copy, among the state of its parameter

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def named_optimizer(
    parts: Sequence[Part],
    group_of: NamedGroupOf | None,
    *,
    sharded: Container[str],
    main_parameters: Sequence[MainParameter],
    locations: Mapping[str, str],
    joined_locations: Mapping[str, str],
    strides: Mapping[str, Sequence[int]],
) -> tuple[torch.optim.Optimizer, str]:
    """Returns an optimizer of the main parameters of this rank, and a text to compare with others.

    Args:
        parts: Of `parts_of`; if there are several, they become one optimizer.
        group_of: Name and parameter on the meta device -> options of its group.
        sharded: Keys of parameters that are stepped in shards.
        main_parameters: Of this rank.
        locations: Key -> where along the mesh this rank's copy lives, as in ``"[tp=1]"``.
        joined_locations: The same in a run whose replicas do not train alone.
        strides: Key -> strides of the parameter in its module.

    Raises:
        PlanError: As `Part.made`.
    """
    names = uncut_names([record for part in parts for record in part.records])

    def options_of(record: ParameterRecord) -> Mapping[str, Any]:
        shown = nn.Parameter(torch.empty(record.shape, dtype=record.dtype, device="meta"))
        return {} if group_of is None else group_of(names[record.key], shown) or {}

    groups_of_parts = [group_keys(part.records, options_of) for part in parts]
    made = [
        part.made(grouped(groups, main_parameters), sharded)
        for part, groups in zip(parts, groups_of_parts, strict=True)
    ]
    optimizer = made[0] if len(made) == 1 else JoinedOptimizer(made)
    groups = [group for groups in groups_of_parts for group in groups]
    named = {names[main.record.key] + locations[main.record.key]: main for main in main_parameters}
    joined = {n: names[m.record.key] + joined_locations[m.record.key] for n, m in named.items()}
    names_of_groups = [[names[key] for key in keys] for _, keys in groups]
    NamedState(optimizer, named, names_of_groups, strides=strides, joined=joined)
    described = [
        f"{written(own)} for {len(keys)} parameters ({_digest(keys)})" for own, keys in groups
    ]
    return optimizer, f"{', '.join(map(str, parts))}; groups: {', '.join(described)}"


def _digest(keys: Sequence[str]) -> str:
    return hashlib.sha256(repr(keys).encode()).hexdigest()[:8]


class NamedState:
    """Makes ``state_dict`` and ``load_state_dict`` of an optimizer use names.

    The format is torch's, with names in the places of its numbers: ``"state"`` has this rank's
    parameters, and ``"param_groups"`` those of all ranks, so it is the same on all of them. The
    state of a shard is a `Chunk` of the whole parameter. A master copy is the state ``"master"``.

    Args:
        optimizer: The optimizer.
        main_parameters: Name -> what it steps. Names have locations.
        groups: The names of each group's parameters on all ranks, without locations.
        strides: Key -> strides of the parameter in its module.
        joined: Name -> the name in a run whose replicas do not train alone.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        main_parameters: Mapping[str, MainParameter],
        groups: Sequence[Sequence[str]],
        *,
        strides: Mapping[str, Sequence[int]],
        joined: Mapping[str, str],
    ) -> None:
        self._joined = joined
        self._main_parameters = main_parameters
        self._strides = strides
        self._names = {id(main.tensor): name for name, main in main_parameters.items()}
        self._groups = [list(group) for group in groups]
        optimizer.register_state_dict_post_hook(self._named)
        optimizer.register_load_state_dict_pre_hook(self._numbered)

    def _named(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns a ``state_dict`` of torch with names."""
        names = dict(self._numbers(optimizer))
        state: dict[Any, dict[str, Any]] = {
            name: {_MASTER: _saved(main, main.tensor.detach())}
            for name, main in self._main_parameters.items()
            if main.copied
        }
        for number, values in state_dict["state"].items():
            # The caller may have added parameters of its own; they have no name.
            name = names.get(number, number)
            main = self._main_parameters.get(name)
            state.setdefault(name, {}).update(
                {key: _saved(main, value) if main else value for key, value in values.items()}
            )
        named = [
            {**group, "params": list(names_of_all)}
            for group, names_of_all in zip(state_dict["param_groups"], self._groups, strict=False)
        ]
        groups = [*named, *state_dict["param_groups"][len(named) :]]
        return {**state_dict, "state": state, "param_groups": groups}

    def _numbered(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns a ``state_dict`` of torch, for this rank; sets master copies.

        Raises:
            PlanError: If it is of another model, or has other groups or shards.
        """
        saved, own = state_dict["param_groups"], [_identity(group) for group in self._groups]
        by_names = {_identity(group["params"]): group for group in saved[: len(own)]}
        if by_names.keys() != set(own) or len(saved) != len(optimizer.param_groups):
            raise PlanError(_other_groups(self._groups, [group["params"] for group in saved]))
        groups, first = [], 0
        ordered = [*(by_names[group] for group in own), *saved[len(own) :]]
        for group, present in zip(ordered, optimizer.param_groups, strict=True):
            count = len(present["params"])
            groups.append({**group, "params": list(range(first, first + count))})
            first += count
        names, state = dict(self._numbers(optimizer)), {}
        for number in range(first):
            name = names.get(number, number)
            main = self._main_parameters.get(str(name))
            if main is not None and name not in state_dict["state"]:
                # It was saved where all ranks had one state, as before a run whose replicas train
                # alone.
                name = self._joined[str(name)]
            if name in state_dict["state"]:
                values = state_dict["state"][name]
                state[number] = self._loaded(main, values) if main else values
        return {**state_dict, "state": state, "param_groups": groups}

    def _loaded(self, main: MainParameter, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of a parameter's state; sets its master copy."""
        stride = self._strides[main.record.key]
        values = {key: _own(main, value, stride) for key, value in saved.items()}
        master = values.pop(_MASTER, None)
        if master is not None and main.copied:
            # `.data` has its own version counter: this is no step of the optimizer.
            main.tensor.data.copy_(master)
        return values

    def _numbers(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str]]:
        """Yields torch's number and our name of each parameter of the optimizer."""
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        for number, tensor in enumerate(tensors):
            if id(tensor) in self._names:
                yield number, self._names[id(tensor)]


def _identity(names: Sequence[object]) -> tuple[str, ...]:
    return tuple(sorted(map(str, names)))


def _other_groups(own: Sequence[Sequence[str]], saved: Sequence[Sequence[object]]) -> str:
    """Returns the message for a state of other groups, or of another model."""
    here, there = ({str(name) for group in groups for name in group} for groups in (own, saved))
    if here == there:
        return (
            f"the optimizer's state has groups of {[len(group) for group in saved]} parameters, "
            f"expected {[len(group) for group in own]}: give the group_of, and the others, of the "
            f"run that saved it"
        )
    return (
        f"the optimizer's state is of another model: it has {sorted(there - here)[:4]}, which are "
        f"not here, and lacks {sorted(here - there)[:4]}. Load the state_dict() of an optimizer "
        f"that sync.optimizer() made: it has names of the uncut model"
    )


def _is_per_element(main: MainParameter, value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == main.tensor.shape


def _saved(main: MainParameter, value: Any) -> Any:  # noqa: ANN401 - state of any optimizer
    """Returns a value of a parameter's state; that of a shard's elements as a `Chunk`."""
    if not (main.sharded and _is_per_element(main, value)):
        return value
    return Chunk.of(value.detach().reshape(-1), main.begin, main.record.numel)


def _own(main: MainParameter, value: Any, stride: Sequence[int]) -> Any:  # noqa: ANN401 - as above
    """Returns this rank's part of a value: of a `Chunk`, or of the whole parameter.

    Args:
        main: What this rank steps.
        value: As saved.
        stride: Of the parameter in its module. Shards lie in the order of its memory.

    Raises:
        PlanError: If a chunk is of other elements.
    """
    tensor, record = main.tensor, main.record
    if isinstance(value, Chunk):
        if (value.begin, *value.local.shape, *value.shape) != (
            main.begin,
            tensor.numel(),
            record.numel,
        ):
            raise PlanError(
                f"the optimizer's state of {record.key!r} has {value.local.numel()} elements from "
                f"{value.begin} on, and this rank steps {tensor.numel()} from {main.begin} on: it "
                f"is of another rank or cut. Save and load it by torch.distributed.checkpoint"
            )
        return value.local.view_as(tensor)
    is_whole = isinstance(value, torch.Tensor) and value.numel() == record.numel and value.ndim > 0
    if not is_whole or _is_per_element(main, value):
        return value
    if not main.sharded:  # it may be flat, of a run that sharded it
        return value.as_strided(tensor.shape, tensor.stride()) if value.ndim == 1 else value
    if value.ndim > 1:
        in_order = torch.empty_strided(record.shape, stride, dtype=value.dtype, device=value.device)
        value = in_order.copy_(value).as_strided((record.numel,), (1,))
    # A view would keep the memory of the whole.
    return value[main.begin : main.begin + tensor.numel()].clone()
