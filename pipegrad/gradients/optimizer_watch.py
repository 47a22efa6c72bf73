"""Checks each optimizer before its step: would copies of a parameter differ, and is it the time?

Step 8 of the journey of a gradient in docs/internals.md.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from pipegrad.comm.agreement import warn_once
from pipegrad.errors import PipegradError, PlanError, StepError
from pipegrad.gradients.main_params import MainShard, refuse_unless_elementwise
from pipegrad.gradients.param_sync import ParameterSync
from pipegrad.gradients.parameter import LiveParameter
from pipegrad.model.manifest import Manifest
from pipegrad.plan.plan import Plan
from pipegrad.plugins.handler import Placement
from pipegrad.topology import Topology

if TYPE_CHECKING:
    from pipegrad.gradients.grad_scaler import GradScaler


class OptimizerWatch:
    """Checks each optimizer of this process before its step.

    Args:
        parameters: Of this rank.
        parameter_sync: Knows whether main parameters were given to an optimizer.
        name: Of the GradientSync, the same on all ranks.
        alike: Whether each rank steps all parameters with the same gradients; see `steps_alike`.
        on_refusal: A bound method; called with the error if an optimizer is refused.
        on_step: A bound method; called after each step of an optimizer that was added.
        find_changed: A bound method; returns a parameter whose gradient has changed since.
        refuse_reduced: A bound method; refuses a step of another sync with these parameters.

    Attributes:
        has_gradients: Whether a step has finished, and no optimizer has used its gradients.
        optimizer: Returns the optimizer that was added last, while its user keeps it.
        scaler: Returns the GradScaler of these parameters, if there is one.
    """

    def __init__(
        self,
        parameters: Collection[LiveParameter],
        *,
        parameter_sync: ParameterSync,
        name: str,
        alike: bool,
        on_refusal: Callable[[PipegradError], object],
        on_step: Callable[[], object],
        find_changed: Callable[[], str | None],
        refuse_reduced: Callable[[], object],
    ) -> None:
        self.has_gradients = False
        self.optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self.scaler: Callable[[], GradScaler | None] = lambda: None
        self._parameter_sync = parameter_sync
        self._name = name
        self._alike = alike
        self._on_refusal = weakref.WeakMethod(on_refusal)
        self._on_step = weakref.WeakMethod(on_step)
        self._find_changed = weakref.WeakMethod(find_changed)
        self._refuse_reduced = weakref.WeakMethod(refuse_reduced)
        self._with_main_shard = [p for p in parameters if p.main_shard]
        self._has_replaced = any(p.is_replaced for p in parameters)
        self._added: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._last: weakref.ref[torch.optim.Optimizer] | None = None  # whose step was the last
        # What was last seen of each optimizer, and which of them step no parameter of these.
        self._options: WeakKeyDictionary[torch.optim.Optimizer, object] = WeakKeyDictionary()
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._news = 0  # since `news`
        self._has_main = any(p.has_result and p.record.requires_grad for p in parameters)
        self._is_stepping = False  # whether one that was added is in its step
        self._looks = False  # whether gradients that have changed are looked for
        self._has_warned = False  # that they have
        self.follow({id(p.live): p for p in parameters})

    def start(self) -> None:
        """Starts the checks. All main shards must have a tensor."""
        _watches[id(self)] = self
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_look))
            # torch runs this after the hooks of the optimizer itself. So a hook of the user may
            # still change parameters before they are sent.
            _hooks.append(register_optimizer_step_post_hook(_look_back))

    def scale_by(self, scaler: GradScaler) -> None:
        """Makes `scaler` that of these parameters, as long as its user keeps it."""
        self.scaler = weakref.ref(scaler) if scaler.is_enabled() else lambda: None

    def follow(self, live: Mapping[int, LiveParameter]) -> None:
        """Looks for these parameters from now on; keys are the ids of their tensors."""
        self._live = live

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes `on_step` follow each step of `optimizer`, which has all main parameters."""
        self._added.add(optimizer)
        self.optimizer = weakref.ref(optimizer)

    def remove(self) -> None:
        """Stops the checks."""
        _watches.pop(id(self), None)
        while _hooks and not _watches:
            _hooks.pop().remove()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses an optimizer of these parameters if it may not step now.

        Raises:
            PipegradError: If it is refused. It says why, and what to do. The refusal is also posted
                for the ranks that do not step.
        """
        if self._looks and not (self._alike or self._has_warned):
            self._look_for_changes(optimizer)
        error = self._error(optimizer)
        is_untaken = self._parameter_sync.is_needed and not self._parameter_sync.is_taken
        if not (error or self._added or self._has_replaced or is_untaken):
            return
        # An optimizer that was added is known. It is searched only if it could have got a
        # parameter later that it may not step.
        is_added = optimizer in self._added
        searches = not is_added or self._has_replaced
        parameters, main_shards = self._tensors_of(optimizer) if searches else ([], [])
        if not (is_added or parameters or main_shards):
            return
        try:
            if any(main_shard.main_range.sharded for main_shard in main_shards):
                refuse_unless_elementwise(optimizer)
            for parameter in parameters:
                _refuse_replaced(parameter)
            self._parameter_sync.refuse_untaken()
            if error is not None:
                raise error
            has_gradients = self.has_gradients or any(w.has_gradients for w in self._siblings())
            if self._added and not (has_gradients or self._is_part(optimizer)):
                raise StepError(self._untimely(optimizer))
        except PipegradError as refusal:
            # Ranks that step nothing, or whose optimizer is right, go on to the next step. They
            # learn from the board why this rank does not come.
            if (on_refusal := self._on_refusal()) is not None:
                on_refusal(refusal)
            raise
        self._is_stepping |= is_added

    def _look_for_changes(self, optimizer: torch.optim.Optimizer) -> None:
        """Warns once if gradients have changed since the step, as torch's own tools change them."""
        if not (optimizer in self._added or any(self._tensors_of(optimizer))):
            return
        self._looks = False  # an optimizer that steps may write gradients itself
        if (find := self._find_changed()) is not None and (changed := find()):
            self._has_warned = True
            warn_once(
                f"the gradient of {changed!r} was changed between finish() and "
                f"optimizer.step(). torch's clip_grad_norm_ and its GradScaler know only the "
                f"gradients of this rank: call sync.clip_grad_norm_(), and use "
                f"pipegrad.GradScaler(sync), which know those of all ranks. What changes each "
                f"element alike on all ranks is right",
                f"changed gradients {self._name}",
            )

    def _is_part(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` is one of several of which one that was added consists."""
        return self._is_stepping and optimizer not in self._added

    def _error(self, optimizer: torch.optim.Optimizer) -> PipegradError | None:
        """Returns the error for an optimizer of these parameters that steps in this way."""
        scaler = self.scaler()
        # If each rank steps all parameters with the same gradients, even an optimizer that depends
        # on all gradients makes the same step on all ranks.
        if not self._alike and isinstance(optimizer, torch.optim.LBFGS):
            return PlanError(
                f"{type(optimizer).__name__} computes one step from all gradients of the model, "
                f"and no rank has all of them: copies of one parameter would get different steps. "
                f"Take an optimizer that looks at each parameter by itself, such as AdamW"
            )
        # torch's GradScaler gives the scale to an optimizer that unscales by itself, as fused ones
        # do. Then it has looked at the gradients of this rank alone. Other optimizers do not know
        # who calls them, and it divides their gradients without a change of their versions.
        is_ours = scaler is not None and scaler.is_stepping
        if not (self._alike or is_ours) and getattr(optimizer, "grad_scale", None) is not None:
            return PlanError(
                "torch's GradScaler looks for overflows in the gradients of this rank alone, but "
                "other ranks have other gradients: one rank would skip a step that others make. "
                "Use pipegrad.GradScaler(sync), which decides once for all ranks"
            )
        if scaler is not None and (reason := scaler.refusal()):
            return StepError(reason)
        sends = self._parameter_sync.is_needed and not self._is_part(optimizer)
        if sends and self.has_gradients and not self._parameter_sync.is_due:
            return StepError(
                "optimizer.step() after publish(), or after an evaluation, which publishes: no "
                "other rank would get its update. Step between finish() and the evaluation"
            )
        return None

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after a step of `optimizer`; calls `on_step` if it was added."""
        if optimizer not in self._options:
            self._options[optimizer] = _options_of(optimizer)
            if not any(self._tensors_of(optimizer)):
                self._others.add(optimizer)
        self._news |= 8 if optimizer in self._others else 2
        if not self._added or self._is_part(optimizer):
            return
        is_added = optimizer in self._added
        self._is_stepping = False
        if is_added or any(self._tensors_of(optimizer)):
            self.has_gradients, self._last = False, weakref.ref(optimizer)
        if is_added and (on_step := self._on_step()) is not None:
            on_step()

    def news(self) -> int:
        """Returns what optimizers did on this rank since the last call, to compare with others.

        It is 1, and 1 more if a rate or another option has changed, and 2 more if one has stepped;
        or 0 if this rank steps nothing. It is 4 and 8 more for optimizers without a parameter of
        this rank: on other ranks they may have some. One that was added has some on all ranks.
        """
        news, self._news = self._news, 0
        for optimizer, before in list(self._options.items()):
            if (now := _options_of(optimizer)) != before:
                self._options[optimizer] = now
                news |= 4 if optimizer in self._others else 1
        return 1 + (news & 3 if self._added else news) if self._has_main else 0

    @property
    def is_used(self) -> bool:
        """Whether an optimizer has used the gradients that are there."""
        return self._last is not None

    def supersede(self) -> None:
        """Called before a step: other syncs of the same parameters have no gradients any more.

        Raises:
            StepError: If they still have.
        """
        for sibling in self._siblings():
            if (refuse := sibling._refuse_reduced()) is not None:
                refuse()
            sibling.expect(has_gradients=False)

    def _siblings(self) -> list[OptimizerWatch]:
        """Returns the watches of other syncs of the same parameters."""
        watches = [watch for watch in list(_watches.values()) if watch is not self]
        return [watch for watch in watches if not watch._live.keys().isdisjoint(self._live)]

    def expect(self, *, has_gradients: bool) -> None:
        """Sets whether there are gradients for an optimizer, of a step that has just ended."""
        self.has_gradients, self._last, self._looks = has_gradients, None, has_gradients
        self._is_stepping = False  # the step may have failed
        if (scaler := self.scaler()) is not None:
            scaler.expect()

    def _tensors_of(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[list[LiveParameter], list[MainShard]]:
        """Returns which of our parameters and main shards an optimizer has."""
        tensors = [t for group in optimizer.param_groups for t in group["params"]]
        main_shard_of = {
            id(p.main_shard.tensor): p.main_shard for p in self._with_main_shard if p.main_shard
        }
        return (
            [p for t in tensors if (p := self._live.get(id(t)))],
            [main_shard_of[id(t)] for t in tensors if id(t) in main_shard_of],
        )

    def _untimely(self, optimizer: torch.optim.Optimizer) -> str:
        """Returns the message for a step without new gradients."""
        last = None if self._last is None else self._last()
        if self._last is None:
            return (
                "optimizer.step() before the gradients of a step are there: call it once after "
                "each scheduler.step() or finish(), outside of accumulate(), and without a closure "
                "that runs the step. After a step that failed there are none"
            )
        if last is optimizer:
            return (
                "optimizer.step() a second time with the same gradients: call it once after each "
                "scheduler.step() or finish()"
            )
        return (
            "two optimizers step the same parameters with the same gradients: an optimizer of "
            "scheduler.optimizer() or sync.optimizer() has all parameters. Step one of them, and "
            "give its groups their options by group_of"
        )


# One hook of the process serves all watches. A watch may become garbage at any time, also while
# torch runs its hooks. At that time torch's own table of hooks may not change, but this table may.
_watches: WeakValueDictionary[int, OptimizerWatch] = WeakValueDictionary()
_hooks: list[RemovableHandle] = []
_OPTIONS = ("lr", "weight_decay", "momentum", "betas")


def _look(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for watch in list(_watches.values()):
        watch.check(optimizer)


def _look_back(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for watch in list(_watches.values()):
        watch.after_step(optimizer)


def _options_of(optimizer: torch.optim.Optimizer) -> object:
    """Returns what schedules change; of a tensor how often it was written: nobody waits for it."""
    values = [g.get(name) for g in optimizer.param_groups for name in _OPTIONS]
    flat = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    return [(id(x), x._version) if isinstance(x, torch.Tensor) else x for x in flat]


def _refuse_replaced(parameter: LiveParameter) -> None:
    if parameter.is_replaced:
        raise StepError(
            f"an optimizer steps {parameter.record.key!r} itself, but its gradient is in a shard "
            f"or in a copy of it, so nothing would move: make it by sync.optimizer(), or of "
            f"sync.optimizer_parameters(), not of module.parameters()"
        )


def steps_alike(manifest: Manifest, plan: Plan, topology: Topology) -> bool:
    """Whether each rank steps all parameters, with gradients that are equal on all ranks."""
    # The ranks with the same gradient are those of its reductions, of the mesh of a DTensor, and of
    # DistributedDataParallel. If they are all ranks, all ranks make the same step.
    sizes, routes = dict(topology.axes), dict(plan.routes)
    data = math.prod(sizes[axis] for axis in topology.data_axes)
    for record in manifest.parameters:
        route = routes.get(record.key, ())
        layout = manifest.entries(record.key)[0].layout
        ranks = math.prod(len(step.ranks) for step in route)  # that have the same gradient
        ranks *= 1 if layout is None else math.prod(size for _, size in layout.mesh)
        ranks *= data if record.stage in manifest.reduced_by_ddp else 1
        is_placed = any(step.placement is not Placement.REPLICATE for step in route)
        if record.requires_grad and (is_placed or ranks < len(topology.ranks)):
            return False
    return True
