"""Several optimizers as one: Muon for matrices, say, and AdamW for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipegrad.errors import PlanError


class JoinedOptimizer(torch.optim.Optimizer):
    """Steps several optimizers, one after the other.

    Its groups and its state are those of all of them. So learning-rate schedules, checkpoints and
    ``zero_grad`` see one optimizer.

    Args:
        parts: The optimizers. No two of them have the same parameter.

    Attributes:
        parts: The same.
        defaults: Options that all parts have, as in the first one. Learning-rate schedules look
            there for a momentum, for example.
        elementwise: It steps shards if its parts do. Each part is checked before its own step.
    """

    elementwise = True

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts: tuple[torch.optim.Optimizer, ...] = ()
        super().__init__([group for part in parts for group in part.param_groups], {})
        # Not before: torch would add the defaults of one part to the groups of another.
        shared = set.intersection(*(set(part.defaults) for part in parts))
        self.defaults = {n: x for n, x in parts[0].defaults.items() if n in shared}
        self.parts = tuple(parts)
        for part in parts:
            self.state.update(part.state)
        self._share()

    def _share(self) -> None:
        """Makes the parts use the state and the groups of this optimizer."""
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            part.state, part.param_groups = self.state, self.param_groups[first:last]
            first = last

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps all parts; returns the loss of `closure`, if it is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses groups from outside: it would not be known which part steps them.

        Raises:
            PlanError: Once it is made.
        """
        if self.parts:
            raise PlanError(
                f"add_param_group() of {' and '.join(type(part).__name__ for part in self.parts)} "
                f"as one optimizer: make another optimizer of these parameters"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # `load_state_dict` comes here with a new state and new groups. Each part makes of them what
        # it needs, as if it had loaded them.
        super().__setstate__(state)
        self._share()
        for part in self.parts:
            part.__setstate__({"state": part.state, "param_groups": part.param_groups})


def parts_in(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Returns the optimizers of which one is made; itself, if it is not made of several."""
    return optimizer.parts if isinstance(optimizer, JoinedOptimizer) else (optimizer,)
