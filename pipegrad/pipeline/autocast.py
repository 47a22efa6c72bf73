"""Autocast: a step that is called under it runs its forwards and losses there, and nothing else.

In one process autocast belongs to the forward, and a backward runs in the dtypes of its forward. A
step has both, and the sums and codecs of gradients beside them, so it leaves the caller's autocast
and enters it again for each forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class Autocast:
    """The caller's autocast, during a step.

    Args:
        device: Of the stages.
    """

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self._dtype: torch.dtype | None = None  # None: the caller has none
        self._caches = True

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Leaves the caller's autocast until the end of a step."""
        self._dtype = None
        if not torch.is_autocast_enabled(self._kind):
            yield
            return
        self._dtype = torch.get_autocast_dtype(self._kind)
        self._caches = torch.is_autocast_cache_enabled()
        # Autocast may enclose the caller's whole loop. Then it still has casts of the parameters
        # before the optimizer's step, or casts without a graph, of an evaluation.
        torch.clear_autocast_cache()
        with torch.autocast(self._kind, enabled=False):
            yield

    def forward(self) -> AbstractContextManager[object]:
        """Enters it again, for a forward or a loss."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._kind, self._dtype, cache_enabled=self._caches)
