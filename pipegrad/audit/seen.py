"""Watch: one step of the caller on this rank. It runs as it is, and its gradients are copied.

[Note: when gradients are copied] A gradient is compared as the optimizer gets it, so it is copied
in a hook right before the optimizer's step. If the step clips by torch's functions, it is also
copied before. If it clips by its own code, that code may call `before_clipping`.

The step decides itself what it sends and when. So nothing is sent here before it has ended.
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipegrad.audit.matching import Names
from pipegrad.audit.placed import Piece, Placed
from pipegrad.comm.agreement import agree
from pipegrad.errors import PlanError, in_words
from pipegrad.gradients.sync import GradientSync
from pipegrad.interop.private import listening_to_clipping
from pipegrad.model.dtensor import is_dtensor

Gradients = Callable[[], Mapping[str, Tensor | None]]
PATIENCE_SECONDS = 1800.0  # for ranks that load, compile or compare
_watches: list[Watch] = []  # those that are running, one at most


def before_clipping() -> None:
    """Marks where a step's gradients are reduced, and not clipped yet. It does nothing elsewhere.

    An audit sees torch's own functions by itself. A step that clips by other code calls this
    before, so that a wrong gradient and a wrong norm are told apart.
    """
    for watch in _watches:
        watch.copy_unclipped()


@dataclass(frozen=True)
class Stepped:
    """What one optimizer did.

    Attributes:
        kind: Its class.
        options: Name of a parameter -> options of its group.
        num_unknown: Tensors that are parameters of no module.
        is_new: Whether it had no state.
        times: How often it stepped.
        rate: Its largest learning rate.
    """

    kind: type[Optimizer]
    options: Mapping[str, Mapping[str, Any]]
    num_unknown: int
    is_new: bool
    times: int
    rate: float = 1.0


class Clip(NamedTuple):
    """One call of a function that clips.

    Attributes:
        names: Of the parameters.
        max_norm: To which they are clipped.
        norm: By which.
    """

    names: tuple[str, ...]
    max_norm: float
    norm: float


@dataclass(frozen=True)
class Seen:
    """What one rank had in one step, by names of the uncut model.

    Attributes:
        rank: Its rank.
        replica: Index of the data that it has had.
        groups: Name -> the ranks that have it together. The first one sends its values.
        uses: Name -> all names of this parameter on this rank.
        before: Parameters before the step.
        gradients: As the optimizer gets them; None where there is none.
        unclipped: Before clipping; empty if that was not seen.
        after: Parameters after it.
        buffers: Before and after it.
        norm: The norm that gradients were clipped by, or that the step has returned.
        clip_norm: To which they were clipped.
        clips: What was clipped, in order.
        frozen: Parameters that require no gradient.
        pieces: Of gradients that lie in parts on several ranks, which part this rank has.
        is_other: Whether gradients were clipped by value, or by another norm than the Euclidean.
        num_clips: How often torch's functions clipped a parameter.
        losses: Numbers that the step has returned. One of them should be the loss.
        optimizers: In the order of their steps.
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
    optimizers: Sequence[Stepped]
    clips: Sequence[Clip] = ()
    frozen: frozenset[str] = frozenset()
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    num_clips: int = 0
    is_other: bool = False


@dataclass
class Watch:
    """One step while it runs.

    Attributes:
        own: Names and parameters of this rank.
        read: Returns its gradients; by default ``.grad``, or ``.main_grad``.
        placed: What syncs of pipegrad know of them.
    """

    own: Mapping[str, nn.Parameter]
    read: Gradients
    placed: Placed
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    unclipped: dict[str, Tensor | None] = field(default_factory=dict)
    clips: list[Clip] = field(default_factory=list)
    num_clips: dict[int, int] = field(default_factory=dict)  # by id of a parameter
    is_other: bool = False  # whether gradients were clipped, and not by their Euclidean norm
    stepped: dict[int, Stepped] = field(default_factory=dict)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watches what runs inside."""
        hook = register_optimizer_step_pre_hook(self._before_step)
        _watches.append(self)
        try:
            with listening_to_clipping(self._clipped), self._listening_to_syncs():
                yield
        finally:
            _watches.remove(self)
            hook.remove()
        if not self.gradients:  # no optimizer of torch has stepped
            now = self._copies()
            is_gone = all(value is None for value in now.values())
            self.gradients = self.unclipped if self.unclipped and is_gone else now

    def copy_unclipped(self, only: Collection[int] | None = None) -> None:
        """Copies gradients that are not clipped yet; with `only`, of parameters of these ids."""
        # A step may clip the stages of a rank one by one: the first copy of each one counts.
        for name, value in self._copies().items():
            if only is None or id(self.own[name]) in only:
                self.unclipped.setdefault(name, value)

    def _clipped(
        self, parameters: Sequence[Tensor], max_norm: float, total_norm: Tensor | None
    ) -> None:
        if math.isinf(max_norm):  # it only measures
            return
        clipped = {id(parameter) for parameter in parameters}
        self.copy_unclipped(clipped)
        if total_norm is None:  # by value, or by another norm
            self.is_other = True
            return
        for parameter in clipped:
            self.num_clips[parameter] = self.num_clips.get(parameter, 0) + 1
        names = tuple(name for name, p in self.own.items() if id(p) in clipped)
        self.clips.append(Clip(names, float(max_norm), float(_whole(total_norm))))

    @contextlib.contextmanager
    def _listening_to_syncs(self) -> Iterator[None]:
        """Hears `GradientSync.clip_grad_norm_`, which clips what `placed` knows."""
        clip = GradientSync.clip_grad_norm_

        def heard(sync: GradientSync, max_norm: float, norm_type: float = 2.0) -> Tensor:
            # It measures first: with a GradScaler it removes the scale then.
            norm = clip(sync, math.inf, norm_type)
            if math.isinf(max_norm):
                return norm
            own = [p for name, p in self.own.items() if self.placed.knows(name)]
            self._clipped(own, max_norm, norm if float(norm_type) == 2.0 else None)
            clip(sync, max_norm, norm_type)
            return norm

        with mock.patch.object(GradientSync, "clip_grad_norm_", heard):
            yield

    def _copies(self) -> dict[str, Tensor | None]:
        return {n: None if g is None else _copy(g) for n, g in self.read().items()}

    def _before_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:  # noqa: ANN401
        if any(map(callable, (*args, *options.values()))):
            raise PlanError(
                "the optimizer's step has a closure, which computes gradients several times: audit "
                "with an optimizer that needs none"
            )
        names = {id(parameter): name for name, parameter in self.own.items()}
        names |= self.placed.stepped()
        held = [(p, group) for group in optimizer.param_groups for p in group["params"]]
        of_groups = {
            names[id(p)]: {key: x for key, x in group.items() if key != "params" and _pickles(x)}
            for p, group in held
            if id(p) in names
        }
        copies = self._copies()
        # GradScaler hands its scale to a fused optimizer, which divides in its step.
        scale = getattr(optimizer, "grad_scale", None)
        if isinstance(scale, Tensor):
            divided = {
                n: v / _whole(scale) for n, v in copies.items() if n in of_groups and v is not None
            }
            copies |= divided
        # Several optimizers may step one after the other, and each may set its gradients to None.
        for name, value in copies.items():
            if name in of_groups or name not in self.gradients:
                self.gradients[name] = value
        known = self.stepped.get(id(optimizer))
        kind = type(optimizer)
        self.stepped[id(optimizer)] = Stepped(
            kind if _pickles(kind) else Optimizer,
            of_groups,
            sum(id(p) not in names for p, _ in held),
            known.is_new if known else not optimizer.state,
            known.times + 1 if known else 1,
            max((float(group.get("lr", 1.0)) for group in optimizer.param_groups), default=0.0),
        )


class StepFailed(BaseException):
    """The step of a rank has failed. It is no Exception, so `agree` does not wait for all ranks."""


def _fail(error: Exception) -> NoReturn:
    raise StepFailed(in_words(error)) from error


def _pickles(value: object) -> bool:
    """Whether rank 0 can be sent a value, such as a class at the top level of a module."""
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def watched(
    step: Callable[[], object], names: Names, replica: int, gradients: Gradients | None
) -> Seen:
    """Runs a step, and returns what this rank had in it.

    Args:
        step: Of the caller, with its batch.
        names: Of this rank's parameters and buffers.
        replica: Of this rank.
        gradients: Returns gradients by names of the modules; None for ``.grad``.
    """
    own = names.parameters
    placed = Placed(own)

    def read() -> Mapping[str, Tensor | None]:
        if gradients is None:
            return {
                name: placed.gradient(name) if placed.knows(name) else gradient_of(parameter)
                for name, parameter in own.items()
            }
        return {names.of_modules[name]: value for name, value in gradients().items()}

    watch = Watch(own, read, placed)
    before, buffers = _gathered(own, names), _copied(names.buffers)
    try:
        with watch.running():
            result = step()
        placed.wait()
        losses, norm = _numbers(result)
    except Exception as error:
        # Ranks that have ended their step need not wait for this one.
        with contextlib.suppress(StepFailed):
            agree("clipping", functools.partial(_fail, error))
        raise
    # Whole tensors are gathered on all ranks, or on none.
    is_clipped = any(
        agree("clipping", lambda: bool(watch.unclipped), timeout_seconds=PATIENCE_SECONDS)
    )
    for name, value in watch.gradients.items() if watch.unclipped else ():
        watch.unclipped.setdefault(name, value)
    clip_norm = watch.clips[-1].max_norm if watch.clips else None
    if watch.clips:
        norm = watch.clips[-1].norm
    return Seen(
        rank=dist.get_rank(),
        replica=replica,
        groups={name: _group(parameter) for name, parameter in own.items()},
        uses=names.uses,
        before=before,
        gradients=_gathered(watch.gradients, names),
        unclipped=_gathered(watch.unclipped, names) if is_clipped else {},
        after=_gathered(own, names),
        buffers=(buffers, _copied(names.buffers)),
        norm=norm,
        clip_norm=clip_norm,
        clips=watch.clips,
        frozen=frozenset(name for name, p in own.items() if not p.requires_grad),
        pieces=placed.pieces() if gradients is None else {},
        is_other=watch.is_other,
        num_clips=max(watch.num_clips.values(), default=0),
        losses=losses,
        optimizers=list(watch.stepped.values()),
    )


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Returns ``.grad``, or ``.main_grad`` where Megatron's kernels and pipegrad accumulate."""
    return parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)


def _gathered(values: Mapping[str, Tensor | None], names: Names) -> dict[str, Any]:
    """Returns whole tensors on CPU. The ranks of a DTensor's mesh must all call it.

    Only the first rank of a group keeps its tensor, because the others have the same one.
    """
    found = dict[str, Tensor | None]()
    for name, parameter in names.parameters.items():
        value = values.get(name)
        if is_dtensor(parameter) and parameter.requires_grad:
            # A rank without a gradient takes part in the collective, too.
            piece = torch.zeros_like(parameter) if value is None else value
            whole = _whole(piece) if is_dtensor(piece) else piece
            value = None if value is None and not bool(whole.any()) else whole
        elif is_dtensor(value):
            value = _whole(value)
        if _group(parameter)[0] == dist.get_rank():
            found[name] = None if value is None else value.detach().cpu().clone()
    return found


def _copy(gradient: Tensor) -> Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.detach().clone()


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.detach()
    return whole.full_tensor() if is_dtensor(whole) else whole


def _group(parameter: Tensor) -> tuple[int, ...]:
    """Returns the ranks that have a parameter together; this rank if it has it alone."""
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
    """Returns candidates for the loss, and the norm that a step has returned."""
    if isinstance(result, Mapping):
        return _losses(result.get("loss")), _number(result.get("grad_norm"))
    if isinstance(result, tuple):  # the loss, and what else the training wants to know
        return _losses(result[0] if result else None), None
    return _losses(result), None


def _losses(value: object) -> list[float]:
    """Returns a loss; of a list, for each microbatch one, the mean and the sum."""
    if not isinstance(value, list):
        number = _number(value)
        return [] if number is None else [number]
    found = [number for number in map(_number, value) if number is not None]
    if not found or len(found) < len(value):
        return []
    return [sum(found) / len(found), sum(found)]


def _number(value: object) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(_whole(value))
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return float(cast("float", value)) if is_number else None
