"""Clip calls: with which parameters and norm does a script call torch's clipping?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from pipegrad.interop.private import CLIPS_WITH_NORM


@contextlib.contextmanager
def listening_to_clipping(
    clipped: Callable[[list[Tensor], float, Tensor | None], object],
) -> Iterator[None]:
    """Calls ``clipped(parameters, max_norm, total_norm)`` before torch clips gradients.

    The norm is None if torch clips by value, or by another norm than the Euclidean one. Code that
    has imported ``clip_grad_value_`` or ``clip_grads_with_norm_`` by name is not heard.
    """
    by_norm, by_value = clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_
    inner = nn.utils.clip_grads_with_norm_
    is_euclidean = [True]

    def listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
        return [parameters] if isinstance(parameters, Tensor) else list(parameters)

    def heard(
        parameters: Any,  # noqa: ANN401 - torch's signature
        max_norm: float,
        total_norm: Tensor,
        *more: Any,  # noqa: ANN401
        **options: Any,  # noqa: ANN401
    ) -> None:
        every = listed(parameters)
        clipped(every, max_norm, total_norm if is_euclidean[-1] else None)
        inner(every, max_norm, total_norm, *more, **options)

    def heard_by_norm(
        parameters: Any,  # noqa: ANN401
        max_norm: float,
        norm_type: float = 2.0,
        *more: Any,  # noqa: ANN401
        **options: Any,  # noqa: ANN401
    ) -> Tensor:
        is_euclidean.append(float(norm_type) == 2.0)
        try:
            return by_norm(listed(parameters), max_norm, norm_type, *more, **options)
        finally:
            is_euclidean.pop()

    def heard_by_value(parameters: Any, clip_value: float, *more: Any, **options: Any) -> None:  # noqa: ANN401
        every = listed(parameters)
        clipped(every, clip_value, None)
        by_value(every, clip_value, *more, **options)

    with contextlib.ExitStack() as stack:
        for name, function in (
            ("clip_grad_norm_", heard_by_norm),
            ("clip_grad_value_", heard_by_value),
        ):
            stack.enter_context(mock.patch.object(nn.utils, name, function))
            stack.enter_context(mock.patch.object(clip_grad, name, function))
        stack.enter_context(mock.patch.object(nn.utils, "clip_grads_with_norm_", heard))
        stack.enter_context(mock.patch.object(clip_grad, CLIPS_WITH_NORM, heard))
        yield
