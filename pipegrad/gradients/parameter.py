"""One parameter of this rank, live: looked up, its gradient prepared, watched, and put in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from pipegrad.errors import StepError
from pipegrad.gradients.negotiate import Agreed, has_stand_in, master_dtype_of
from pipegrad.model.dtensor import is_dtensor
from pipegrad.model.gradient_storage import GradAttribute, GradientAccessor
from pipegrad.model.module_tree import ModuleTree
from pipegrad.model.ties import named
from pipegrad.optimizer.main_params import StandIn
from pipegrad.optimizer.param_sync import ParameterBuffer
from pipegrad.plan.routes import has_result
from pipegrad.plugins.handler import ParameterRecord, Placement
from pipegrad.reduce.bucket_buffer import FILL_FREE, BucketBuffer


class Traits(NamedTuple):
    """What may not change about a parameter once the ranks have agreed."""

    shape: torch.Size
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return (
            f"{tuple(self.shape)} {self.dtype}, gradient {self.gradient_dtype}, "
            f"requires_grad={self.requires_grad}"
        )


class LiveParameter:
    """What happens to one parameter's gradient on this rank within a step.

    Args:
        record: What the ranks agreed on.
        homes: Local stage -> the modules it is in, and its full name there; all one object.
        accessor: Where its gradient lives.
        buffer: Its bucket's buffer; None if nobody reduces it.
        has_result: Whether this rank has its reduced gradient, or a row of it.
        mirrored: Where it lies, if it may come from other ranks.
        divisor: What its gradient is divided by, beside what each step divides all by.

    Attributes:
        live: The tensor that this step began with.
        view: The slot that autograd can accumulate into; None where dtypes differ.
        stand_in: What the optimizer steps in its place.
    """

    def __init__(
        self,
        record: ParameterRecord,
        homes: Mapping[int, tuple[ModuleTree, str]],
        accessor: GradientAccessor,
        buffer: BucketBuffer | None,
        *,
        has_result: bool = True,
        mirrored: ParameterBuffer | None = None,
        divisor: float = 1.0,
    ) -> None:
        self.record = record
        self.stages = frozenset(homes)
        self.buffer = buffer
        self.view = None if buffer is None else _shared_view(buffer, record.key)
        self.mirrored = mirrored
        self.stand_in: StandIn | None = None
        self._has_result = has_result
        self._divisor = divisor
        self.early: bool | None = None
        self.final = False
        self.contributed = False
        self.waiting: set[int] = set()
        self.firings = 0
        self.left_early = False
        self._accessor = accessor
        self._homes = list(homes.values())
        tree, name = self._homes[0]
        self.live = tree.walk(name)
        self._is_dtensor = is_dtensor(self.live)
        self._agreed = self._traits(self.live)
        self._is_row = mirrored is not None and any(
            hop.placement is Placement.SHARD for hop in mirrored.bucket.route
        )
        self._address: int | None = None  # of the memory that what is stepped is brought to
        self._version: int | None = None  # before anybody else writes into it
        self._hook: RemovableHandle | None = None
        self._hooks: dict[int, Any] = {}  # of the parameter, ours and the user's
        self._hooked: TensorWeakRef | None = None
        self._fired = False  # whether autograd has added to the gradient at hand
        self._zeroed_version: int | None = None
        self._owed = 1.0  # what the gradient at hand is still to be divided by
        self._left: tuple[TensorWeakRef, int] | None = None  # a result, and its version
        self._is_clean = False  # whether the result was zeroed in place
        self._adds = False  # whether this step's result is added to the last one's
        self._kept: TensorWeakRef | None = None  # a result, where the accessor has gradients

    @property
    def parameter(self) -> nn.Parameter:
        """The live tensor, looked up in its stage each time.

        Where FSDP2 has put what it gathered in its place, the last one that was there: a shard.
        """
        tree, name = self._homes[0]
        return self._unless_gathered(tree.walk(name))

    def _unless_gathered(self, found: nn.Parameter) -> nn.Parameter:
        if found is self.live or not self._is_dtensor:
            return found
        live: Any = self.live
        shards = is_dtensor(found) and found.device_mesh == live.device_mesh
        return found if shards else self.live

    @property
    def _found(self) -> nn.Parameter:
        """What is in its module now, if its `ModuleTree` was checked."""
        tree, name = self._homes[0]
        try:
            return tree.parameter(name)
        except AttributeError as error:
            raise StepError(
                f"{self.record.key!r} is no parameter of its module any more: {error}. "
                f"weight_norm, prune and parametrize replace a parameter by others: call them "
                f"before the GradientSync is made, or make a new one on all ranks"
            ) from error

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient of the parameter that this step began with, wherever it lives."""
        return self._accessor.read(self.live)

    @property
    def stepped(self) -> nn.Parameter | None:
        """What this rank's optimizer steps: none, where another rank does, or it is frozen."""
        if self.stand_in is not None:
            return self.stand_in.tensor
        whole = self._has_result and not self._is_row and self.record.requires_grad
        return self.parameter if whole else None

    @property
    def is_replaced(self) -> bool:
        """Whether optimizers step something else: a row on some rank, or a copy."""
        return self.stand_in is not None or self._is_row

    @property
    def stepped_gradient(self) -> torch.Tensor | None:
        """The gradient of what this rank's optimizer steps."""
        return self.gradient if self.stand_in is None else self.stand_in.tensor.grad

    def settle(self) -> None:
        """Puts the parameter where it may come from other ranks; what stands in has its values."""
        if self.mirrored is not None:
            self.mirrored.adopt(self.record.key, self.parameter)
        if self.stand_in is not None:
            share, whole = self.stand_in.share, self.parameter.data
            if share.sharded and self.mirrored is not None:
                whole = self.mirrored.row(share.key, share.begin, share.end)
            self.stand_in.stand_for(whole)
        self._address = self.parameter.data_ptr() if self.moves else None
        is_copied = self.stand_in is not None and self.stand_in.copied
        self._version = self.parameter._version if is_copied else None

    @property
    def moves(self) -> bool:
        """Whether what is stepped is brought here, from another rank or another dtype."""
        return self.mirrored is not None or self.stand_in is not None

    def watch(self, on_accumulated: Callable[[LiveParameter], None]) -> None:
        """Calls `on_accumulated` whenever autograd has accumulated into the live parameter."""
        parameter = self.live
        hooked = self._hooked is not None and parameter is self._hooked()
        if not self.record.requires_grad or (hooked and self.fires_last):
            return
        self.unwatch()
        # Weakly: the collector of garbage does not see that a parameter holds its hooks.
        this, called = weakref.ref(self), weakref.WeakMethod(on_accumulated)

        def accumulated(parameter: nn.Parameter) -> None:
            live, on_accumulated = this(), called()
            if live is not None and on_accumulated is not None:
                live._fired = True
                live._accessor.accumulated(parameter)
                on_accumulated(live)

        self._hook = parameter.register_post_accumulate_grad_hook(accumulated)
        # The handle has it weakly, and when garbage is collected such references go first.
        self._hooks = self._hook.hooks_dict_ref() or {}
        self._hooked = TensorWeakRef(parameter)

    def unwatch(self) -> None:
        """Leaves the parameter as it was before `watch`."""
        if self._hook is not None:
            self._hooks.pop(self._hook.id, None)
        self._hook = self._hooked = None

    def __del__(self) -> None:
        if hasattr(self, "_hook"):  # else it was refused before it was complete
            self.unwatch()

    @property
    def fires_last(self) -> bool:
        """Whether all hooks that users have registered run before ours: they may change it."""
        if self._hook is None:
            return False
        return next(reversed(self._hooks), None) == self._hook.id

    def refresh(self, *, continuing: bool) -> None:
        """Looks the parameter up anew, and refuses what would make this step's gradient wrong.

        Args:
            continuing: The step adds to earlier ones that were accumulated.

        Raises:
            StepError: If the parameter is no longer what was agreed on, or its gradient still is
                the reduced one of the step before.
        """
        parameter = self._unless_gathered(self._found)
        if parameter is not self.live:
            self.live = parameter
            self._is_dtensor = is_dtensor(parameter)
        if self._traits(parameter) != self._agreed:
            raise StepError(
                f"{self.record.key!r} was {self._agreed} when the ranks agreed, now it is "
                f"{self._traits(parameter)}: make a new GradientSync on all ranks"
            )
        for tree, name in self._homes[1:]:
            if tree.parameter(name) is not parameter:
                raise StepError(
                    f"{self.record.key!r} was one parameter on stages {sorted(self.stages)}, now "
                    f"{name!r} is another: make them one again"
                )
        if self._address is not None and self._address != parameter.data_ptr():
            raise StepError(
                f"the memory of {self.record.key!r} was replaced, and what is stepped for it would "
                f"not arrive there: call sync.synchronize_parameters() on all ranks; if it is "
                f"another parameter now, make the optimizer of sync.optimizer_parameters() again"
            )
        if self._version is not None and self._version != parameter._version:
            raise StepError(
                f"{self.record.key!r} was changed, and its stored copy, which is what is stepped, "
                f"was not: call sync.synchronize_parameters() on all ranks, outside of a step"
            )
        is_left = self._has_result_left  # not while continuing: then it is this step's own
        self._adds = (continuing and self._adds) or is_left
        self._is_clean = is_left and self.buffer is not None
        if self._is_clean and not self._is_zero:
            raise StepError(
                f"the gradient of {self.record.key!r} is already reduced, and another backward "
                f"would add to it: call optimizer.zero_grad() before the step, to make it zero or "
                f"None. optimizer.zero_grad() does so for the parameters that this optimizer has, "
                f"module.zero_grad() for all whose gradient is in .grad. Or accumulate with "
                f"'with sync.accumulate():' around all steps but the last"
            )

    def open(self, divisor: float, *, continuing: bool) -> bool:
        """Starts a step; returns whether to zero the slot, for a gradient that is to go there.

        Args:
            divisor: What this step's gradient is to be divided by, beside the parameter's own.
            continuing: The step adds to earlier ones that were accumulated.

        Sync: on the current stream, which may scale a gradient that is there already.
        """
        owed, self._owed = self._owed, divisor * self._divisor
        if not continuing:
            self._fired = False
            self._drop_kept()
            owed = 1.0 if self._adds else self._divisor  # a result, or the user's own
        self._left = None  # the slot comes back, for a gradient that is not yet reduced
        self.waiting = set(self.stages)
        self.final = False
        self.firings = 0
        gradient = self._accumulated
        if gradient is None:
            return self.view is not None
        if not continuing or gradient is not self.view:
            self._zeroed_version = None
        if owed != self._owed and not (self._is_clean or self._is_untouched(gradient)):
            with torch.no_grad():
                gradient.mul_(self._owed / owed)  # so that one division serves all steps
        return False

    def use_view(self) -> None:
        """Lets autograd accumulate into the zeroed slot, where that is possible."""
        view = self.view
        if view is not None:
            self._accessor.write(self.live, view)
            self._zeroed_version = self._writes(view)

    def close(self) -> torch.Tensor | None:
        """Marks the gradient final and returns it, divided once; None if there is none.

        Raises:
            StepError: If autograd has made one that is to be reduced, and somebody took it away.
        """
        if self.live.grad is not None and not isinstance(self._accessor, GradAttribute):
            self._accessor.accumulated(self.live)  # torch's split backwards fire no hooks
            self._fired = True
        if self._is_term:
            self._sum_terms()
        self.final = True
        self.left_early = bool(self.waiting)
        gradient = self.gradient
        if gradient is None and self._fired and self.buffer is not None:
            raise StepError(
                f"the gradient of {self.record.key!r} is gone: autograd added to it in this step, "
                f"and it was set to None since, so nothing is left to reduce. Call "
                f"optimizer.step() after finish(), not in a hook; to drop a gradient inside a "
                f"step, zero it"
            )
        self.contributed = gradient is not None and not self._is_untouched(gradient)
        if gradient is not None and self._owed != 1:
            if self.buffer is not None and not self.contributed:
                self.buffer.acquire(FILL_FREE)  # no producer has waited for the zeroing
            with torch.no_grad():
                gradient.div_(self._owed)
        return gradient

    def _is_untouched(self, gradient: torch.Tensor) -> bool:
        """Whether nobody is known to have written into the zeroed slot.

        The version tells only where no hook has fired: a kernel that is given an address leaves it.
        What is written by address alone, without autograd, the slot's values tell: `BucketBuffer`.
        """
        if self._fired or gradient is not self.view:
            return False
        return self._zeroed_version is not None and self._writes(gradient) == self._zeroed_version

    @property
    def _is_term(self) -> bool:
        """Whether what this rank has is a term of its DTensor's gradient, which its mesh is to sum.

        Backward leaves it so where there was no gradient to add to: if nobody reduces it.
        """
        if not self._is_dtensor:
            return False
        gradient = self.live.grad
        return is_dtensor(gradient) and any(p.is_partial() for p in gradient.placements)

    @property
    def _accumulated(self) -> torch.Tensor | None:
        """The gradient so far, or a term of it: for who asks which it is, not what is in it."""
        return self.live.grad if self._is_term else self.gradient

    def _sum_terms(self) -> None:
        """Makes the gradient lie as its parameter does, where it is a term.

        Sync: on the current stream; all ranks of the mesh do so, in the order of their parameters.
        """
        parameter: Any = self.live
        pairs = zip(parameter.grad.placements, parameter.placements, strict=True)
        wanted = [meant if found.is_partial() else found for found, meant in pairs]
        with torch.no_grad():
            parameter.grad = parameter.grad.redistribute(placements=wanted)

    def finish(self) -> bool:
        """Puts the result in place; returns True if it had to be copied out of the bucket."""
        copied = False
        if self.buffer is not None:
            result = self.buffer.views[self.record.key]
            has_any = self._has_result and self.buffer.anybody_contributed(self.record.key)
            if self._is_row:
                self._hand_over(self.buffer if has_any else None)
            elif not has_any:
                self._accessor.write(self.live, None)
            elif self.view is None:
                self._copy_back(result)
                copied = True
            elif self.gradient is not result:
                self._accessor.write(self.live, result)
        if self.stand_in is not None and not self._is_row:
            # A reduced result replaces the zeros that are left, which may be the same memory.
            adds = self._adds and (self.buffer is None or self.gradient is None)
            self.stand_in.take(self.gradient, adds=adds)
            self._keep(self.stand_in.tensor.grad)
        self.mark_reduced()
        if self.firings > 1:  # e.g. reentrant checkpointing: each firing is only a part
            self.early = False
        elif self.early is None and self.firings == 1:
            self.early = True
        return copied

    def _hand_over(self, buffer: BucketBuffer | None) -> None:
        """Leaves the gradient to the row that stands in for this parameter, if there is one."""
        self._accessor.write(self.live, None)
        if self.stand_in is not None:
            share = self.stand_in.share
            row = None if buffer is None else buffer.row(share.key, share.begin, share.end)
            self.stand_in.take(row)

    def _keep(self, result: torch.Tensor | None) -> None:
        """Leaves the result where the accessor has gradients, for those who read it there.

        Only ``.grad`` is emptied: another optimizer might step the parameter by it.
        """
        if isinstance(self._accessor, GradAttribute):
            self._accessor.write(self.live, None)
            return
        if self._adds and result is not None:
            dtype = self._accessor.dtype(self.live)
            self._accessor.write(self.live, result.detach().to(dtype))
        gradient = self.gradient
        self._kept = None if gradient is None else TensorWeakRef(gradient)

    def _drop_kept(self) -> None:
        """Takes the last step's result from the accessor: what stands in has it, or is zeroed."""
        gradient = None if self._kept is None else self.gradient
        if gradient is not None and self._kept is not None and gradient is self._kept():
            self._accessor.write(self.live, None)
        self._kept = None

    @property
    def _has_result_left(self) -> bool:
        """Whether the last step's result is there still; it may have been zeroed in place."""
        if self._left is None:
            return False
        result = self._result
        return result is not None and result is self._left[0]()

    @property
    def _result(self) -> torch.Tensor | None:
        return self._accumulated if self.stand_in is None else self.stand_in.tensor.grad

    @property
    def _is_zero(self) -> bool:
        """Whether the last step's result was zeroed in place; the values are read where it may."""
        result = self._result
        assert result is not None
        assert self._left is not None
        if self._writes(result) == self._left[1]:
            return False
        is_zero = self.buffer is not None and result is self.view and self.buffer.is_zero()
        return is_zero or not bool(result.any())

    def drop(self) -> None:
        """Takes the gradient away, of a step that failed: it may be a part of one."""
        self._left = None
        if self.record.requires_grad:
            self._accessor.write(self.live, None)
            self.live.grad = None  # what no accessor has taken yet
        if self.stand_in is not None:
            self.stand_in.take(None)

    def mark_reduced(self) -> None:
        """Remembers the result as it is now, so that `refresh` knows whether it was renewed."""
        gradient = self.stepped_gradient
        # Weakly: a gradient that the user drops must not live on until the next one is there.
        self._left = None if gradient is None else (TensorWeakRef(gradient), self._writes(gradient))

    def _writes(self, gradient: torch.Tensor) -> int:
        """Counts the writes to the gradient; what is written by way of a DTensor, that counts."""
        if not self._is_dtensor:
            return gradient._version
        whole = self.live.grad
        return gradient._version + (whole._version if is_dtensor(whole) else 0)

    def _traits(self, parameter: nn.Parameter) -> Traits:
        # Asking for the gradient's dtype also tells autograd that of a parameter that is new.
        gradient_dtype = self._accessor.dtype(parameter)
        return Traits(parameter.shape, parameter.dtype, gradient_dtype, parameter.requires_grad)

    def _copy_back(self, result: torch.Tensor) -> None:
        gradient = self.gradient
        if gradient is None or gradient.is_sparse or gradient.requires_grad:
            self._accessor.write(self.live, result.to(self._accessor.dtype(self.live)))
        else:
            gradient.copy_(result)


def _shared_view(buffer: BucketBuffer, key: str) -> torch.Tensor | None:
    shares = buffer.bucket.dtype == buffer.bucket.wire_dtype
    return buffer.views[key] if shares else None


def live_parameters(
    agreed: Agreed,
    modules: Mapping[int, nn.Module],
    trees: Mapping[int, ModuleTree],
    *,
    buffers: Mapping[str, BucketBuffer],
    mirrored: Mapping[str, ParameterBuffer],
) -> dict[str, LiveParameter]:
    """Returns this rank's parameters by key, with what stands in for them.

    Args:
        agreed: What they are.
        modules: Where they are.
        trees: Where they are looked up.
        buffers: Key -> where its gradient is reduced.
        mirrored: Key -> where it lies, if it may come from other ranks.
    """
    manifest, plan = agreed.manifest, agreed.plan
    routes, divisors = dict(plan.routes), dict(plan.divisors)
    homes = {place: (trees[place[0]], full) for place, full, _ in named(modules)}
    found = {
        record.key: LiveParameter(
            record,
            {p[0]: homes[p] for p in manifest.places(record.key) if p[0] in modules},
            agreed.accessor,
            buffers.get(record.key),
            has_result=has_result(routes.get(record.key, ()), plan.rank),
            mirrored=mirrored.get(record.key),
            divisor=divisors.get(record.key, 1.0),
        )
        for record in manifest.records(agreed.topology)
    }
    for parameter in found.values():
        if not parameter.stages.isdisjoint(manifest.reduced_by_ddp):
            parameter.early = False  # DistributedDataParallel is done when backward is
    for share in plan.shares:
        record = found[share.key].record
        stored = master_dtype_of(record, agreed.master_dtype)
        if share.sharded or has_stand_in(record, agreed.accessor, agreed.master_dtype):
            gradient_dtype = manifest.entries(share.key)[0].gradient_dtype
            found[share.key].stand_in = StandIn(share, stored, gradient_dtype)
    return found
