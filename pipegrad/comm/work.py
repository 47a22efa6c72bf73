"""Work: what a handler's launch returns, and what is waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Work(Protocol):
    """A collective that runs; `torch.distributed.Work` is one."""

    def wait(self) -> object:
        """Waits for the result: blocks the thread (CPU), or makes the current stream wait."""


class Done:
    """Work that is over."""

    def wait(self) -> None:
        """Returns at once."""


@dataclass(frozen=True)
class LateWork:
    """Work that is waited for at the end of the step, not right behind its launch.

    Give this to a comm stream whose next collectives do not need the result: they leave first.

    Attributes:
        wait: Waits for the result. It may block the host, and compute.
        in_threads: Whether to wait late in a comm stream that is a thread too. False where the only
            reason is that `wait` blocks the host: a thread may block.
    """

    wait: Callable[[], object]
    in_threads: bool = True
