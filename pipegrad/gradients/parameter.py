"""One parameter of this rank: its gradient is prepared, watched, taken, and put in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from pipegrad.errors import StepError
from pipegrad.gradients.accumulation_hook import AccumulationHook
from pipegrad.gradients.parameter_home import ParameterHome
from pipegrad.model.dtensor import has_terms, is_dtensor, sum_terms
from pipegrad.model.gradient_storage import GradAttribute, GradientAccessor
from pipegrad.model.module_tree import ModuleTree
from pipegrad.optimizer.main_params import MainShard
from pipegrad.optimizer.param_sync import ParameterBuffer
from pipegrad.optimizer.placed_parameter import PlacedParameter
from pipegrad.plugins.handler import ParameterRecord
from pipegrad.reduce.bucket_buffer import FILL_FREE, BucketBuffer

OnAccumulated = Callable[["LiveParameter"], None]


class LiveParameter:
    """What happens to one parameter's gradient on this rank within a step.

    Args:
        record: What the ranks agreed on.
        homes: Local stage -> the modules it is in, and its full name there; all one object.
        accessor: Where its gradient lives.
        buffer: Its bucket's buffer; None if nobody reduces it.
        has_result: Whether this rank has its reduced gradient, or a shard of it.
        parameter_buffer: The memory of the parameter, if it may come from other ranks.
        main_shard: What the optimizer steps in its place.
        divisor: What its gradient is divided by, beside what each step divides all by.
        may_leave_early: Whether its gradient may be final before its stage's backward ends.

    Attributes:
        live: The tensor that this step began with.
        view: The slot that autograd can accumulate into; None where dtypes differ.
        placed: What this rank's optimizer steps for it.
        waiting: Stages of this rank that may still add to its gradient.
        final: Whether none does.
        contributed: Whether the final gradient is more than the zeros it began with.
        left_early: Whether it was final before its stages' backwards ended.
    """

    def __init__(
        self,
        record: ParameterRecord,
        homes: Mapping[int, tuple[ModuleTree, str]],
        accessor: GradientAccessor,
        buffer: BucketBuffer | None,
        *,
        has_result: bool = True,
        parameter_buffer: ParameterBuffer | None = None,
        main_shard: MainShard | None = None,
        divisor: float = 1.0,
        may_leave_early: bool = True,
    ) -> None:
        self.record = record
        self.stages = frozenset(homes)
        self.buffer = buffer
        self.view = None if buffer is None else _shared_view(buffer, record.key)
        self.placed = PlacedParameter(
            record.key,
            is_trained=record.requires_grad,
            has_result=has_result,
            buffer=parameter_buffer,
            main_shard=main_shard,
        )
        self.final = False
        self.contributed = False
        self.waiting: set[int] = set()
        self.left_early = False
        self._has_result = has_result
        self._divisor = divisor
        self._accessor = accessor
        self._home = ParameterHome(record.key, homes, accessor)
        self.live = self._home.first()
        self._is_dtensor = is_dtensor(self.live)
        self._hook = AccumulationHook(self._note_accumulation)
        self._on_accumulated: weakref.WeakMethod[OnAccumulated] | None = None
        self._fired = False  # whether autograd has added to the gradient at hand
        self._num_firings = 0  # in this step, behind the last backwards of all its stages
        # Whether one firing is the whole gradient. None: not known before the first step.
        self._fires_once: bool | None = None if may_leave_early else False
        self._zeroed_version: int | None = None
        self._owed = 1.0  # what the gradient at hand is still to be divided by
        self._left: tuple[TensorWeakRef, int] | None = None  # a result, and its version
        self._is_clean = False  # whether the result was zeroed in place
        self._adds = False  # whether this step's result is added to the last one's
        self._kept: TensorWeakRef | None = None  # a result, where the accessor has gradients

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter, looked up in its module now; see `ParameterHome.walk`."""
        return self._home.walk(self.live)

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient of the parameter that this step began with, wherever it lives."""
        return self._accessor.read(self.live)

    @property
    def main_parameter(self) -> nn.Parameter | None:
        """What this rank's optimizer steps: none, where another rank does, or it is frozen."""
        return self.placed.tensor(self.parameter)

    @property
    def main_gradient(self) -> torch.Tensor | None:
        """The gradient of what this rank's optimizer steps."""
        main_shard = self.placed.main_shard
        return self.gradient if main_shard is None else main_shard.tensor.grad

    def settle(self) -> None:
        """Moves the parameter into its buffer; the main shard takes its values."""
        self.placed.settle(self.parameter)

    def connect(self, on_accumulated: OnAccumulated) -> None:
        """Calls a method from now on when autograd has accumulated; see `watch`.

        Args:
            on_accumulated: A bound method, held weakly. Called with this object, possibly in
                autograd's threads.
        """
        self._on_accumulated = weakref.WeakMethod(on_accumulated)

    def watch(self) -> None:
        """Follows the tensor that this step began with."""
        if self.record.requires_grad:
            self._hook.follow(self.live)

    def unwatch(self) -> None:
        """Leaves the parameter as it was before `watch`."""
        self._hook.remove()

    def _note_accumulation(self, parameter: nn.Parameter) -> None:
        called = None if self._on_accumulated is None else self._on_accumulated()
        if called is not None:
            self._fired = True
            self._accessor.accumulated(parameter)
            called(self)

    def note_last_firing(self) -> None:
        """Counts an accumulation behind the last backwards of all stages that hold it."""
        self._num_firings += 1

    @property
    def is_complete(self) -> bool:
        """Whether one accumulation is the whole gradient, and no user's hook comes behind ours."""
        return self._fires_once is True and self._hook.runs_last

    def leave(self, stage: int) -> bool:
        """Notes that `stage` adds nothing more; returns whether no stage of this rank does."""
        self.waiting.discard(stage)
        return not self.waiting and not self.final

    def refresh(self, *, continuing: bool) -> None:
        """Looks the parameter up anew, and refuses what would make this step's gradient wrong.

        Args:
            continuing: The step adds to earlier ones that were accumulated.

        Raises:
            StepError: If the parameter is no longer what was agreed on, or its gradient still is
                the reduced one of the step before.
        """
        parameter = self._home.look_up(self.live)
        if parameter is not self.live:
            self.live = parameter
            self._is_dtensor = is_dtensor(parameter)
        self.placed.check(parameter)
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
        self._num_firings = 0
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
        if has_terms(self.live.grad):
            sum_terms(self.live)
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
    def _accumulated(self) -> torch.Tensor | None:
        """The gradient so far, or a term of it: for who asks which it is, not what is in it."""
        gradient = self.live.grad
        return gradient if has_terms(gradient) else self.gradient

    def finish(self) -> bool:
        """Puts the result in place; returns True if it had to be copied out of the bucket."""
        copied = False
        if self.buffer is not None:
            result = self.buffer.views[self.record.key]
            has_any = self._has_result and self.buffer.anybody_contributed(self.record.key)
            if self.placed.is_sharded:
                self._hand_over(self.buffer if has_any else None)
            elif not has_any:
                self._accessor.write(self.live, None)
            elif self.view is None:
                self._copy_back(result)
                copied = True
            elif self.gradient is not result:
                self._accessor.write(self.live, result)
        main_shard = self.placed.main_shard
        if main_shard is not None and not self.placed.is_sharded:
            # A reduced result replaces the zeros that are left, which may be the same memory.
            adds = self._adds and (self.buffer is None or self.gradient is None)
            main_shard.take(self.gradient, adds=adds)
            self._keep(main_shard.tensor.grad)
        self.mark_reduced()
        if self._num_firings > 1:  # e.g. reentrant checkpointing: each firing is only a part
            self._fires_once = False
        elif self._fires_once is None and self._num_firings == 1:
            self._fires_once = True
        return copied

    def _hand_over(self, buffer: BucketBuffer | None) -> None:
        """Gives the gradient to the main shard of this rank, if there is one."""
        self._accessor.write(self.live, None)
        main_shard = self.placed.main_shard
        if main_shard is not None:
            main_range = main_shard.main_range
            shard = (
                None
                if buffer is None
                else buffer.shard(main_range.key, main_range.begin, main_range.end)
            )
            main_shard.take(shard)

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
        """Takes the last step's result from the accessor: the main shard has it, or is zeroed."""
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
        main_shard = self.placed.main_shard
        return self._accumulated if main_shard is None else main_shard.tensor.grad

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
        if self.placed.main_shard is not None:
            self.placed.main_shard.take(None)

    def mark_reduced(self) -> None:
        """Remembers the result as it is now, so that `refresh` knows whether it was renewed."""
        gradient = self.main_gradient
        # Weakly: a gradient that the user drops must not live on until the next one is there.
        self._left = None if gradient is None else (TensorWeakRef(gradient), self._writes(gradient))

    def _writes(self, gradient: torch.Tensor) -> int:
        """Counts the writes to the gradient; what is written by way of a DTensor, that counts."""
        if not self._is_dtensor:
            return gradient._version
        whole = self.live.grad
        return gradient._version + (whole._version if is_dtensor(whole) else 0)

    def _copy_back(self, result: torch.Tensor) -> None:
        gradient = self.gradient
        if gradient is None or gradient.is_sparse or gradient.requires_grad:
            self._accessor.write(self.live, result.to(self._accessor.dtype(self.live)))
        else:
            gradient.copy_(result)


def _shared_view(buffer: BucketBuffer, key: str) -> torch.Tensor | None:
    main_ranges = buffer.bucket.dtype == buffer.bucket.wire_dtype
    return buffer.views[key] if main_ranges else None
