"""Seen: one step of the caller on this rank. It runs unchanged, and its gradients are copied.

[Note: when gradients are copied] A gradient is compared as the optimizer gets it. Therefore a hook
copies it right before the optimizer's step. If the step clips by torch's functions, gradients are
also copied before clipping. If it clips by its own code, that code may call `before_clipping`.
Parameters are copied right after the optimizer's step. A parameter that differs from its copy at
the end was changed by other code.

The audit sends nothing before the step has ended, because the step has its own order of sends.

[Note: pieces] With SHARD a rank has elements of a gradient, with OWNER and WHOLE one rank has all
of it, and with a master dtype its copy has it. Therefore each rank sends a tensor of the whole
shape, with zeros for the elements of other ranks, and rank 0 adds these tensors.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pipegrad.audit.checks import Names
from pipegrad.audit.dropout import Without
from pipegrad.comm.agreement import agree
from pipegrad.errors import PlanError, in_words
from pipegrad.gradients.parameter import Param
from pipegrad.gradients.sync import GradientSync, open_syncs
from pipegrad.interop.private import CLIPS_WITH_NORM
from pipegrad.model.dtensor import is_dtensor
from pipegrad.plugins.handler import Placement

Gradients = Callable[[], Mapping[str, Tensor | None]]
_Tensors = Tensor | Iterable[Tensor]
PATIENCE_SECONDS = 1800.0  # for ranks that load, compile or compare
_watches: list[Watch] = []  # running ones, one at most


def before_clipping() -> None:
    """Marks the place where a step's gradients are reduced, but not clipped. Else it does nothing.

    An audit sees torch's own functions automatically. If your step clips by other code, call this
    before, because the audit then distinguishes a wrong gradient from a wrong norm.
    """
    for watch in _watches:
        watch.copy_unclipped()


@dataclass(frozen=True)
class Update:
    """One optimizer's steps on its parameters.

    Attributes:
        names: Names of its parameters.
        num_unknown: Number of its tensors that are parameters of no module.
        rate: Its largest learning rate.
        times: Number of its steps.
    """

    names: frozenset[str]
    num_unknown: int
    rate: float = 1.0
    times: int = 1


class Clip(NamedTuple):
    """One call of a function that clips.

    Attributes:
        names: Names of the parameters.
        max_norm: The norm to which they are clipped.
        norm: The norm before clipping.
    """

    names: tuple[str, ...]
    max_norm: float
    norm: float


@dataclass(frozen=True)
class Seen:
    """The snapshot of one rank in one step, by names of the uncut model.

    Attributes:
        rank: Its rank.
        replica: Index of the data that it got.
        groups: Name -> the ranks that hold it together: of a DTensor, or of [Note: pieces].
        uses: Name -> all names of this parameter on this rank.
        before: Parameters before the step.
        gradients: Gradients as the optimizer gets them; None if there is none.
        unclipped: Gradients before clipping; empty if they were not copied.
        after: Parameters after the step.
        buffers: Buffers before and after the step.
        norm: The norm that gradients were clipped by, or that the step has returned.
        clip_norm: The norm to which they were clipped.
        clips: Calls that clipped, in order.
        frozen: Parameters that require no gradient.
        changed: Parameters that other code changed after their optimizer's step.
        is_other: True if gradients were clipped by value.
        losses: Candidates for the loss, from the numbers that the step has returned.
        updates: One entry for each optimizer.
        dropped: Probabilities of the dropout that was switched off.
    """

    rank: int
    replica: int
    groups: Mapping[str, tuple[int, ...]]
    uses: Mapping[str, tuple[str, ...]]
    before: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]
    unclipped: Mapping[str, Tensor | None]
    after: Mapping[str, Tensor]
    buffers: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    norm: float | None
    clip_norm: float | None
    losses: Sequence[float]
    updates: Sequence[Update]
    clips: Sequence[Clip] = ()
    frozen: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    is_other: bool = False
    dropped: Collection[float] = ()


class Placed:
    """A rank's parameters in the syncs of this process; see [Note: pieces].

    Attributes:
        syncs: Syncs that have some of the parameters.
        live: Name -> the sync's entry for the parameter.
        groups: Name -> ranks that have pieces of its gradient.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.live: dict[str, Param] = {}
        self.groups: dict[str, tuple[int, ...]] = {}
        self.syncs = list[GradientSync]()
        names = defaultdict[int, list[str]](list)
        for name, parameter in parameters.items():
            if not is_dtensor(parameter):
                names[id(parameter)].append(name)
        for sync in open_syncs():
            routes = dict(sync.plan.routes)
            known = {name: live for live in sync.live() for name in names.get(id(live.tensor), ())}
            self.live |= known
            self.syncs += [sync] if known else []
            for name, live in known.items():
                legs = routes.get(live.record.key, ())
                apart = [leg.ranks for leg in legs if leg.placement is not Placement.REPLICATE]
                if apart:
                    self.groups[name] = tuple(sorted({rank for ranks in apart for rank in ranks}))

    def gradient(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        """Returns the gradient that this rank's optimizer gets."""
        if name not in self.live:
            return gradient_of(parameter)
        main = self.live[name].main
        return None if main is None else main.tensor.grad

    def main_names(self) -> dict[int, str]:
        """Returns the ids of tensors that an optimizer has for parameters -> their names."""
        mains = {name: live.main for name, live in self.live.items() if live.main is not None}
        return {id(main.tensor): name for name, main in mains.items() if not main.copied}

    def widened(self, name: str, value: Tensor | None) -> Tensor | None:
        """Returns this rank's piece of a gradient in the shape of its parameter."""
        if value is None or name not in self.groups:
            return value
        parameter, main = self.live[name].tensor, self.live[name].main
        if value.shape == parameter.shape:
            return value
        begin = 0 if main is None else main.begin
        flat = value.new_zeros(parameter.numel())
        flat[begin : begin + value.numel()] = value.reshape(-1)
        # A shard's elements are in the order of the parameter's memory.
        return flat.as_strided(parameter.shape, parameter.stride())


@dataclass
class Watch:
    """One step while it runs.

    Attributes:
        own: Names and parameters of this rank.
        read: Returns the gradients; by default ``.grad``, or ``.main_grad``.
        placed: The parameters in pipegrad's syncs.
    """

    own: Mapping[str, nn.Parameter]
    read: Gradients
    placed: Placed
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    unclipped: dict[str, Tensor | None] = field(default_factory=dict)
    clips: list[Clip] = field(default_factory=list)
    is_other: bool = False  # True if gradients were clipped by value
    updates: dict[int, Update] = field(default_factory=dict)  # by id of an optimizer
    updated: dict[str, Tensor] = field(default_factory=dict)  # parameters after their optimizer

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watches the code inside the context."""
        hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        _watches.append(self)
        try:
            with self._hearing_clipping():
                yield
        finally:
            _watches.remove(self)
            for hook in hooks:
                hook.remove()
        if not self.gradients:  # no optimizer of torch has stepped
            now = self._copies()
            is_gone = all(value is None for value in now.values())
            self.gradients = self.unclipped if self.unclipped and is_gone else now

    def copy_unclipped(self, only: Collection[int] | None = None) -> None:
        """Copies gradients before clipping; with `only`, of parameters with these ids."""
        # A step may clip the stages of a rank one by one: the first copy of each one counts.
        for name, value in self._copies().items():
            if only is None or id(self.own[name]) in only:
                self.unclipped.setdefault(name, value)

    def _clipped(
        self, parameters: Sequence[Tensor], max_norm: float, total_norm: Tensor | None
    ) -> None:
        """Copies gradients that are clipped next; without a norm they are clipped by value."""
        if math.isinf(max_norm):  # it only measures
            return
        clipped = {id(parameter) for parameter in parameters}
        self.copy_unclipped(clipped)
        if total_norm is None:
            self.is_other = True
            return
        names = tuple(name for name, p in self.own.items() if id(p) in clipped)
        self.clips.append(Clip(names, float(max_norm), float(_whole(total_norm))))

    @contextlib.contextmanager
    def _hearing_clipping(self) -> Iterator[None]:
        """Patches torch's functions that clip, and `GradientSync.clip_grad_norm_`.

        Calls are missed in code that imported ``clip_grad_value_`` or ``clip_grads_with_norm_`` by
        name.
        """
        by_value: Callable[..., None] = clip_grad.clip_grad_value_
        by_norm: Callable[..., None] = nn.utils.clip_grads_with_norm_
        by_sync = GradientSync.clip_grad_norm_

        def heard(
            every: _Tensors, max_norm: float, total_norm: Tensor, foreach: bool | None = None
        ) -> None:
            tensors = [every] if isinstance(every, Tensor) else list(every)
            self._clipped(tensors, max_norm, total_norm)
            by_norm(tensors, max_norm, total_norm, foreach)

        def heard_by_value(every: _Tensors, clip_value: float, foreach: bool | None = None) -> None:
            tensors = [every] if isinstance(every, Tensor) else list(every)
            self._clipped(tensors, clip_value, None)
            by_value(tensors, clip_value, foreach)

        def heard_by_sync(sync: GradientSync, max_norm: float, norm_type: float = 2.0) -> Tensor:
            # Measure first, because with a GradScaler this call removes the scale.
            norm = by_sync(sync, math.inf, norm_type)
            own = [p for name, p in self.own.items() if name in self.placed.live]
            self._clipped(own, max_norm, norm)
            return norm if math.isinf(max_norm) else by_sync(sync, max_norm, norm_type)

        patches: list[tuple[Any, str, Callable[..., Any]]] = [
            (nn.utils, "clip_grad_value_", heard_by_value),
            (clip_grad, "clip_grad_value_", heard_by_value),
            (nn.utils, "clip_grads_with_norm_", heard),
            (clip_grad, CLIPS_WITH_NORM, heard),  # clip_grad_norm_ calls it
            (GradientSync, "clip_grad_norm_", heard_by_sync),
        ]
        with contextlib.ExitStack() as stack:
            for home, name, function in patches:
                stack.enter_context(mock.patch.object(home, name, function))
            yield

    def _copies(self) -> dict[str, Tensor | None]:
        found = {
            n: g.to_dense() if g is not None and g.is_sparse else g for n, g in self.read().items()
        }
        return {n: None if g is None else g.detach().clone() for n, g in found.items()}

    def _before_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:  # noqa: ANN401
        if any(map(callable, (*args, *options.values()))):
            raise PlanError(
                "the optimizer's step has a closure, which computes gradients several times: audit "
                "with an optimizer that needs none"
            )
        names = {id(parameter): name for name, parameter in self.own.items()}
        names |= self.placed.main_names()
        held = [p for group in optimizer.param_groups for p in group["params"]]
        known = frozenset(names[id(p)] for p in held if id(p) in names)
        copies = self._copies()
        # GradScaler gives its scale to a fused optimizer, which divides during its step.
        scale = getattr(optimizer, "grad_scale", None)
        if isinstance(scale, Tensor):
            copies |= {
                n: v / _whole(scale) for n, v in copies.items() if n in known and v is not None
            }
        # Several optimizers may run one after the other, and each may set its gradients to None.
        kept = {name: value for name, value in self.gradients.items() if name not in known}
        self.gradients = copies | kept
        earlier = self.updates.get(id(optimizer))
        self.updates[id(optimizer)] = Update(
            known,
            sum(id(p) not in names for p in held),
            max((float(group.get("lr", 1.0)) for group in optimizer.param_groups), default=0.0),
            earlier.times + 1 if earlier else 1,
        )

    def _after_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:  # noqa: ANN401
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in self.own.items():
            # Without a gradient, the values may come from the rank that owns the parameter.
            if id(parameter) in held and self.gradients.get(name) is not None:
                self.updated[name] = _local(parameter).clone()

    def changed(self) -> frozenset[str]:
        """Returns names of parameters that other code changed after their optimizer's step."""
        return frozenset(
            name for name, was in self.updated.items() if not was.equal(_local(self.own[name]))
        )


class StepFailed(BaseException):
    """A rank's step failed. No Exception, because `agree` would then wait for all ranks."""


def watched(
    step: Callable[[], object],
    names: Names,
    replica: int,
    gradients: Gradients | None,
    without: Without,
) -> Seen:
    """Runs a step; returns the snapshot of this rank."""
    own = names.parameters
    placed = Placed(own)

    def read() -> Mapping[str, Tensor | None]:
        if gradients is None:
            return {name: placed.gradient(name, p) for name, p in own.items()}
        return {names.of_modules[name]: value for name, value in gradients().items()}

    def whole(values: Mapping[str, Tensor | None]) -> dict[str, Any]:
        if gradients is None:
            values = {name: placed.widened(name, value) for name, value in values.items()}
        return _gathered(values, names)

    watch = Watch(own, read, placed)
    before, buffers = _gathered(own, names), _copied(names.buffers)
    try:
        with watch.running(), without.running():
            result = step()
        for sync in placed.syncs:  # other ranks may update parameters
            sync.wait_parameters()
        losses, norm = _numbers(result)
    except Exception as error:
        # Ranks that have ended their step need not wait for this one.
        reason = in_words(error)

        def fail() -> NoReturn:
            raise StepFailed(reason)

        with contextlib.suppress(StepFailed):
            agree("clipping", fail)
        raise
    # All ranks must gather whole tensors, or none.
    has_copies = agree("clipping", lambda: bool(watch.unclipped), timeout_seconds=PATIENCE_SECONDS)
    last = watch.clips[-1] if watch.clips else None
    return Seen(
        rank=dist.get_rank(),
        replica=replica,
        groups={
            name: (placed.groups if gradients is None else {}).get(name) or _group(parameter)
            for name, parameter in own.items()
        },
        uses=names.uses,
        before=before,
        gradients=whole(watch.gradients),
        unclipped=whole(watch.gradients | watch.unclipped) if any(has_copies) else {},
        after=_gathered(own, names),
        buffers=(buffers, _copied(names.buffers)),
        norm=last.norm if last else norm,
        clip_norm=last.max_norm if last else None,
        clips=watch.clips,
        frozen=frozenset(name for name, p in own.items() if not p.requires_grad),
        changed=watch.changed(),
        is_other=watch.is_other,
        losses=losses,
        updates=list(watch.updates.values()),
        dropped=sorted(without.dropped),
    )


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Returns ``.grad``, or ``.main_grad`` where Megatron's kernels and pipegrad accumulate."""
    return parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)


def _gathered(values: Mapping[str, Tensor | None], names: Names) -> dict[str, Any]:
    """Returns whole tensors on CPU. The ranks of a DTensor's mesh must all call it.

    Only the first rank of a group keeps its tensor, because the others have an equal one.
    """
    gathered = dict[str, Tensor | None]()
    for name, parameter in names.parameters.items():
        value = values.get(name)
        if is_dtensor(parameter) and parameter.requires_grad:
            # The collective needs each rank, also one without a gradient.
            piece = torch.zeros_like(parameter) if value is None else value
            whole = _whole(piece) if is_dtensor(piece) else piece
            value = None if value is None and not bool(whole.any()) else whole
        elif is_dtensor(value):
            value = _whole(value)
        if _group(parameter)[0] == dist.get_rank():
            gathered[name] = None if value is None else value.detach().cpu().clone()
    return gathered


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.detach()
    return whole.full_tensor() if is_dtensor(whole) else whole


def _local(parameter: nn.Parameter) -> Tensor:
    local = parameter.detach()
    return local.to_local() if is_dtensor(local) else local


def _group(parameter: Tensor) -> tuple[int, ...]:
    """Returns the ranks that hold a parameter together; only this rank if it holds it alone."""
    if not is_dtensor(parameter):
        return (dist.get_rank(),)
    mesh, at = parameter.device_mesh, parameter.device_mesh.get_coordinate() or ()
    index = tuple(
        place if placement.is_replicate() else slice(None)
        for place, placement in zip(at, parameter.placements, strict=True)
    )
    return tuple(sorted(mesh.mesh[index].flatten().tolist()))


def _copied(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _whole(buffer).cpu().clone() for name, buffer in buffers.items()}


def _numbers(result: object) -> tuple[list[float], float | None]:
    """Returns candidates for the loss, and the norm that a step returned."""
    norm = result.get("grad_norm") if isinstance(result, Mapping) else None
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if isinstance(result, tuple):  # the loss, and other results of the training
        loss = result[0] if result else None
    every = [_number(value) for value in (loss if isinstance(loss, list) else [loss])]
    losses = [number for number in every if number is not None]
    if not losses or len(losses) < len(every):
        return [], _number(norm)
    # A list has one loss for each microbatch. Candidates are the mean and the sum.
    return list(dict.fromkeys([sum(losses) / len(losses), sum(losses)])), _number(norm)


def _number(value: object) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(_whole(value))
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return float(cast("float", value)) if is_number else None
