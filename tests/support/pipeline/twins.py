"""A model over two ranks and the same in one process, and how far they are apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipegrad import Scheduler, find_tied
from pipegrad.schedules import Schedule
from tests.support.pipeline.models import build
from tests.support.pipeline.pipelines import loss_of
from tests.support.pipeline.schedulers import batch, compare, cut, error, named, topology


def tied() -> nn.Sequential:
    return build("tied")


class Twins:
    """A model of eight layers over two ranks, a stage on each, and the same in one process.

    Attributes:
        true: The one in one process.
        errors: How far they are apart, by step and name.
    """

    def __init__(
        self,
        make: Callable[[], nn.Sequential] = tied,
        num_microbatches: int = 4,
        *,
        schedule: str | Schedule = "1f1b",
        loss_fn: Callable[[Tensor, Tensor], Tensor] = loss_of,
    ) -> None:
        model, self.true = make(), make()
        at = topology(2)
        self.stages = cut(model, (0, 1), at)
        self.scheduler = Scheduler(
            self.stages,
            at,
            schedule=schedule,
            num_microbatches=num_microbatches if isinstance(schedule, str) else None,
            loss_fn=loss_fn,
            tied=find_tied(model),
        )
        self.errors = dict[str, float]()

    def step(self, seed: int, *, num_parts: int = 1) -> Tensor:
        """Takes a step on both sides, in one process with a batch in parts; returns the loss."""
        tokens, target = batch(seed, 8)
        loss = self.scheduler.step(tokens, target=target).loss
        self.errors[f"loss {len(self.errors)}"] = error(loss, self.alone(tokens, target, num_parts))
        return loss

    def alone(self, tokens: Tensor, target: Tensor, num_parts: int = 1) -> Tensor:
        """Runs one process; returns the loss."""
        total = torch.zeros(())
        for x, y in zip(tokens.chunk(num_parts), target.chunk(num_parts), strict=True):
            loss = loss_of(self.true(x), y) / num_parts
            loss.backward()
            total += loss.detach()
        return total

    def compare(self, step: int) -> None:
        """Adds the errors of all gradients, and forgets the gradients."""
        compare(self.errors, step, named(self.stages), self.true)

    def close(self) -> dict[str, float]:
        """Returns the errors."""
        self.scheduler.close()
        return self.errors
