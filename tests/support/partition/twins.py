"""A transformers model over all ranks of a pipeline and the same one in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

import pipegrad
from tests.support.pipeline.schedulers import topology


def difference(found: Tensor | None, true: Tensor | None) -> float:
    """Returns the largest difference of two tensors, either of which may be missing for zeros."""
    values = [value.detach().double() for value in (found, true) if value is not None]
    if len(values) < 2:
        return max((value.abs().max().item() for value in values), default=0.0)
    return (values[0] - values[1]).abs().max().item()


class Twins:
    """A cut model and an uncut one, with the same values.

    Args:
        build: Makes the model; the same bits each time.
        num_ranks: Of the pipeline.
        schedule: Of one stage a rank.
        cut: Options of the cut.
        prepare: Does something to the cut before there is a Scheduler.
        **options: Of the Scheduler.

    Attributes:
        true: The uncut model.
        cut: The cut one.
        scheduler: Runs it.
        held: The parameters of this rank by name.
        errors: Of losses and gradients, relative to the largest ones, in order.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        num_ranks: int = 2,
        *,
        schedule: str = "1f1b",
        cut: Mapping[str, Any] | None = None,
        prepare: Callable[[Any], object] = id,
        **options: Any,
    ) -> None:
        self.true: Any = build()
        self.cut = pipegrad.cut(build(), num_ranks, **cut or {})
        prepare(self.cut)
        options = {"num_microbatches": 4} | options
        at = topology(num_ranks)
        self.scheduler = pipegrad.Scheduler(self.cut, at, schedule=schedule, **options)
        self.held = {
            name: parameter
            for stage in self.scheduler.topology.local_stages
            for name, parameter in self.cut.modules[stage].named_parameters(remove_duplicate=False)
        }
        self.errors = list[float]()

    @property
    def own(self) -> list[Any]:
        """The stages of this rank."""
        return [self.cut.modules[stage] for stage in self.scheduler.topology.local_stages]

    def step(
        self,
        batch: Mapping[str, Any],
        *positions: object,
        true: Tensor | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """Takes a step on both sides, compares them, and forgets gradients.

        Args:
            batch: What the uncut model is given.
            *positions: What the pipeline is given by position.
            true: The loss of the uncut model, if that is not its own one of `batch`.
            given: What the pipeline is given by name; `batch` if there are no `positions`.
        """
        given = {} if positions and given is None else batch if given is None else given
        loss = self.scheduler.step(*positions, **given).loss
        expected = self.true(**batch).loss if true is None else true
        expected.backward()
        self.errors.append(difference(loss, expected) / abs(expected.item()))
        self.compare()

    def compare(self) -> None:
        """Compares all gradients with those of the uncut model, and forgets them."""
        named = dict(self.true.named_parameters(remove_duplicate=False))
        gradients = [p.grad for p in named.values() if p.grad is not None]
        largest = max(gradient.abs().max().item() for gradient in gradients)
        found = [difference(p.grad, named[name].grad) for name, p in self.held.items()]
        self.errors.append(max(found, default=math.nan) / largest)
        for parameter in (*self.held.values(), *named.values()):
            parameter.grad = None

    def close(self) -> list[float]:
        """Returns the errors."""
        self.scheduler.close()
        return self.errors
