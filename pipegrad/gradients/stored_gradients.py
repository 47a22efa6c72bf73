"""Gradients of some parameters, in `.grad` or `main_grad`: how they are read, set and dropped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from pipegrad.errors import StepError
from pipegrad.gradients.parameter import Param
from pipegrad.interop.private import accumulate_hooks
from pipegrad.model.dtensor import is_dtensor, local
from pipegrad.model.main_grad import MainGrad, set_gradients, take_gradient

Results = Sequence[torch.Tensor | TensorWeakRef | None]


class BucketState(Enum):
    """The states of a bucket. Gradients that nobody reduces are never FINAL."""

    RESTS = "between two steps, or its gradients were dropped"
    OPEN = "gradients accumulate"
    FINAL = "all gradients are in their slots, and it may be on its way"


class Hook:
    """A hook of ours on one parameter. It rests until `run`, without any cost.

    torch has the hooks of a parameter in a dictionary, and calls what is in it, in its order.
    """

    # The garbage collector does not see that a parameter holds its hooks. So what is called may
    # hold neither the parameter nor its bucket.

    def __init__(self, parameter: nn.Parameter) -> None:
        handle = parameter.register_post_accumulate_grad_hook(_nothing)
        self.hooks = accumulate_hooks(parameter)  # the handle refers to them weakly
        self.number: int = handle.id
        self.rest()

    def run(self, call: Callable[[nn.Parameter], None]) -> None:
        """Makes autograd call this behind all hooks that the parameter has now."""
        self.hooks.pop(self.number, None)
        self.hooks[self.number] = call

    def rest(self) -> None:
        """Calls nothing until `run`."""
        self.hooks.pop(self.number, None)

    def __del__(self) -> None:
        if hasattr(self, "number"):  # it is missing if torch has refused the hook
            self.rest()


def _nothing(_: nn.Parameter) -> None:
    """Is never called."""


class StoredGradients:
    """Gradients of some parameters of this rank, from step to step.

    Args:
        parameters: By number.
        main_grad: Where gradients live; None for ``.grad``.
    """

    def __init__(self, parameters: Sequence[Param], main_grad: MainGrad | None) -> None:
        self.parameters = parameters
        self.state = BucketState.RESTS
        self._main_grad = main_grad
        self._main_shards = [p.apart for p in parameters]
        self._present: list[torch.Tensor | None] = []  # read last
        self._results: Results = ()  # of the last step
        self._shown: dict[int, TensorWeakRef] = {}  # results that are in `main_grad`, too
        self._touched: set[int] = set()  # whose hook has run, with `main_grad`
        self.follow()

    def follow(self) -> None:
        """Takes the present tensors of the parameters. Hooks of the tensors before are removed."""
        self._live = [p.tensor for p in self.parameters]
        self._has_dtensors = any(map(is_dtensor, self._live))
        self.unfollow()

    def unfollow(self) -> None:
        """Removes all hooks."""
        # They are made when they first run: from then on autograd looks for hooks of the parameter
        # in each backward.
        self._hooks: list[Hook] = []
        self._taking: list[Hook] = []  # with `main_grad`

    def _run(self, hooks: list[Hook], calls: Sequence[Callable[[nn.Parameter], None]]) -> None:
        """Makes autograd call these, behind all hooks that the parameters have now."""
        if not hooks:
            hooks += map(Hook, self._live)
        for hook, call in zip(hooks, calls, strict=True):
            hook.run(call)

    def _rest(self) -> None:
        for hook in self._hooks:
            hook.rest()

    def refuse_values(self) -> None:
        """Refuses gradients that this step would add to, and then divide once more.

        Raises:
            StepError: If there is a gradient that is not zero.

        Sync: blocks the host if a gradient was zeroed, and not set to None.
        """
        for number, gradient in self._set_by_user():
            if gradient.is_sparse or bool(local(gradient).any()):
                raise StepError(
                    f"the parameter {self._key(number)!r} has a gradient already, and the divisor "
                    f"of this step is known only at its end, so it would be divided too: call "
                    f"optimizer.zero_grad() before the step; or accumulate with "
                    f"'with sync.accumulate():' around all steps but the last"
                )

    def _set_by_user(self) -> list[tuple[int, torch.Tensor]]:
        """Returns the gradients that are not what the last step has left in ``main_grad``."""
        return [
            (number, gradient)
            for number, gradient in enumerate(self._present)
            if gradient is not None
            if number not in self._shown or gradient is not self._shown[number]()
        ]

    def _last_result(self, number: int) -> torch.Tensor | None:
        """Returns the gradient that an optimizer gets, if it is that of the last step still."""
        last, result = self._results[number], self.parameters[number].result
        return result if result is (last() if isinstance(last, TensorWeakRef) else last) else None

    def _start_taking(self) -> None:
        """Moves gradients to ``main_grad`` from now on, behind the hooks of users."""
        self._touched.clear()
        if self._main_grad is not None:
            me = weakref.ref(self)
            self._run(self._taking, [partial(_take, me, i) for i in range(len(self._live))])

    def _take_rest(self) -> None:
        """Moves gradients to ``main_grad`` that came without hooks: of torch's split backwards."""
        for number, tensor in enumerate(self._live) if self._main_grad is not None else ():
            if tensor.grad is not None:
                self.take(number)

    def take(self, number: int) -> None:
        """Adds a gradient to ``main_grad``, perhaps in a thread of autograd."""
        if self.state is BucketState.OPEN:
            self._touched.add(number)
            assert self._main_grad is not None
            take_gradient(self._live[number], self._main_grad.dtype)

    def drop(self) -> None:
        """Sets all gradients to None, after a failed step: they may not be complete."""
        self.state, self._results, self._shown = BucketState.RESTS, (), {}
        self._rest()
        for number, main_shard in enumerate(self._main_shards):
            self._set(number, None)
            self._live[number].grad = None  # `main_grad` may not have it yet
            if main_shard is not None:
                main_shard.set_grad(None)

    def _key(self, number: int) -> str:
        return self.parameters[number].record.key

    def _set(self, number: int, gradient: torch.Tensor | None) -> None:
        set_gradients([self._live[number]], [gradient], self._main_grad)


def _take(called: weakref.ref[StoredGradients], number: int, _: nn.Parameter) -> None:
    if (gradients := called()) is not None:
        gradients.take(number)


def weak(gradients: Sequence[torch.Tensor | None]) -> Results:
    """Returns references: a gradient that the user drops must be freed before the next step."""
    return [None if gradient is None else TensorWeakRef(gradient) for gradient in gradients]
