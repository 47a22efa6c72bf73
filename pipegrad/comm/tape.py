"""Tape: where the parts of a rank note what they do, while somebody records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

# What a part notes. The words are those of a timeline.
Noted = Literal["wait for reduction", "wait for ranks", "reduction", "parameter sync"]
Key = tuple[int, int] | str  # a bucket and a step of its route, or what is waited for


class Recorder(Protocol):
    """Who records. `pipegrad.observe` has one."""

    def now(self) -> object:
        """Returns a point in time, on the current stream if there are streams."""

    def note(self, kind: Noted, key: Key, began: object) -> None:
        """Takes what has ended now; any thread may call it."""

    def begin_step(self, number: int, program: object) -> None:
        """Takes the begin of a training step, and the Program that it runs."""

    def items(self) -> tuple[Sequence[bool], Callable[[object], object]]:
        """Returns what the step's items need.

        Returns:
            For each item whether the time of its end is kept; and a function that keeps a time.
            It is first given the time of the begin.
        """


class Tape:
    """Takes notes for a recorder; without one, nothing is kept.

    Attributes:
        recorder: Who records now.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def now(self) -> object:
        """Returns a point in time for `note`; None if nobody records."""
        recorder = self.recorder  # another thread may end the recording
        return None if recorder is None else recorder.now()

    def note(self, kind: Noted, key: Key, began: object) -> None:
        """Notes what began at a result of `now` and has ended; nothing if that is None."""
        if began is not None and (recorder := self.recorder) is not None:
            recorder.note(kind, key, began)
