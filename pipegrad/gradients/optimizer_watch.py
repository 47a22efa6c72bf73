"""Checks each optimizer before its step: copies must stay equal, and gradients must be there.

Step 8 of the journey of a gradient in docs/internals.md.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Sequence
from enum import Enum, IntFlag
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from pipegrad.comm.agreement import warn_once
from pipegrad.errors import PipegradError, PlanError, StepError
from pipegrad.gradients.main_params import refuse_unless_elementwise
from pipegrad.gradients.param_sync import ParameterSync
from pipegrad.gradients.parameter import Param
from pipegrad.model.manifest import Manifest
from pipegrad.plan.plan import Plan
from pipegrad.topology import Topology

if TYPE_CHECKING:
    from pipegrad.gradients.grad_scaler import GradScaler


class Gradients(Enum):
    """The states of the gradients for an optimizer."""

    NONE = "no step has ended, or the next one has begun"
    READY = "no optimizer has used them"
    USED = "an optimizer has used them"


_UNTIMELY = {  # errors of an optimizer that steps without new gradients
    Gradients.NONE: (
        "optimizer.step() before the gradients of a step are there: call it once after each "
        "scheduler.step() or finish(), outside of accumulate(), and without a closure that runs "
        "the step. After a step that failed there are none"
    ),
    Gradients.USED: (
        "optimizer.step() a second time with the same gradients: call it once after each "
        "scheduler.step() or finish(). If these are two optimizers, one of scheduler.optimizer() "
        "or sync.optimizer() has all parameters: step one of them, and give its groups their "
        "options by group_of"
    ),
}


class News(IntFlag):
    """Flags of the optimizers of a rank since its previous step. Ranks compare them."""

    TRAINS = 1  # the rank has parameters for an optimizer
    STEPPED = 2
    CHANGED = 4  # a rate, or a weight decay


class OptimizerWatch:
    """Checks each optimizer of this process before its step.

    Attributes:
        gradients: Whether there are gradients for an optimizer.
        optimizer: Returns the optimizer that was added last, while its user keeps it.
        scaler: Returns the GradScaler of these parameters, if there is one.
    """

    def __init__(
        self,
        parameters: Collection[Param],
        *,
        parameter_sync: ParameterSync,
        name: str,
        alike: bool,
        on_refusal: Callable[[PipegradError], object],
        refuse_reduced: Callable[[], object],
    ) -> None:
        self.gradients = Gradients.NONE
        self.optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self.scaler: Callable[[], GradScaler | None] = lambda: None
        self._parameters = parameters
        self._parameter_sync = parameter_sync
        self._name = name
        self._alike = alike
        self._on_refusal = weakref.WeakMethod(on_refusal)
        self._refuse_reduced = weakref.WeakMethod(refuse_reduced)
        self._has_main = any(p.main for p in parameters)
        self._added: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._rates: WeakKeyDictionary[torch.optim.Optimizer, object] = WeakKeyDictionary()
        self._news = News.TRAINS  # since `news`
        self._is_stepping = False  # whether one that was added is in its step
        # Gradients of the last step, and their versions, if this step looks for changes of them.
        self._results: list[tuple[Param, TensorWeakRef, int]] = []
        self._num_steps = 0
        self._looks = False

    def start(self) -> None:
        """Starts the checks."""
        _watches[id(self)] = self
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_look))
            # A hook of the user may still change parameters before they are sent, because torch
            # runs this after the hooks of the optimizer itself.
            _hooks.append(register_optimizer_step_post_hook(_look_back))

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Publishes after each step of `optimizer`, which has all main parameters."""
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
            PipegradError: If it may not step, with the reason and the way out. The error is also
                posted for the ranks that do not step.
        """
        is_added = optimizer in self._added
        parameters, with_main = self._parameters_of(optimizer)
        if not (is_added or parameters or with_main):
            return
        if self._looks:
            self._warn_of_changes()
        try:
            self._refuse(optimizer, parameters, with_main)
        except PipegradError as refusal:
            # Post the error, because ranks that step nothing, or whose optimizer is right, go on to
            # the next step. They read the reason on the board when this rank does not come.
            if (on_refusal := self._on_refusal()) is not None:
                on_refusal(refusal)
            raise
        self._is_stepping |= is_added

    def note_results(self) -> None:
        """Stores the present gradients and versions, in a step that looks for changes of them."""
        gradients = ((p, p.result) for p in self._parameters if self._looks)
        self._results = [(p, TensorWeakRef(g), g._version) for p, g in gradients if g is not None]

    def _warn_of_changes(self) -> None:
        """Warns once if gradients have changed since the step, as torch's own tools change them."""
        self._looks = False  # an optimizer that steps may write gradients itself
        for parameter, before, version in self._results:
            gradient = parameter.result
            if gradient is not None and (gradient is not before() or gradient._version != version):
                warn_once(
                    f"the gradient of {parameter.record.key!r} was changed between finish() and "
                    f"optimizer.step(). torch's clip_grad_norm_ and its GradScaler know only the "
                    f"gradients of this rank: call sync.clip_grad_norm_(), and use "
                    f"pipegrad.GradScaler(sync), which know those of all ranks. What changes each "
                    f"element alike on all ranks is right",
                    f"changed gradients {self._name}",
                )
                return

    def _refuse(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Param],
        with_main: Sequence[Param],
    ) -> None:
        """Raises an error if an optimizer may not step now, or not these parameters."""
        if replaced := [p.record.key for p in parameters if p.apart]:
            raise StepError(
                f"an optimizer steps {replaced[0]!r} itself, but its gradient is in a shard "
                f"or in a copy of it, so nothing would move: make it by sync.optimizer(), or of "
                f"sync.optimizer_parameters(), not of module.parameters()"
            )
        if any(p.main and p.main.sharded for p in with_main):
            refuse_unless_elementwise(optimizer)
        self._parameter_sync.refuse_untaken()
        # Allow it if each rank steps all parameters with the same gradients, because it then makes
        # the same step on all ranks.
        if not self._alike and isinstance(optimizer, torch.optim.LBFGS):
            raise PlanError(
                f"{type(optimizer).__name__} computes one step from all gradients of the model, "
                f"and no rank has all of them: copies of one parameter would get different steps. "
                f"Take an optimizer that looks at each parameter by itself, such as AdamW"
            )
        # torch's GradScaler gives the scale to an optimizer that unscales in its step, as fused
        # ones do. Then it has looked at the gradients of this rank alone. With other optimizers it
        # cannot be recognised, because it divides their gradients without a change of versions.
        scaler = self.scaler()
        is_ours = scaler is not None and scaler.is_stepping
        if not (self._alike or is_ours) and getattr(optimizer, "grad_scale", None) is not None:
            raise PlanError(
                "torch's GradScaler looks for overflows in the gradients of this rank alone, but "
                "other ranks have other gradients: one rank would skip a step that others make. "
                "Use pipegrad.GradScaler(sync), which decides once for all ranks"
            )
        if scaler is not None and scaler.is_scaled and not is_ours:
            raise StepError(
                "optimizer.step() of gradients that a GradScaler has scaled, perhaps with "
                "overflows: call scaler.step(optimizer), then scaler.update()"
            )
        # One of several of which an optimizer that was added consists.
        if self._is_stepping and optimizer not in self._added:
            return
        is_ready = self.gradients is Gradients.READY
        if self._parameter_sync.is_needed and is_ready and not self._parameter_sync.is_due:
            raise StepError(
                "optimizer.step() after publish(), or after an evaluation, which publishes: no "
                "other rank would get its update. Step between finish() and the evaluation"
            )
        is_ready |= any(each.gradients is Gradients.READY for each in self._siblings())
        if self._added and not is_ready:
            raise StepError(_UNTIMELY[self.gradients])

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after a step of `optimizer`; publishes if it was added."""
        is_added = optimizer in self._added
        # An optimizer of torch counts on each rank where it steps, because only some ranks may have
        # its parameters. One that was added has parameters on all ranks.
        if is_added or not self._added:
            self._news |= News.STEPPED
            self._rates.setdefault(optimizer, _rates_of(optimizer))
        if not self._added or (self._is_stepping and not is_added):
            return
        self._is_stepping = False
        if is_added or any(self._parameters_of(optimizer)):
            self.gradients = Gradients.USED
        if is_added:
            self._parameter_sync.publish()

    def news(self) -> News:
        """Returns the flags of this rank since the last call; 0 if it trains nothing."""
        news, self._news = self._news, News.TRAINS
        for optimizer, before in list(self._rates.items()):
            if (now := _rates_of(optimizer)) != before:
                self._rates[optimizer] = now
                news |= News.CHANGED
        return news if self._has_main else News(0)

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
        return [
            watch
            for watch in list(_watches.values())
            if watch is not self
            and not {id(p.tensor) for p in watch._parameters}.isdisjoint(
                id(p.tensor) for p in self._parameters
            )
        ]

    def expect(self, *, has_gradients: bool) -> None:
        """Sets whether there are gradients for an optimizer, of a step that has just ended."""
        self.gradients = Gradients.READY if has_gradients else Gradients.NONE
        self._is_stepping = False  # the step may have failed
        if (scaler := self.scaler()) is not None:
            scaler.expect()
        self._num_steps += has_gradients
        is_rare = not self._num_steps & (self._num_steps - 1)  # step 1, 2, 4, 8 and so on
        self._looks = has_gradients and is_rare and not self._alike
        self.note_results()

    def _parameters_of(self, optimizer: torch.optim.Optimizer) -> tuple[list[Param], list[Param]]:
        """Returns an optimizer's parameters, and the parameters whose main shard it has."""
        ids = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        with_main = [p for p in self._parameters if p.apart and id(p.apart.tensor) in ids]
        return [p for p in self._parameters if id(p.tensor) in ids], with_main


# One hook of the process serves all watches, because a watch may become garbage while torch runs
# its hooks. torch's table of hooks may not change at that time, but this table may.
_watches: WeakValueDictionary[int, OptimizerWatch] = WeakValueDictionary()
_hooks: list[RemovableHandle] = []


def _look(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for watch in list(_watches.values()):
        watch.check(optimizer)


def _look_back(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for watch in list(_watches.values()):
        watch.after_step(optimizer)


def _rates_of(optimizer: torch.optim.Optimizer) -> object:
    """Returns the values that schedules change.

    For a tensor this is its version, because the host would wait for its value.
    """
    rates = [group.get(name) for group in optimizer.param_groups for name in ("lr", "weight_decay")]
    return [(id(x), x._version) if isinstance(x, torch.Tensor) else x for x in rates]


def steps_alike(manifest: Manifest, plan: Plan, topology: Topology) -> bool:
    """True if each rank steps all parameters, with gradients that are equal on all ranks."""
    # Ranks have the same gradient after its reductions, in the mesh of a DTensor, and after
    # DistributedDataParallel. If these are all ranks, all ranks make the same step.
    sizes, routes = dict(topology.axes), dict(plan.routes)
    data = math.prod(sizes[axis] for axis in topology.data_axes)
    for record in manifest.parameters:
        route = routes.get(record.key, ())
        layout = manifest.entries(record.key)[0].layout
        ranks = math.prod(len(step.ranks) for step in route)  # that have the same gradient
        ranks *= 1 if layout is None else math.prod(size for _, size in layout.mesh)
        ranks *= data if record.stage in manifest.reduced_by_ddp else 1
        is_placed = any(step.syncs_parameters for step in route)
        if record.requires_grad and (is_placed or ranks < len(topology.ranks)):
            return False
    return True
