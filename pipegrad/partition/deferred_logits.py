"""Deferred logits: a placeholder of a head's logits until the model's code needs their values.

A model of transformers may scale and cap its logits, casts and reshapes them, and passes them to
``cross_entropy``. On the last stage of a cut with ``loss="chunked"``, the head returns a tensor
that records these operations, and `chunked_cross_entropy` replaces them. For any other use, the
recorded operations run on all logits, because the result must be right in any model. Memory is
saved if the loss consists of these operations only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from types import EllipsisType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipegrad.errors import StepError
from pipegrad.interop.private import tree_map
from pipegrad.losses import REDUCTIONS, chunked_cross_entropy


@contextmanager
def deferred(head: nn.Module) -> Iterator[None]:
    """Lets a head, an ``nn.Linear``, return deferred logits inside of the context."""

    def forward(hidden: Tensor) -> Tensor:
        def make() -> Tensor:  # later: FSDP2 exchanges the weight
            return functional.linear(hidden, head.weight, head.bias)  # type: ignore[arg-type]

        return _logits(_Steps(hidden, head), make)

    with mock.patch.object(head, "forward", forward):
        yield


# Names of functions that write into their first argument.
_WRITES = re.compile(
    r"__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__|.*[^_]_"
)


class _Steps(NamedTuple):
    """A formula of logits without casts: ``cap * tanh(scale * head(hidden) / cap)``.

    Attributes:
        hidden: ``(..., width)``.
        head: The module with the weight.
        scale: Factor of the logits.
        cap: Limit of a soft cap; None if there is none.
    """

    hidden: Tensor
    head: Any
    scale: float = 1.0
    cap: float | None = None


class Logits(Tensor):
    """Deferred logits. They hold no values; functions of torch get the `steps` instead."""

    steps: _Steps
    make: Callable[[], Tensor]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Returns the result of a function, deferred if possible."""
        options = dict(kwargs or {})
        name, written = getattr(func, "__name__", ""), options.get("out", args[0] if args else None)
        writes = _WRITES.fullmatch(name) or "out" in options or options.get("inplace")
        if type(written) is Logits and writes:
            # The write would be lost, because the next function computes the logits anew.
            raise StepError(
                f"the model changes its logits in place, by {name}, and its loss is 'chunked', "
                f"which has none: cut it without loss='chunked'"
            )
        if args and type(args[0]) is Logits and func in (_NAMED if options else _STEPS):
            before = args[0]
            found = _STEPS[func](before.steps, *args[1:], **options)
            if isinstance(found, _Steps):
                return _logits(found, lambda: func(before.make(), *args[1:], **options))
            if found is not None:
                return found
        args, options = tree_map(lambda x: x.make() if type(x) is Logits else x, (args, options))
        return func(*args, **options)


def _logits(steps: _Steps, make: Callable[[], Tensor]) -> Logits:
    result = torch.empty(0).as_subclass(Logits)
    result.steps, result.make = steps, make
    return result


# These functions return other steps, a result, or None if all logits are needed.


def _same(steps: _Steps) -> _Steps:
    return steps


def _to(steps: _Steps, *args: object, **kwargs: object) -> _Steps | None:
    known = (torch.float32, torch.float64, steps.hidden.dtype, steps.hidden.device)
    return steps if not kwargs and all(value in known for value in args) else None


def _times(steps: _Steps, factor: object) -> _Steps | None:
    if not isinstance(factor, Real):
        return None
    cap = None if steps.cap is None else steps.cap * float(factor)
    return steps._replace(scale=steps.scale * float(factor), cap=cap)


def _over(steps: _Steps, divisor: object) -> _Steps | None:
    return _times(steps, 1.0 / float(divisor)) if isinstance(divisor, Real) and divisor else None


def _tanh(steps: _Steps) -> _Steps | None:
    return steps._replace(cap=1.0) if steps.cap is None else None


def _shape(steps: _Steps) -> torch.Size:
    return torch.Size([*steps.hidden.shape[:-1], len(steps.head.weight)])


def _size(steps: _Steps, dim: int | None = None) -> torch.Size | int:
    return _shape(steps) if dim is None else _shape(steps)[dim]


def _view(steps: _Steps, *shape: Any) -> _Steps | None:  # noqa: ANN401 - numbers, or a tuple
    shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if len(shape) < 2 or shape[-1] != len(steps.head.weight):
        return None
    return steps._replace(hidden=steps.hidden.reshape(*shape[:-1], steps.hidden.shape[-1]))


def _part(steps: _Steps, at: Any) -> _Steps | None:  # noqa: ANN401 - an index
    at = at if isinstance(at, tuple) else (at,)
    dims = steps.hidden.dim()
    is_plain = all(isinstance(x, slice | EllipsisType) for x in at)
    reaches_classes = len(at) == dims or any(isinstance(x, EllipsisType) for x in at)
    if not is_plain or len(at) > dims or (reaches_classes and at[-1] != slice(None)):
        return None
    return steps._replace(hidden=steps.hidden[at])


def _cross_entropy(
    steps: _Steps,
    target: Tensor,
    weight: Tensor | None = None,
    *old: None,
    reduction: str = "mean",
    **options: Any,  # noqa: ANN401 - of cross_entropy
) -> Tensor | None:
    is_known = steps.hidden.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
    others = [options.pop(name, None) for name in ("size_average", "reduce")]
    if not is_known or old or any(x is not None for x in others) or reduction not in REDUCTIONS:
        return None
    return chunked_cross_entropy(
        steps.hidden,
        target,
        steps.head.weight,
        bias=steps.head.bias,
        weight=weight,
        reduction=reduction,
        scale=steps.scale,
        softcap=steps.cap,
        **options,
    )


_NAMED = (functional.cross_entropy, Tensor.to)  # others by keyword need all logits
# Function of torch -> its counterpart on steps.
_STEPS: dict[object, Callable[..., object]] = {
    functional.cross_entropy: _cross_entropy,
    Tensor.float: _same,
    Tensor.contiguous: _same,
    Tensor.to: _to,
    **dict.fromkeys((Tensor.mul, torch.mul), _times),
    **dict.fromkeys((Tensor.div, torch.div, Tensor.true_divide), _over),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _tanh),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _view),
    Tensor.__getitem__: _part,
    Tensor.size: _size,
    Tensor.shape.__get__: _shape,  # type: ignore[attr-defined]
    Tensor.device.__get__: lambda steps: steps.hidden.device,
}
