"""Checks each optimizer before its step, and refuses it if copies of a parameter would differ.

Step 8 of the journey of a gradient in docs/internals.md.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Collection, Mapping
from weakref import WeakValueDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from pipegrad.errors import PipegradError, PlanError, StepError
from pipegrad.gradients.parameter import LiveParameter
from pipegrad.model.manifest import Manifest
from pipegrad.optimizer.main_params import refuse_unless_elementwise
from pipegrad.plan.plan import Plan
from pipegrad.plugins.handler import Placement
from pipegrad.topology import Topology

_FRAMES = 16  # from a step's hook to its caller: wrappers of torch and of learning-rate schedules


class OptimizerWatch:
    """Checks each optimizer of this process before its step.

    Args:
        parameters: Of this rank.
        alike: Whether each rank steps all parameters with the same gradients; see `steps_alike`.
        on_refusal: A bound method; called with the error if an optimizer is refused.
    """

    def __init__(
        self,
        parameters: Collection[LiveParameter],
        *,
        alike: bool,
        on_refusal: Callable[[PipegradError], object],
    ) -> None:
        self._alike = alike
        self._on_refusal = weakref.WeakMethod(on_refusal)
        self._placed = [p.placed for p in parameters if p.placed.main_shard]
        self._has_replaced = any(p.placed.is_replaced for p in parameters)
        self.follow({id(p.live): p for p in parameters})

    def start(self) -> None:
        """Starts the checks. All main shards must have a tensor."""
        _watches[id(self)] = self
        _start_looking()

    def follow(self, live: Mapping[int, LiveParameter]) -> None:
        """Looks for these parameters from now on; keys are the ids of their tensors."""
        self._live = live

    def remove(self) -> None:
        """Stops the checks."""
        _watches.pop(id(self), None)
        if not _watches:
            _stop_looking()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses an optimizer of these parameters if its step would make their copies different.

        Raises:
            PipegradError: If it is refused. It says why, and which optimizer to take. The refusal
                is also posted for the ranks that do not step.
        """
        # If each rank steps all parameters with the same gradients, even an optimizer that depends
        # on all gradients makes the same step on all ranks.
        reason = None if self._alike else _is_global(optimizer) or _is_scaled_alone()
        if reason is None and not self._has_replaced:
            return
        tensors = [t for group in optimizer.param_groups for t in group["params"]]
        parameters = [p for t in tensors if (p := self._live.get(id(t)))]
        main_shard_of = {
            id(p.main_shard.tensor): p.main_shard for p in self._placed if p.main_shard
        }
        main_shards = [main_shard_of[id(t)] for t in tensors if id(t) in main_shard_of]
        try:
            if any(main_shard.main_range.sharded for main_shard in main_shards):
                refuse_unless_elementwise(optimizer)
            for parameter in parameters:
                _refuse_replaced(parameter)
            if reason is not None and (parameters or main_shards):
                raise PlanError(reason)
        except PipegradError as error:
            if (on_refusal := self._on_refusal()) is not None:
                on_refusal(error)
            raise


# One hook of the process serves all watches. A watch may become garbage at any time, also while
# torch runs its hooks. At that time torch's own table of hooks may not change, but this table may.
_watches: WeakValueDictionary[int, OptimizerWatch] = WeakValueDictionary()
_hooks: list[RemovableHandle] = []


def _start_looking() -> None:
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_look))


def _stop_looking() -> None:
    while _hooks:
        _hooks.pop().remove()


def _look(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for watch in list(_watches.values()):
        watch.check(optimizer)


def _refuse_replaced(parameter: LiveParameter) -> None:
    if parameter.placed.is_replaced:
        raise StepError(
            f"an optimizer steps {parameter.record.key!r} itself, but its gradient is in a shard "
            f"or in a copy of it, so nothing would move: give the optimizer "
            f"sync.optimizer_parameters(), not module.parameters()"
        )


def _is_global(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the reason to refuse an optimizer whose step depends on all gradients, or None."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return None
    return (
        f"{type(optimizer).__name__} computes one step from all gradients of the model, and no "
        f"rank has all of them: copies of one parameter would get different steps. Take an "
        f"optimizer that looks at each parameter by itself, such as AdamW"
    )


def _is_scaled_alone() -> str | None:
    """Returns the reason to refuse a GradScaler that checks only this rank's gradients, or None."""
    if (name := _lone_scaler()) is None:
        return None
    return (
        f"torch's {name} looks for overflows in the gradients of this rank alone, but other ranks "
        f"have other gradients: one rank would skip a step that others make. Use "
        f"pipegrad.GradScaler(sync), which decides once for all ranks"
    )


def _lone_scaler() -> str | None:
    """Returns the class name of torch's GradScaler if it calls the present step, or None.

    A subclass counts only if it checks nothing but this rank's gradients.
    """
    # This runs in the step hook of an optimizer. torch passes no caller to the hook, so the frames
    # of the stack are searched for it.
    frame = inspect.currentframe()
    for _ in range(_FRAMES):
        frame = None if frame is None else frame.f_back
        if frame is None:
            return None
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(caller, torch.amp.GradScaler) and caller.is_enabled():
            alone = type(caller).unscale_ is torch.amp.GradScaler.unscale_
            return type(caller).__name__ if alone else None
    return None


def steps_alike(manifest: Manifest, plan: Plan, topology: Topology) -> bool:
    """Whether each rank steps all parameters, with gradients that are equal on all ranks."""
    # The ranks with the same gradient are those of its reductions, of the mesh of a DTensor, and of
    # DistributedDataParallel. If they are all ranks, all ranks make the same step.
    sizes, routes = dict(topology.axes), dict(plan.routes)
    data = math.prod(sizes[axis] for axis in topology.data_axes)
    for record in manifest.parameters:
        route, layout = routes.get(record.key, ()), manifest.entries(record.key)[0].layout
        ranks = math.prod(len(step.ranks) for step in route)  # that have the same gradient
        ranks *= 1 if layout is None else math.prod(size for _, size in layout.mesh)
        ranks *= data if record.stage in manifest.reduced_by_ddp else 1
        is_placed = any(step.placement is not Placement.REPLICATE for step in route)
        if record.requires_grad and (is_placed or ranks < len(topology.ranks)):
            return False
    return True
