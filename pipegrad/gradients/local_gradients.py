"""Gradients that no other rank has: they stay where autograd adds to them, and are divided."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.weak import TensorWeakRef

from pipegrad.gradients.main_params import MainParameter
from pipegrad.gradients.norm import divide_, values_of
from pipegrad.gradients.parameter import Param
from pipegrad.gradients.stored_gradients import BucketState, StoredGradients, weak
from pipegrad.model.dtensor import is_dtensor, local, redistribute_gradient
from pipegrad.model.main_grad import MainGrad, gradients_of


class LocalGradients(StoredGradients):
    """The gradients of this rank that nobody reduces.

    Args:
        parameters: That are trained.
        main_grad: Where their gradients live; None for ``.grad``.
        divisors: Each gradient is divided by this, besides the divisor of each step.
    """

    def __init__(
        self,
        parameters: Sequence[Param],
        main_grad: MainGrad | None,
        divisors: Sequence[float],
    ) -> None:
        super().__init__(parameters, main_grad)
        self._fixed_divisors = divisors
        self._divisor = 1.0
        # Whether a result is treated otherwise than what the user sets.
        self._notes_results = any(self._main_shards) or not {*divisors} <= {1.0}
        # Gradients that were there when the step began: they are where the user wants them.
        self._own: set[int] = set()
        self._adds: set[int] = set()  # the last result was not zeroed, and this step adds to it

    def check(self, *, continuing: bool) -> None:
        """Looks what is there of earlier steps; see `GradientBucket.check`."""
        self._present = gradients_of(self._live, self._main_grad)
        if not continuing:
            numbers = range(len(self._results))
            self._adds = {i for i in numbers if self._last_result(i) is not None}

    def begin(self, divisor: float, *, continuing: bool) -> None:
        """Starts a step, or continues it; see `GradientBucket.begin`.

        Sync: on the current stream. It may scale gradients of earlier steps.
        """
        own = self._set_by_user()
        self._own = {number for number, _ in own}
        for number in self._shown.keys() - self._own:
            self._set(number, None)
        for number, gradient in own:
            fixed = self._fixed_divisors[number]
            # A result was divided. One that the user has set is not divided by the step's divisor.
            before = fixed * self._divisor if continuing else 1.0 if number in self._adds else fixed
            if before != divisor * fixed:
                with torch.no_grad():
                    gradient.mul_(divisor * fixed / before)
        self._present, self._results, self._shown = [], (), {}
        self._divisor, self.state = divisor, BucketState.OPEN
        self._start_taking()

    def late(self) -> None:
        """Moves what was computed without hooks. Until the step ends, nothing here is too late."""
        self._take_rest()
        for tensor in self._live if self._has_dtensors else ():
            redistribute_gradient(tensor)

    def finish(self, divisor: torch.Tensor | None) -> None:
        """Divides the gradients, and gives them to what the optimizer updates.

        Args:
            divisor: That of the whole step, if it is known only at its end.

        Sync: on the current stream.
        """
        self.state = BucketState.RESTS
        gradients = gradients_of(self._live, self._main_grad)
        by = {fixed: self._divisor * fixed for fixed in {*self._fixed_divisors}}
        if divisor is not None or any(factor != 1 for factor in by.values()):
            self._part(gradients)
            parts = [None if g is None else local(g) for g in gradients]
            if divisor is not None:
                divide_([part for part in parts if part is not None], divisor)
            for fixed, factor in by.items():
                of_all = zip(parts, self._fixed_divisors, strict=True)
                some = [part for part, own in of_all if part is not None and own == fixed]
                if some and factor != 1:
                    torch._foreach_div_(values_of(some), factor)
        for number, main_shard in enumerate(self._main_shards):
            if main_shard is not None:
                self._give(number, main_shard, gradients[number])
        if self._notes_results:
            self._results = weak([p.result for p in self.parameters])

    def _give(self, number: int, main_shard: MainParameter, gradient: torch.Tensor | None) -> None:
        """Gives a result to the main parameter, and leaves it in ``main_grad`` for users."""
        adds = number in self._adds
        main_shard.set_grad(gradient, adds=adds)
        if self._main_grad is None:
            self._set(number, None)
            return
        if adds and main_shard.tensor.grad is not None:
            gradient = main_shard.tensor.grad.detach().to(self._main_grad.dtype)
            self._set(number, gradient)
        if gradient is not None:
            self._shown[number] = TensorWeakRef(gradient)

    def _part(self, gradients: list[torch.Tensor | None]) -> None:
        """Copies gradients that share memory, before each is divided."""
        # Autograd may give two parameters, such as the terms of a sum, views of one gradient.
        taken = set[int]()
        for number, gradient in enumerate(gradients):
            if gradient is None or gradient.layout != torch.strided or is_dtensor(gradient):
                continue
            address = gradient.untyped_storage().data_ptr()
            if address in taken and number not in self._own:
                copied = gradients[number] = gradient.clone()
                self._set(number, copied)
            taken.add(address)
