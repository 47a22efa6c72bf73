"""What the tests of Bucketer share: a bucketer that writes down what it calls back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from pipegrad import Bucketer
from pipegrad.comm import collectives
from tests.support.gradients.cases import rank

Collective = tuple[str, int, str, tuple[int, ...]]  # kind, elements a rank gets, dtype, ranks


@contextlib.contextmanager
def spied() -> Iterator[list[Collective]]:
    """Writes down every collective, in the order in which this rank issues them."""
    log: list[Collective] = []
    scatter, reduce = collectives.reduce_scatter, dist.all_reduce

    def note(kind: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        log.append((kind, tensor.numel(), str(tensor.dtype), ranks))

    def reduce_scatter(output: Any, rows: Any, group: Any) -> None:
        note("reduce_scatter", output, group)
        scatter(output, rows, group)

    def all_reduce(tensor: Any, *, group: Any) -> None:
        note("all_reduce", tensor, group)
        reduce(tensor, group=group)

    with (
        mock.patch.object(collectives, "reduce_scatter", reduce_scatter),
        mock.patch.object(dist, "all_reduce", all_reduce),
    ):
        yield log


def inputs(numel: int, value: float = 1.0) -> list[torch.Tensor]:
    """One tensor for each rank r, which sums to ``num_ranks * (value + 100 r)``."""
    return [torch.full((numel,), value + 100.0 * r) for r in range(dist.get_world_size())]


class Calls:
    """A bucketer whose callbacks write down the value they got, less what is due to the rank."""

    def __init__(self, capacity_floats: int) -> None:
        """Capacity in elements of a row of fp32."""
        self.num_ranks = dist.get_world_size()
        self.bucketer = Bucketer(capacity_bytes=self.num_ranks * 4 * capacity_floats)
        self.got: list[Any] = []

    def add(self, numel: int, value: float) -> int:
        """Returns how many callbacks have run when the call returns."""
        self.bucketer.reduce_scatter(inputs(numel, value), callback=self.note)
        return len(self.got)

    def note(self, view: torch.Tensor) -> None:
        values = [x / self.num_ranks - 100 * rank() for x in view.unique().tolist()]
        self.got.append((view.numel(), *values))

    def flush(self) -> list[Any]:
        """Returns what callbacks got since the last time: ``(numel, value)``."""
        self.bucketer.flush()
        got, self.got = self.got, []
        return got
