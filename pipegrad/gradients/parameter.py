"""The gradient of one parameter of this rank: steps 1, 2, 3 and 7 of the journey of a gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from pipegrad.errors import StepError
from pipegrad.gradients.accumulation_hook import AccumulationHook
from pipegrad.gradients.bucket_buffer import BucketBuffer
from pipegrad.gradients.main_params import MainShard
from pipegrad.gradients.param_sync import ParameterBuffer
from pipegrad.gradients.parameter_home import ParameterHome
from pipegrad.gradients.placed_parameter import PlacedParameter
from pipegrad.model.dtensor import is_dtensor, is_misplaced, local, redistribute_gradient
from pipegrad.model.gradient_storage import GradAttribute, GradientAccessor
from pipegrad.model.module_tree import ModuleTree
from pipegrad.plugins.handler import ParameterRecord

OnAccumulated = Callable[["LiveParameter"], None]


class LiveParameter:
    """The gradient of one parameter on this rank, during a step.

    Args:
        record: The parameter, as the ranks agreed on it.
        homes: Local stage -> its modules, and the full name there. All are the same object.
        accessor: Where its gradient lives.
        buffer: The buffer of its bucket; None if it is not reduced.
        has_result: Whether this rank has its reduced gradient, or a shard of it.
        parameter_buffer: The memory of the parameter, if a parameter sync may write to it.
        main_shard: What the optimizer steps instead of the parameter.
        divisor: Its gradient is divided by this, besides the divisor of each step.
        may_leave_early: Whether its gradient may be final before its stage's backward ends.

    Attributes:
        live: The tensor at the beginning of this step.
        placed: The parameter and its main parameter.
        waiting: Stages of this rank that may still add to its gradient.
        final: Whether no stage will add to it.
        contributed: Whether something was added to the zeros at the beginning.
        left_early: Whether it was final before the backwards of its stages ended.
        pending_divisor: The present gradient must still be divided by this.
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
        self.pending_divisor = 1.0
        self._has_result = has_result
        self._divisor = divisor
        self._accessor = accessor
        self._home = ParameterHome(record.key, homes, accessor)
        self.live = self._home.first()
        self._is_dtensor = is_dtensor(self.live)
        self._hook = AccumulationHook(self._note_accumulation)
        self._on_accumulated: weakref.WeakMethod[OnAccumulated] | None = None
        self._is_attribute = isinstance(accessor, GradAttribute)
        # A gradient that nobody reduces stays where autograd adds to it, and `finish` divides it.
        self._needs_hook = record.requires_grad and (buffer is not None or not self._is_attribute)
        # Whether autograd can add to the slot. Then `.grad` is the slot, and nothing is copied.
        self._can_share = buffer is not None and buffer.bucket.dtype == buffer.bucket.wire_dtype
        self._began_with_gradient = False
        self._fired = False  # whether autograd has added to the present gradient
        self._num_firings = 0  # in this step, during the last backwards of all its stages
        # Whether one firing is the whole gradient. None: unknown before the first step.
        self._fires_once: bool | None = None if may_leave_early else False
        self._zeroed_version: int | None = None
        self._last_result: tuple[TensorWeakRef, int] | None = None  # and its version
        self._is_clean = False  # whether the last result was zeroed in place
        self._adds = False  # whether this step's result is added to the last result
        self._accessor_result: TensorWeakRef | None = None  # the last result in the accessor

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter, looked up in its module now; see `ParameterHome.walk`."""
        return self._home.walk(self.live)

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient of `live`, in the accessor."""
        return self._accessor.read(self.live)

    @property
    def main_parameter(self) -> nn.Parameter | None:
        """What this rank's optimizer steps; None if another rank steps it, or it is frozen."""
        return self.placed.tensor(self.parameter)

    @property
    def main_gradient(self) -> torch.Tensor | None:
        """The gradient of the main parameter."""
        main_shard = self.placed.main_shard
        return self.gradient if main_shard is None else main_shard.tensor.grad

    @property
    def is_elsewhere(self) -> bool:
        """Whether other ranks reduce its gradient too, or something else is stepped for it."""
        return self.buffer is not None or self.placed.main_shard is not None

    @property
    def is_result_changed(self) -> bool:
        """Whether somebody has written the result of the last step, or set another one."""
        gradient, last = self.main_gradient, self._last_result
        if gradient is None or last is None:
            return False
        return gradient is not last[0]() or self._writes(gradient) != last[1]

    def settle(self) -> None:
        """Moves the parameter into its buffer, and its values into the main shard."""
        self.placed.settle(self.parameter)

    @property
    def view(self) -> torch.Tensor | None:
        """The slot, if autograd can add to it, and there is memory; None if dtypes differ."""
        return self.buffer.views.get(self.record.key) if self.buffer and self._can_share else None

    def connect(self, on_accumulated: OnAccumulated) -> None:
        """Sets the method to call after accumulations of autograd; see `watch`.

        Args:
            on_accumulated: A bound method; a weak reference. It is called with this object, perhaps
                in a thread of autograd.
        """
        self._on_accumulated = weakref.WeakMethod(on_accumulated)

    def watch(self) -> None:
        """Puts the hook on the tensor of this step, if an accumulation can need anything."""
        if self._needs_hook:
            self._hook.follow(self.live)

    def pause(self) -> None:
        """Stops watching until a last backward of a stage, or until the gradient is final.

        Autograd calls a hook for each parameter in each backward. After `adopt` there is nothing to
        do for a gradient in ``.grad``, so Python's time is saved.
        """
        if self._is_attribute:
            self._hook.pause()

    def resume(self) -> None:
        """Watches again: a last backward comes."""
        self._hook.resume()

    def unwatch(self) -> None:
        """Removes the hook."""
        self._hook.remove()

    def _note_accumulation(self, parameter: nn.Parameter) -> None:
        called = None if self._on_accumulated is None else self._on_accumulated()
        if called is not None:
            self._fired = True
            self._accessor.accumulated(parameter)
            called(self)

    def completes(self) -> bool:
        """Counts an accumulation during the last backwards of all stages that hold it.

        Returns:
            Whether it has made the gradient complete: one accumulation is the whole gradient, and
            no user's hook runs after ours.
        """
        self._num_firings += 1
        return self._fires_once is True and self._hook.runs_last

    def stage_is_done(self, stage: int) -> bool:
        """Notes that `stage` adds nothing more; returns whether the gradient can be final now."""
        self.waiting.discard(stage)
        if self.waiting:
            self._hook.resume()  # the last backwards of the other stages may have been announced
        return not self.waiting and not self.final

    def refresh(self, *, continuing: bool) -> None:
        """Looks the parameter up, and refuses changes that would make this step's gradient wrong.

        Args:
            continuing: Whether the step continues accumulated steps.

        Raises:
            StepError: If the parameter is not as the ranks agreed, or if its gradient is still the
                reduced gradient of the last step.
        """
        parameter = self._home.look_up(self.live)
        if parameter is not self.live:
            self.live = parameter
            self._is_dtensor = is_dtensor(parameter)
        if self.placed.is_updated_elsewhere:
            self.placed.check(parameter)
        has_last_result = self._has_last_result  # False if continuing: `open` has dropped it
        self._adds = (continuing and self._adds) or has_last_result
        self._is_clean = has_last_result and self.buffer is not None
        if self._is_clean and not self._is_zero:
            raise StepError(
                f"the gradient of {self.record.key!r} is already reduced, and another backward "
                f"would add to it: call optimizer.zero_grad() before the step, to make it zero or "
                f"None. optimizer.zero_grad() does so for the parameters that this optimizer has, "
                f"module.zero_grad() for all whose gradient is in .grad. Or accumulate with "
                f"'with sync.accumulate():' around all steps but the last"
            )

    def refuse_values(self) -> None:
        """Refuses a gradient that this step would add to, and then divide once more.

        Raises:
            StepError: If there is a gradient that is not zero.

        Sync: blocks the host if a gradient was zeroed, and not set to None.
        """
        gradient, last = self._accumulated, self._accessor_result
        if gradient is None or self._is_clean or (last is not None and gradient is last()):
            return
        if gradient.is_sparse or bool(local(gradient).any()):
            raise StepError(
                f"the parameter {self.record.key!r} has a gradient already, and the divisor of "
                f"this step is known only at its end, so it would be divided too: call "
                f"optimizer.zero_grad() before the step; or accumulate with "
                f"'with sync.accumulate():' around all steps but the last"
            )

    def open(self, divisor: float, *, continuing: bool) -> bool:
        """Starts a step; returns whether the slot must be zeroed: others may add to it.

        Args:
            divisor: Of this step's gradient, besides the parameter's own divisor.
            continuing: Whether the step continues accumulated steps.

        Sync: on the current stream. It may scale a gradient of earlier steps.
        """
        pending, self.pending_divisor = self.pending_divisor, divisor * self._divisor
        if not continuing:
            self._fired = False
            self._drop_accessor_result()
            if self._is_clean:
                self._drop_zeros()
            # A present gradient is a result, which was divided, or one that the user has set.
            pending = 1.0 if self._adds else self._divisor
        self._last_result = None
        self.waiting = set(self.stages)
        self.final = False
        self._num_firings = 0
        gradient = self._accumulated
        self._began_with_gradient = gradient is not None
        if gradient is None:
            return self._can_share and not self._is_attribute
        if not continuing or gradient is not self.view:
            self._zeroed_version = None
        has_values = not (self._is_clean or self._is_untouched(gradient))
        if pending != self.pending_divisor and has_values:
            with torch.no_grad():
                # Now one division at the end is right for the gradients of all steps.
                gradient.mul_(self.pending_divisor / pending)
        return False

    def use_view(self) -> None:
        """Makes the zeroed slot the gradient, so that others add to it."""
        view = self.view
        if view is not None:
            self._accessor.write(self.live, view)
            self._zeroed_version = self._writes(view)

    def adopt(self) -> None:
        """Moves the first gradient of a step into its slot; autograd adds the next ones to it.

        Sync: on the current stream, on which autograd has made the gradient.
        """
        # A gradient that was there before the step stays where it is, until it is final.
        if not self._is_attribute or not self._can_share or self._began_with_gradient:
            return
        if self._is_dtensor and is_misplaced(self.live):
            redistribute_gradient(self.live)  # as autograd does before it adds to a gradient
        gradient = self.gradient
        # With create_graph=True autograd makes a new tensor for each sum.
        if gradient is not None and gradient is not self.view and not gradient.requires_grad:
            assert self.buffer is not None
            self._accessor.write(self.live, self.buffer.adopt(self.record.key, gradient))

    def keep_apart(self, taken: set[int]) -> None:
        """Copies a new gradient if its memory is taken; adds its memory to `taken`, by address."""
        gradient = self.gradient
        # A gradient that was there before the step is where the user wants it.
        if gradient is None or gradient.layout != torch.strided or self._began_with_gradient:
            return
        if gradient.untyped_storage().data_ptr() in taken:
            gradient = gradient.clone()
            self._accessor.write(self.live, gradient)
        taken.add(gradient.untyped_storage().data_ptr())

    def claim(self) -> torch.Tensor | None:
        """Returns memory for a caller that writes the first gradient; None if it may not.

        The caller overwrites it, and makes it the gradient. It is the slot; for a gradient that
        nobody reduces, new memory.

        Sync: afterwards the current stream may write to it.
        """
        is_free = self.live.grad is None and not self._began_with_gradient and not self.final
        if not (self._is_attribute and is_free) or self._is_dtensor:
            return None
        if self.buffer is not None:
            return self.buffer.claim(self.record.key) if self._can_share else None
        return torch.empty_like(self.live, dtype=self._accessor.dtype(self.live))

    def close(self) -> torch.Tensor | None:
        """Marks the gradient as final and returns it; None if there is none.

        If it is reduced, it must still be divided by `pending_divisor`.

        Raises:
            StepError: If autograd has added to a gradient of a bucket, and it was set to None.
        """
        if self.live.grad is not None and not self._is_attribute:
            self._accessor.accumulated(self.live)  # torch's split backwards fire no hooks
            self._fired = True
        if self._is_dtensor and is_misplaced(self.live):
            redistribute_gradient(self.live)
        self.final = True
        self._hook.resume()  # an accumulation from now on is an error, if it is reduced
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
        return gradient

    def leave(self) -> None:
        """Drops a gradient that is in its bucket now, and may be on its way."""
        if self.placed.is_sharded or (self.buffer is not None and self.buffer.goes):
            self._accessor.write(self.live, None)  # its memory goes; `finish` sets the result
        elif self.contributed and (view := self.view) is not None and self.gradient is not view:
            self._accessor.write(self.live, view)

    def _is_untouched(self, gradient: torch.Tensor) -> bool:
        """Whether no write into the zeroed slot is known.

        A kernel that writes to an address does not change the version. If autograd ran it, the hook
        has fired. Otherwise `BucketBuffer.fill` looks at the values of the slot.
        """
        if self._fired or gradient is not self.view:
            return False
        return self._zeroed_version is not None and self._writes(gradient) == self._zeroed_version

    @property
    def _accumulated(self) -> torch.Tensor | None:
        """The gradient so far, or a misplaced DTensor. Compare its identity, not values."""
        is_whole = self._is_dtensor and is_misplaced(self.live)
        return self.live.grad if is_whole else self.gradient

    def finish(self) -> bool:
        """Puts the result in place; returns whether it was copied out of the bucket."""
        copied = False
        if self.buffer is None:
            self._divide()
        else:
            # As in one process, a result that was zeroed, and not set to None, stays zeros if no
            # rank contributed: zeros have travelled.
            has_any = self._has_result and (
                self._is_clean or self.buffer.anybody_contributed(self.record.key)
            )
            if self.placed.is_sharded:
                self._set_main_gradient(self.buffer if has_any else None)
            elif not has_any:
                self._accessor.write(self.live, None)
            else:
                copied = self._take_result(self.buffer.result(self.record.key))
        main_shard = self.placed.main_shard
        if main_shard is not None and not self.placed.is_sharded:
            # A reduced result replaces the zeroed result of the last step, and may be in the same
            # memory.
            adds = self._adds and (self.buffer is None or self.gradient is None)
            main_shard.take(self.gradient, adds=adds)
            self._set_accessor_result(main_shard.tensor.grad)
        self.mark_reduced()
        if self._num_firings > 1:  # e.g. reentrant checkpointing: each firing adds only a part
            self._fires_once = False
        elif self._fires_once is None and self._num_firings == 1:
            self._fires_once = True
        return copied

    def _take_result(self, result: torch.Tensor) -> bool:
        """Makes a whole result the gradient; returns whether it was copied."""
        if not self._can_share:
            self._copy_back(result)
        elif self.gradient is not result:
            self._accessor.write(self.live, result)
        return not self._can_share

    def _divide(self) -> None:
        """Divides a gradient that nobody reduces."""
        if self.pending_divisor != 1 and (gradient := self.gradient) is not None:
            with torch.no_grad():
                gradient.div_(self.pending_divisor)

    def _set_main_gradient(self, buffer: BucketBuffer | None) -> None:
        """Sets the gradient of this rank's main shard, if there is one, to its part of a slot."""
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

    def _set_accessor_result(self, result: torch.Tensor | None) -> None:
        """Writes the result to the accessor too, for users who read it there.

        ``.grad`` is set to None instead: another optimizer might step the parameter with it.
        """
        if self._is_attribute:
            self._accessor.write(self.live, None)
            return
        if self._adds and result is not None:
            dtype = self._accessor.dtype(self.live)
            self._accessor.write(self.live, result.detach().to(dtype))
        gradient = self.gradient
        self._accessor_result = None if gradient is None else TensorWeakRef(gradient)

    def _drop_accessor_result(self) -> None:
        """Removes the last result from the accessor; the main shard has it, or was zeroed."""
        last, self._accessor_result = self._accessor_result, None
        if last is not None and (gradient := self.gradient) is not None and gradient is last():
            self._accessor.write(self.live, None)

    def _drop_zeros(self) -> None:
        """Removes a zeroed result in memory that is made again in each step."""
        main_shard = self.placed.main_shard
        if self.placed.is_sharded and main_shard is not None:
            main_shard.take(None)
        elif main_shard is None and self.buffer is not None and self.buffer.goes:
            self._accessor.write(self.live, None)

    @property
    def _has_last_result(self) -> bool:
        """Whether the last result is still the gradient. It may have been zeroed in place."""
        if self._last_result is None:
            return False
        result = self._result
        return result is not None and result is self._last_result[0]()

    @property
    def _result(self) -> torch.Tensor | None:
        main_shard = self.placed.main_shard
        return self._accumulated if main_shard is None else main_shard.tensor.grad

    @property
    def _is_zero(self) -> bool:
        """Whether the last result was zeroed in place. Reads its values only after a write."""
        result = self._result
        assert result is not None
        assert self._last_result is not None
        if self._writes(result) == self._last_result[1]:
            return False
        is_zero = self.buffer is not None and result is self.view and self.buffer.is_zero()
        return is_zero or not bool(result.any())

    def drop(self) -> None:
        """Sets the gradient to None, after a failed step: it may not be complete."""
        self._last_result = None
        if self.record.requires_grad:
            self._accessor.write(self.live, None)
            self.live.grad = None  # the accessor may not have moved it yet
        if self.placed.main_shard is not None:
            self.placed.main_shard.take(None)

    def mark_reduced(self) -> None:
        """Stores the result and its version, so that `refresh` can see whether it has changed."""
        gradient = self.main_gradient
        # A weak reference: a gradient that the user drops must be freed before the next step.
        self._last_result = (
            None if gradient is None else (TensorWeakRef(gradient), self._writes(gradient))
        )

    def _writes(self, gradient: torch.Tensor) -> int:
        """Returns the number of writes to a gradient, also of writes to a DTensor that holds it."""
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
