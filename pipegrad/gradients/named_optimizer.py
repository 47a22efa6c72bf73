"""An optimizer of main parameters, whose state has names of the uncut model.

It may be several: Muon for matrices, say, and AdamW for everything else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, cast

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
# What to do if Muon gets a parameter that has not two dimensions.
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
    """An optimizer to be made, and what it steps.

    Attributes:
        kind: Takes parameter groups and `options`.
        options: For `kind`.
        records: Its parameters, of all ranks.
        steps: What they are. ``"matrices"`` and ``"others"`` are parts of one optimizer.
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
            groups: For `kind`.
            sharded: Keys of parameters that are updated in shards.

        Raises:
            PlanError: As `check`, or if `kind` makes no optimizer.
        """
        self.check(self.kind, sharded)  # before the error of torch, which names no parameter
        optimizer = self.kind(groups, **self.options)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PlanError(
                f"{written(self.kind)} made {type(optimizer).__name__}, expected an Optimizer"
            )
        self.check(optimizer, sharded)
        return optimizer

    def check(self, optimizer: object, sharded: Container[str]) -> None:
        """Refuses an optimizer, or a class of one, if it cannot step these parameters.

        A function that makes one says nothing yet.

        Raises:
            PlanError: If it cannot step shards, and some are, or has vectors and takes none.
        """
        function = optimizer.func if isinstance(optimizer, partial) else optimizer
        kind = function if isinstance(function, type) else type(function)
        if not issubclass(kind, torch.optim.Optimizer):
            return
        other = next((record for record in self.records if len(record.shape) != 2), None)
        if issubclass(kind, torch.optim.Muon) and other is not None:
            raise PlanError(
                f"Muon steps matrices of two dimensions, but {other.key!r} is {other.shape}: "
                f"{_ADVICE[self.steps]}"
            )
        if not any(record.key in sharded for record in self.records):
            return
        try:
            refuse_unless_elementwise(kind)
        except PlanError as error:
            if self.steps != "others":
                raise
            raise PlanError(
                f"{error}. {kind.__name__} is given as others, which step shards here: give one "
                f"that looks at no whole parameter"
            ) from None


def parts_of(
    kind: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
    others: Callable[..., torch.optim.Optimizer] | None,
    *,
    records: Sequence[ParameterRecord],
    matrices: Collection[str],
) -> list[Part]:
    """Returns which optimizer steps which parameters.

    Args:
        kind: Steps matrices; everything, if there are no `others`.
        options: For `kind`.
        others: Steps what is no matrix.
        records: The trained parameters of all ranks.
        matrices: Keys of matrices, as a handler says. If there are none,
            `ParameterRecord.is_matrix` says what a matrix is.

    Raises:
        PlanError: If there is no parameter, or no matrix.
    """
    if not records:
        raise PlanError(
            "no parameter requires a gradient, so an optimizer has nothing to step. "
            "PeftModel.from_pretrained() freezes the adapter that it reads: give it "
            "is_trainable=True"
        )
    for factory in (kind, others):
        if factory is not None and not callable(factory):
            raise PlanError(
                f"an optimizer cannot be made by an object of class {type(factory).__name__}: give "
                f"a class of torch.optim, or a function of parameter groups, as in "
                f"partial(torch.optim.AdamW, lr=3e-4)"
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
    """Refuses parameters, or groups of them, that torch's constructors take.

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

    Args:
        parts: Of `parts_of`; if there are several, they become one optimizer.
        group_of: Name and parameter on the meta device -> options of its group.
        sharded: Keys of parameters that are updated in shards.
        main_parameters: Of this rank.
        locations: Key -> where along the mesh this rank's copy lives, as in ``"[tp=1]"``.

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
    names_of_groups = [[names[key] for key in keys] for _, keys in groups]
    NamedState(optimizer, named, names_of_groups)
    described = [
        f"{written(options)} for {len(keys)} parameters ({_digest(keys)})"
        for options, keys in groups
    ]
    return optimizer, f"{', '.join(map(str, parts))}; groups: {', '.join(described)}"


def _digest(keys: Sequence[str]) -> str:
    return hashlib.sha256(repr(keys).encode()).hexdigest()[:8]


class JoinedOptimizer(torch.optim.Optimizer):
    """Steps several optimizers, one after the other.

    Its groups and its state are those of all of them. So learning-rate schedules, checkpoints and
    ``zero_grad`` see one optimizer.

    Args:
        parts: The optimizers. No two of them have the same parameter.

    Attributes:
        parts: The same.
        defaults: Options that all parts have, as in the first one. Learning-rate schedules look
            there for a momentum, for example.
        elementwise: It steps shards if its parts do. Each part is checked before its own step.
    """

    elementwise = True

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts: tuple[torch.optim.Optimizer, ...] = ()
        super().__init__([group for part in parts for group in part.param_groups], {})
        # Not before: torch would add the defaults of one part to the groups of another.
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
        """Refuses groups from outside: it would not be known which part steps them.

        Raises:
            PlanError: Once it is made.
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
        # `load_state_dict` comes here with a new state and new groups. Each part makes of them what
        # it needs, as if it had loaded them.
        super().__setstate__(state)
        self._share()
        for part in self.parts:
            part.__setstate__({"state": part.state, "param_groups": part.param_groups})


def parts_in(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Returns the optimizers of which one is made; itself, if it is not made of several."""
    return optimizer.parts if isinstance(optimizer, JoinedOptimizer) else (optimizer,)


class NamedState:
    """Makes ``state_dict`` and ``load_state_dict`` of an optimizer use names.

    The format is torch's, with names instead of its numbers: ``"state"`` has this rank's
    parameters, and ``"param_groups"`` those of all ranks, so it is the same on all of them. The
    state of a shard is a `Chunk` of the whole parameter. A master copy is the state ``"master"``.

    Args:
        optimizer: The optimizer.
        main_parameters: Name -> what it steps. Names have locations.
        groups: The names of each group's parameters on all ranks, without locations.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        main_parameters: Mapping[str, MainParameter],
        groups: Sequence[Sequence[str]],
    ) -> None:
        self._main_parameters = main_parameters
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
            name: {MASTER: _saved(main, main.tensor.detach())}
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
            PlanError: If it is of another model, has other groups or shards, or lacks state.
        """
        saved = state_dict["param_groups"]
        present_groups = [_identity(group) for group in self._groups]
        by_names = {_identity(group["params"]): group for group in saved[: len(present_groups)]}
        if by_names.keys() != set(present_groups) or len(saved) != len(optimizer.param_groups):
            raise PlanError(_other_groups(self._groups, [group["params"] for group in saved]))
        self._refuse_missing({n for n in state_dict["state"] if isinstance(n, str)})
        groups, first = [], 0
        ordered = [*(by_names[group] for group in present_groups), *saved[len(present_groups) :]]
        for group, present in zip(ordered, optimizer.param_groups, strict=True):
            count = len(present["params"])
            groups.append({**group, "params": list(range(first, first + count))})
            first += count
        names, state = dict(self._numbers(optimizer)), {}
        for number in range(first):
            name = names.get(number, number)
            main = self._main_parameters.get(str(name))
            if name in state_dict["state"]:
                values = state_dict["state"][name]
                state[number] = self._loaded(main, values) if main else values
        return {**state_dict, "state": state, "param_groups": groups}

    def _refuse_missing(self, saved: set[str]) -> None:
        """Refuses a state that would leave a parameter without the state that it had.

        Raises:
            PlanError: If a parameter has state in other locations alone, or if there is state, but
                none of what this rank steps.
        """
        stems = {parted(name)[0] for name in saved}
        missing = [name for name in self._main_parameters if name not in saved]
        has_none = bool(saved) and len(missing) == len(self._main_parameters)
        # A parameter without a gradient has no state, so one that is absent everywhere is no error.
        apart = [name for name in missing if has_none or parted(name)[0] in stems]
        if apart:
            raise PlanError(
                f"the optimizer's state lacks {sorted(apart)[:4]}, which this rank steps; it has "
                f"{sorted(saved)[:4]}: load it with the handlers, and the mesh, of the run that "
                f"saved it, and on the rank that saved it unless it is whole; or begin with a new "
                f"optimizer. If a parameter had no state, because it had no gradient, give it an "
                f"empty one: state_dict['state'][{min(apart)!r}] = {{}}"
            )

    def _loaded(self, main: MainParameter, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of a parameter's state; sets its master copy."""
        values = {key: _of_rank(main, value, main.stride) for key, value in saved.items()}
        master = values.pop(MASTER, None)
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
    """Returns a value of a parameter's state; that of a shard's elements as a `Chunk`."""
    is_per_element = isinstance(value, torch.Tensor) and value.shape == main.tensor.shape
    if not (main.sharded and is_per_element):
        return value
    return Chunk.of(value.detach().reshape(-1), main.begin, main.record.numel)


def _slice(begin: int, size: int) -> slice:
    return slice(begin, begin + size)


def _of_rank(main: MainParameter, value: Any, stride: Sequence[int]) -> Any:  # noqa: ANN401 - as above
    """Returns this rank's elements of a value: of a `Chunk`, a DTensor, or the whole parameter.

    Args:
        main: What this rank steps.
        value: As saved.
        stride: Of the parameter in its module. Shards lie in the order of its memory.

    Raises:
        PlanError: If a chunk or a DTensor has other elements.
    """
    tensor, record = main.tensor, main.record
    numel = record.numel if main.sharded else tensor.numel()
    if is_dtensor(value):
        _refuse_others(main, value)
        return value
    if isinstance(value, Chunk):
        _refuse_others(main, value)
        elements = value.local
    elif not isinstance(value, torch.Tensor) or not value.ndim or value.numel() != numel:
        return value
    elif is_dtensor(tensor):
        whole = value.view(tensor.shape)  # it may be flat, of a run that sharded it
        boxes: Any = cast("Any", tensor).__create_chunk_list__()
        parts = [whole[tuple(map(_slice, b.offsets, b.sizes))].reshape(-1) for b in boxes]
        elements = torch.cat([value.new_empty(0), *parts])
    elif not main.sharded:  # it may be flat, too
        is_flat = value.ndim == 1 != tensor.ndim
        return value.as_strided(tensor.shape, tensor.stride()) if is_flat else value
    else:
        if value.ndim > 1:
            in_order = value.new_empty_strided(record.shape, stride).copy_(value)
            value = in_order.as_strided((record.numel,), (1,))
        # A view would keep the memory of the whole.
        elements = value[main.begin : main.begin + tensor.numel()].clone()
    if not is_dtensor(tensor):
        return elements.view_as(tensor)
    result = torch.empty_like(tensor, dtype=value.dtype)
    local(result).copy_(elements.view_as(local(result)))
    return result


def _refuse_others(main: MainParameter, value: Any) -> None:  # noqa: ANN401 - as above
    """Refuses a `Chunk` or a DTensor of other elements than this rank steps."""
    tensor, record = main.tensor, main.record
    there: tuple[Any, ...]
    here: tuple[Any, ...]
    if is_dtensor(value):
        there = tuple(local(value).shape), tuple(value.shape), value.placements
        here = tuple(local(tensor).shape), tuple(tensor.shape), getattr(tensor, "placements", ())
    else:
        there = f"{value.local.numel()} elements from {value.begin} on", value.numel()
        here = f"{local(tensor).numel()} elements from {main.begin} on", record.numel
    if there != here:
        raise PlanError(
            f"the optimizer's state of {record.key!r} has {there[0]} of {there[1]}, and this rank "
            f"steps {here[0]} of {here[1]}: it is of another rank, mesh or cut. Save and load it "
            f"by torch.distributed.checkpoint"
        )
