"""An optimizer of main parameters, whose state has names of the uncut model.

It may consist of several, for example Muon for matrices, and AdamW for everything else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from pipegrad.errors import PlanError
from pipegrad.gradients.main_params import (
    Chunk,
    MainParameter,
    NamedGroupOf,
    group_keys,
    grouped,
    parted,
    refuse_unless_elementwise,
    uncut_names,
)
from pipegrad.model.dtensor import is_dtensor, local
from pipegrad.plugins.handler import ParameterRecord
from pipegrad.plugins.written import written

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Steps = Literal["everything", "matrices", "others"]

MASTER = "master"  # the name of a master copy, among the state of its parameter
# The advice for a parameter of Muon that does not have two dimensions.
_ADVICE: dict[Steps, str] = {
    "everything": "let another optimizer step what is no matrix, others=torch.optim.AdamW",
    "matrices": (
        "name it in the option 'others' of the handler 'owned', beside embeddings and heads; "
        "'data-parallel' has no such option, so use 'owned' instead"
    ),
    "others": (
        "Muon is given as others, which step what is no matrix; give torch.optim.AdamW there, and "
        "Muon as the first optimizer"
    ),
}


@dataclass(frozen=True)
class Part:
    """An optimizer to be made, and its parameters.

    Attributes:
        kind: A class or function of parameter groups and `options`.
        options: Arguments of `kind`.
        records: Its parameters, of all ranks.
        steps: Kind of the parameters. ``"matrices"`` and ``"others"`` are parts of one optimizer.
    """

    kind: Callable[..., torch.optim.Optimizer]
    options: Mapping[str, Any]
    records: Sequence[ParameterRecord]
    steps: Steps = "everything"

    def __str__(self) -> str:
        return f"{written(self.kind)} with {written(self.options)}"

    def make(self, groups: list[dict[str, Any]], sharded: Container[str]) -> torch.optim.Optimizer:
        """Returns the optimizer of some parameter groups.

        Args:
            groups: The parameter groups.
            sharded: Keys of parameters that are updated in shards.

        Raises:
            PlanError: As `check`, or if `kind` makes no optimizer.
        """
        self.check(sharded)  # before the error of torch, which names no parameter
        optimizer = self.kind(groups, **self.options)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PlanError(
                f"{written(self.kind)} made {type(optimizer).__name__}, expected an Optimizer"
            )
        return optimizer

    def check(self, sharded: Container[str]) -> None:
        """Refuses a class of optimizers that cannot step these parameters.

        If `kind` is a function, `OptimizerWatch` checks its optimizer before each step.

        Raises:
            PlanError: If it cannot step shards, and some are, or has vectors and takes none.
        """
        kind = self.kind.func if isinstance(self.kind, partial) else self.kind
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            return
        other = next((record for record in self.records if len(record.shape) != 2), None)
        if issubclass(kind, torch.optim.Muon) and other is not None:
            raise PlanError(
                f"Muon steps matrices of two dimensions, but {other.key!r} is {other.shape}: "
                f"{_ADVICE[self.steps]}"
            )
        if any(record.key in sharded for record in self.records):
            refuse_unless_elementwise(kind, as_others=self.steps == "others")


def parts_of(
    kind: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
    others: Callable[..., torch.optim.Optimizer] | None,
    *,
    records: Sequence[ParameterRecord],
    matrices: Collection[str],
) -> list[Part]:
    """Returns the optimizers to make, with the parameters of each.

    Args:
        kind: Steps matrices; all parameters if there are no `others`.
        options: Arguments of `kind`.
        others: Steps parameters that are no matrices.
        records: The trained parameters of all ranks.
        matrices: Keys of matrices, from a handler. If there are none, `ParameterRecord.is_matrix`
            decides.

    Raises:
        PlanError: If there is no parameter, or no matrix.
    """
    if not records:
        raise PlanError(
            "no parameter requires a gradient, so an optimizer has nothing to step. "
            "PeftModel.from_pretrained() freezes the adapter that it reads: give it "
            "is_trainable=True"
        )
    if others is None:
        return [Part(kind, options, records)]
    of_kind = [r for r in records if (r.key in matrices if matrices else r.is_matrix())]
    keys = {record.key for record in of_kind}
    of_others = [record for record in records if record.key not in keys]
    if not of_kind:
        raise PlanError(
            f"others={written(others)} steps what is no matrix, and no parameter is one, of "
            f"{records[0].key!r} and {len(records) - 1} more: leave others out"
        )
    parts = [
        Part(kind, options, of_kind, steps="matrices"),
        Part(others, {}, of_others, steps="others"),
    ]
    return [part for part in parts if part.records]


def refuse_given(parameters: Sequence[object], options: Mapping[str, object]) -> None:
    """Refuses parameters, or groups of them, which only torch's constructors accept.

    Raises:
        PlanError: If there are some.
    """
    if parameters or "params" in options:
        raise PlanError(
            "optimizer() was given parameters, and takes none: it steps all that are trained. To "
            "give some of them options of their own, use group_of=, a function of name and "
            "parameter that returns the options: group_of=lambda name, parameter: "
            "{'weight_decay': 0.0} if parameter.ndim < 2 else {}"
        )


def named_optimizer(
    parts: Sequence[Part],
    group_of: NamedGroupOf | None,
    *,
    sharded: Container[str],
    main_parameters: Sequence[MainParameter],
    locations: Mapping[str, str],
) -> tuple[torch.optim.Optimizer, str]:
    """Returns an optimizer of the main parameters of this rank, and a text to compare with others.

    Raises:
        PlanError: As `Part.make`.
    """
    names = uncut_names([record for part in parts for record in part.records])

    def options_of(record: ParameterRecord) -> Mapping[str, Any]:
        shown = nn.Parameter(torch.empty(record.shape, dtype=record.dtype, device="meta"))
        return {} if group_of is None else group_of(names[record.key], shown) or {}

    groups_of_parts = [group_keys(part.records, options_of) for part in parts]
    optimizers = [
        part.make(grouped(groups, main_parameters), sharded)
        for part, groups in zip(parts, groups_of_parts, strict=True)
    ]
    optimizer = optimizers[0] if len(optimizers) == 1 else JoinedOptimizer(optimizers)
    groups = [group for groups in groups_of_parts for group in groups]
    named = {names[main.record.key] + locations[main.record.key]: main for main in main_parameters}
    use_names(optimizer, named, [[names[key] for key in keys] for _, keys in groups])
    described = [
        f"{written(options)} for {len(keys)} parameters "
        f"({hashlib.sha256(repr(keys).encode()).hexdigest()[:8]})"
        for options, keys in groups
    ]
    return optimizer, f"{', '.join(map(str, parts))}; groups: {', '.join(described)}"


class JoinedOptimizer(torch.optim.Optimizer):
    """Steps several optimizers, one after the other.

    Learning-rate schedules, checkpoints and ``zero_grad`` see one optimizer, because it has the
    groups and the state of all of them.

    Args:
        parts: The optimizers. No two of them have the same parameter.

    Attributes:
        parts: The optimizers.
        defaults: Options that all parts have, as in the first one. For example, learning-rate
            schedules look there for a momentum.
        elementwise: True, because each part is checked separately before its step.
    """

    elementwise = True

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts: tuple[torch.optim.Optimizer, ...] = ()
        super().__init__([group for part in parts for group in part.param_groups], {})
        # Not before, because torch would add the defaults of one part to the groups of another.
        shared = set.intersection(*(set(part.defaults) for part in parts))
        self.defaults = {n: x for n, x in parts[0].defaults.items() if n in shared}
        self.parts = tuple(parts)
        for part in parts:
            self.state.update(part.state)
        self._share()

    def _share(self) -> None:
        """Makes the parts use the state and the groups of this optimizer."""
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            part.state, part.param_groups = self.state, self.param_groups[first:last]
            first = last

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps all parts; returns the loss of `closure`, if it is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses groups from outside, because the part that steps them would be unknown.

        Raises:
            PlanError: In each call after the constructor.
        """
        if self.parts:
            raise PlanError(
                f"add_param_group() of {' and '.join(type(part).__name__ for part in self.parts)} "
                f"as one optimizer: make another optimizer of these parameters"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # `load_state_dict` calls this with a new state and new groups. Call the method of each part
        # with its state and groups, because it may convert them after a load.
        super().__setstate__(state)
        self._share()
        for part in self.parts:
            tensors = {tensor for group in part.param_groups for tensor in group["params"]}
            own = {tensor: values for tensor, values in self.state.items() if tensor in tensors}
            part.__setstate__({"state": own, "param_groups": part.param_groups})
        self._share()


def parts_in(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Returns the optimizers of which one is made; itself, if it is not made of several."""
    return optimizer.parts if isinstance(optimizer, JoinedOptimizer) else (optimizer,)


def use_names(
    optimizer: torch.optim.Optimizer,
    mains: Mapping[str, MainParameter],
    groups: Sequence[Sequence[str]],
) -> None:
    """Makes ``state_dict`` and ``load_state_dict`` of an optimizer use names.

    The format is torch's, with names instead of its numbers. ``"state"`` has this rank's
    parameters. ``"param_groups"`` is equal on all ranks, because it has the parameters of all. The
    state of a shard is a `Chunk` of the whole parameter. A master copy is the state ``"master"``.

    Args:
        optimizer: The optimizer.
        mains: Name -> main parameter. Names have locations.
        groups: The names of each group's parameters on all ranks, without locations.
    """
    optimizer.register_state_dict_post_hook(partial(to_named, mains, groups))
    optimizer.register_load_state_dict_pre_hook(partial(from_named, mains, groups))


def to_named(
    mains: Mapping[str, MainParameter],
    groups: Sequence[Sequence[str]],
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
) -> dict[str, Any]:
    """Returns a ``state_dict`` of torch with names; see `use_names`."""
    names, saved = _names(optimizer, mains), state_dict["param_groups"]
    state: dict[str | int, dict[str, Any]] = {
        name: {MASTER: _saved(main, main.tensor.detach())}
        for name, main in mains.items()
        if main.copied
    }
    for number, values in state_dict["state"].items():
        main = mains.get(str(names[number]))
        kept = {key: _saved(main, value) if main else value for key, value in values.items()}
        state.setdefault(names[number], {}).update(kept)
    named = [{**group, "params": [*of_all]} for group, of_all in zip(saved, groups, strict=False)]
    return {**state_dict, "state": state, "param_groups": [*named, *saved[len(named) :]]}


def from_named(
    mains: Mapping[str, MainParameter],
    groups: Sequence[Sequence[str]],
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
) -> dict[str, Any]:
    """Returns a ``state_dict`` of torch, for this rank; sets master copies.

    Raises:
        PlanError: If it is of another model, has other groups or shards, or lacks state.
    """
    saved, state = state_dict["param_groups"], state_dict["state"]
    by_names = {_identity(group["params"]): group for group in saved[: len(groups)]}
    present = [_identity(group) for group in groups]
    if by_names.keys() != {*present} or len(saved) != len(optimizer.param_groups):
        raise PlanError(_other_groups(groups, [group["params"] for group in saved]))
    _refuse_missing(mains, {name for name in state if isinstance(name, str)})
    numbers = count()
    numbered = [
        {**group, "params": list(islice(numbers, len(own["params"])))}
        for group, own in zip(
            [*map(by_names.__getitem__, present), *saved[len(groups) :]],
            optimizer.param_groups,
            strict=True,
        )
    ]
    loaded: dict[int, dict[str, Any]] = {}
    for number, name in enumerate(_names(optimizer, mains)):
        if name not in state:
            continue
        loaded[number], main = state[name], mains.get(str(name))
        if main is not None:
            loaded[number] = {key: _of_rank(main, value) for key, value in state[name].items()}
            master = loaded[number].pop(MASTER, None)
            if master is not None and main.copied:
                # `.data`, because it has its own version counter: this is no optimizer's step.
                main.tensor.data.copy_(master)
    return {**state_dict, "state": loaded, "param_groups": numbered}


def _names(optimizer: torch.optim.Optimizer, mains: Mapping[str, MainParameter]) -> list[str | int]:
    """Returns the names of an optimizer's parameters by torch's number.

    Parameters that the caller has added have only their number.
    """
    names = {id(main.tensor): name for name, main in mains.items()}
    tensors = (tensor for group in optimizer.param_groups for tensor in group["params"])
    return [names.get(id(tensor), number) for number, tensor in enumerate(tensors)]


def _refuse_missing(mains: Mapping[str, MainParameter], saved: Collection[str]) -> None:
    """Refuses a state that would leave a parameter without the state that it had.

    Raises:
        PlanError: If a parameter has state in other locations alone, or if there is state, but
            none of this rank's parameters.
    """
    stems = {parted(name)[0] for name in saved}
    missing = [name for name in mains if name not in saved]
    has_none = bool(saved) and len(missing) == len(mains)
    # A parameter that is absent everywhere is no error, because it has no state without a gradient.
    apart = [name for name in missing if has_none or parted(name)[0] in stems]
    if apart:
        raise PlanError(
            f"the optimizer's state lacks {sorted(apart)[:4]}, which this rank steps; it has "
            f"{sorted(saved)[:4]}: load it with the handlers, and the mesh, of the run that "
            f"saved it, and on the rank that saved it unless it is whole; or begin with a new "
            f"optimizer. If a parameter had no state, because it had no gradient, give it an "
            f"empty one: state_dict['state'][{min(apart)!r}] = {{}}"
        )


def _identity(names: Sequence[object]) -> tuple[str, ...]:
    return tuple(sorted(map(str, names)))


def _other_groups(present: Sequence[Sequence[str]], saved: Sequence[Sequence[object]]) -> str:
    """Returns the message for a state of other groups, or of another model."""
    here, there = ({str(name) for group in groups for name in group} for groups in (present, saved))
    if here == there:
        return (
            f"the optimizer's state has groups of {[len(group) for group in saved]} parameters, "
            f"expected {[len(group) for group in present]}: give the group_of, and the others, of "
            f"the run that saved it"
        )
    return (
        f"the optimizer's state is of another model: it has {sorted(there - here)[:4]}, which are "
        f"not here, and lacks {sorted(here - there)[:4]}. Load the state_dict() of an optimizer "
        f"that sync.optimizer() made: it has names of the uncut model"
    )


def _saved(main: MainParameter, value: Any) -> Any:  # noqa: ANN401 - state of any optimizer
    """Returns a value of a parameter's state; as a `Chunk` if it has a shard's elements."""
    is_per_element = isinstance(value, torch.Tensor) and value.shape == main.tensor.shape
    if not (main.sharded and is_per_element):
        return value
    return Chunk.of(value.detach().reshape(-1), main.begin, main.record.numel)


def _of_rank(main: MainParameter, value: Any) -> Any:  # noqa: ANN401 - as above
    """Returns this rank's elements of a `Chunk`, a DTensor, or a value of the whole parameter.

    Raises:
        PlanError: If a chunk or a DTensor has other elements.
    """
    tensor = main.tensor
    if isinstance(value, Chunk) and value.local.numel() == value.numel():
        value = value.local
    if isinstance(value, Chunk) or is_dtensor(value):
        there, here = _layout(value), _layout(_saved(main, tensor.detach()))
        if there != here:
            raise PlanError(
                f"the optimizer's state of {main.record.key!r} has {there}, and this rank steps "
                f"{here}: it is of another rank, mesh or cut. Save and load it by "
                f"torch.distributed.checkpoint"
            )
        return value.local.view_as(tensor) if isinstance(value, Chunk) else value
    whole = tensor.shape if is_dtensor(tensor) else torch.Size(main.record.shape)
    # It may be flat, from a run that sharded it.
    is_whole = torch.is_tensor(value) and value.ndim and value.shape in (whole, (whole.numel(),))
    if is_whole and is_dtensor(tensor):
        from torch.distributed.tensor import distribute_tensor  # it is one: no slow import

        mesh, placements = tensor.device_mesh, tensor.placements
        # Without a source, each rank keeps its part, and nothing is sent.
        return distribute_tensor(value.view(whole), mesh, placements, src_data_rank=None)
    if not is_whole or value.shape == tensor.shape:
        return value
    if value.ndim > 1:  # elements of a shard are in the order of the parameter's memory
        in_order = value.new_empty_strided(whole, main.stride).copy_(value)
        value = in_order.as_strided((whole.numel(),), (1,))
    # Clone, because a view would keep the memory of the whole.
    elements = value[main.begin : main.begin + tensor.numel()].clone()
    return elements.as_strided(tensor.shape, tensor.stride())


def _layout(value: Any) -> str:  # noqa: ANN401 - a Chunk, a DTensor or a plain tensor
    """Returns a description of a rank's elements of a whole tensor."""
    own = value.local if isinstance(value, Chunk) else local(value)
    at = getattr(value, "begin", getattr(value, "placements", "all"))
    return f"{tuple(own.shape)} of {tuple(value.shape)} at {at}"
