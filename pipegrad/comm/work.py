"""Work: what a handler's launch returns, and what pipegrad waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Work(Protocol):
    """A running collective, such as `torch.distributed.Work`."""

    def wait(self) -> object:
        """Waits for the result: blocks the thread (CPU), or makes the current stream wait."""


class Done:
    """Work that has ended."""

    def wait(self) -> None:
        """Returns at once."""


@dataclass(frozen=True)
class LateWork:
    """Work whose wait is at the end of the step, not right after its launch.

    Return it if the next collectives of the comm stream do not need the result. They are launched
    before the wait.

    Attributes:
        wait: Waits for the result. It may block the host, and compute.
        in_threads: Whether to wait late on a comm stream with a thread, too. False if the only
            reason to wait late is that `wait` blocks the host: a thread may block.
    """

    wait: Callable[[], object]
    in_threads: bool = True
