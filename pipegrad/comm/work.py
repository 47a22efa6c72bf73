"""Work: communication that was started, and that somebody waits for."""

from __future__ import annotations

from typing import Protocol


class Work(Protocol):
    """What a launch returns. ``torch.distributed.Work`` is one.

    It may have two attributes, False if missing. ``blocks_host``: waiting blocks the host even on
    devices, so there it is waited for when `finish` is called. ``ends_late``: it is so everywhere,
    since nothing should wait behind it. One that wraps another hands them on.
    """

    def wait(self) -> object:
        """Blocks the calling thread (CPU), or makes its current stream wait (devices)."""


class Done:
    """Work that is over."""

    def wait(self) -> None:
        """Returns at once."""
