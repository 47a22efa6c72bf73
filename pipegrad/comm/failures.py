"""Failed steps: the one protocol by which all ranks learn of a failure and go on after it.

[Note: failed steps]
1. A rank that fails in a step posts its error on a board of that step (`FailureNotice.fail`). Only
   the first post is stored. It is the cause; errors on other ranks follow from it.
2. The failed rank still launches all collectives, and makes all transfers, that are left of the
   step. It sends zeros. So no other rank waits for ever, on any backend.
3. Every rank reads the board at the end of the step (`FailureNotice.refuse_failed`), and during a
   long wait. It raises an error with the first message.
4. A rank begins its next step when everything that it launched has ended (`FailedSteps.settle`).
   This needs no message.
5. A rank may post that its failure is final: a collective failed, or was perhaps never launched.
   Then no rank can go on, and all ranks raise an error.

A GradientSync, a Scheduler and an attached schedule each have a board, since each counts its own
steps: an evaluation is a step of a Scheduler, but not of its GradientSync.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from pipegrad.comm.activity import Failed, failed_at
from pipegrad.comm.agreement import STORE_IS_GONE, store
from pipegrad.errors import (
    AgreementError,
    PipegradError,
    ReduceError,
    StepError,
    in_words,
    root_of,
)

FAILED_ELSEWHERE = "a step failed on another rank"
_FAILED_BEFORE = "failed before"
# What torch's backends say when another rank is gone, and what pipegrad says of others.
_CONNECTION = re.compile(r"gloo|NCCL|[Cc]onnection")
_OF_OTHERS = re.compile(
    rf"{_CONNECTION.pattern}|on another rank|another rank failed|key-value store|nothing heard"
)


class FailureNotice:
    """A board for the message of a rank that failed in a step.

    Each message belongs to one step. So a failure after which all ranks went on cannot fail a later
    step. See [Note: failed steps].
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.step = 0

    def next_step(self) -> None:
        """Goes to the next step. All ranks must call it equally often."""
        # The number is a part of the keys in the store. A rank that counts differently would read
        # the board of another step.
        self.step += 1

    def post(self, message: str, *, final: bool = False) -> str:
        """Posts `message` for this step, unless a message is posted; returns it with its rank.

        Args:
            message: What failed.
            final: Whether some collective will never end, so that no rank can go on.
        """
        if not dist.is_initialized():
            return message
        # A store takes no surrogates, as names of files may have.
        message = message.encode("utf-8", "backslashreplace").decode()
        # This board may be read by the rank that is the cause before it has posted here itself.
        _, _, cause = message.partition(f"{FAILED_ELSEWHERE}: ")
        message = cause if cause.startswith("rank ") else f"rank {dist.get_rank()}: {message}"
        # If the store is gone, no post is needed: the other ranks notice that themselves.
        with contextlib.suppress(dist.DistNetworkError):
            store().set_first(self._key, message)
            if final:
                store().set_first(self._final_key, message)
        return message

    def fail(self, error: BaseException, where: str = "", *, final: bool = False) -> str | None:
        """Posts the error of this rank; returns the result of `cause`.

        Args:
            error: What was raised. Its notes are posted too.
            where: What was running, if the notes do not contain it.
            final: As in `post`.
        """
        notes = [*getattr(error, "__notes__", ()), *([where] if where else ())]
        self.post(" ".join([f"{type(error).__name__}: {error}", *notes]), final=final)
        return self.cause()

    def cause(self) -> str | None:
        """Returns the first message of this step if another rank posted it, or None."""
        first = self.read()
        own = f"rank {dist.get_rank()}:" if dist.is_initialized() else ""
        return None if first is None or (own and first.startswith(own)) else first

    def refuse_failed(self, kind: type[PipegradError] = ReduceError) -> None:
        """Raises an error if a rank has posted that this step failed.

        Args:
            kind: The class of the error.
        """
        if (message := self.read()) is not None:
            raise kind(f"{FAILED_ELSEWHERE}: {message}")

    def refuse(self, message: str) -> None:
        """Posts that a verb of this step was refused on this rank. Its caller may try again."""
        if dist.is_initialized():
            store().set(self._refused_key, f"rank {dist.get_rank()}: {message}")

    def withdraw(self) -> None:
        """Removes the message of `refuse`."""
        if dist.is_initialized():
            store().set(self._refused_key, "")

    def read_refusal(self) -> str | None:
        """Returns the latest message of `refuse` in this step, from any rank, or None."""
        if not dist.is_initialized() or not store().check([self._refused_key]):
            return None
        return store().text(self._refused_key) or None

    def read(self) -> str | None:
        """Returns the first message that any rank posted in this step, or None.

        If the store cannot be reached, the message is that the store is gone.
        """
        if not dist.is_initialized():
            return None
        try:
            return store().text(self._key) if store().check([self._key]) else None
        except dist.DistNetworkError:
            return STORE_IS_GONE

    def read_final(self) -> str | None:
        """Returns the final failure of any step so far; None if ranks can go on."""
        if not dist.is_initialized() or not store().check([self._final_key]):
            return None
        return store().text(self._final_key)

    @property
    def _refused_key(self) -> str:
        return f"{self._key}/refused"

    @property
    def _final_key(self) -> str:
        return f"pipegrad/failed/{self._name}/final"

    @property
    def _key(self) -> str:
        return f"pipegrad/failed/{self._name}/{self.step}"


class FailedSteps:
    """The failed steps of this rank, and whether it can go on; see [Note: failed steps].

    A failed rank still launches the collectives that are left of its step. So each of them ends on
    all ranks, and the next step begins when they have ended on this rank. This needs no message.
    A rank cannot go on if a collective itself failed, or was never launched.

    Args:
        notice: The board for failures.
        drain: Waits until everything that was launched has ended. Raises if some of it never ends.
    """

    def __init__(self, notice: FailureNotice, drain: Callable[[], object]) -> None:
        self._notice = notice
        self._drain = drain
        self._final: BaseException | None = None
        self._doubt: BaseException | None = None  # of a step whose collectives may still run
        # All ranks must call `next_step` once a step, whether the step fails before it begins, in
        # it, or not at all. These two flags say who has called it for the present step.
        self._counted = False  # `begin` has
        self._refused = False  # `refusing` has, before `begin`; or a verb was refused in the step

    @property
    def step(self) -> int:
        """The number of the present step, with the failed ones; the same on all ranks."""
        return self._notice.step

    @property
    def are_final(self) -> bool:
        """Whether this rank cannot go on."""
        return self._final is not None

    @property
    def are_in_doubt(self) -> bool:
        """Whether a step has failed, and no step has begun on this rank since."""
        return self.are_final or self._doubt is not None

    def has_posted(self, error: BaseException) -> bool:
        """Whether `error` was posted, and no step has begun since."""
        return error is self._doubt

    def settle(self) -> None:
        """Waits until everything that a failed step launched on this rank has ended."""
        # The collectives of the failed step use the same communicators as those of the next step.
        # If one of them never ends, the communicators of two ranks are at different collectives,
        # and a later collective would take the data of another.
        doubt, self._doubt = self._doubt, None
        if doubt is not None and self._final is None:
            try:
                self._drain()
            except Exception:  # noqa: BLE001 - a collective failed, or never ends
                self._final = doubt

    def refuse(self) -> None:
        """Raises an error if this rank cannot go on after an earlier step.

        Raises:
            ReduceError: If an earlier failure is final. It contains that failure.
        """
        self.settle()
        if self._final is not None:
            self._notice.next_step()
            self._notice.post(f"it {_FAILED_BEFORE}: {self._final}", final=True)
            raise ReduceError(
                f"this GradientSync {_FAILED_BEFORE} and its communicators are out of step; end "
                f"the process and resume from a checkpoint. The failure: {self._final}"
            ) from self._final

    @contextmanager
    def refusing(self, *, begins: bool) -> Iterator[None]:
        """Posts a refusal if a verb raises a StepError inside; withdraws it after a success.

        A refused verb has changed nothing, so its caller may try again. Other ranks already wait
        for this rank. With the post, their error can name the reason when their wait is too long.

        Args:
            begins: Whether the verb begins a step.
        """
        try:
            yield
        except StepError as error:
            # The steps of all ranks have one numbering. The ranks that were not refused have turned
            # to the next step, also where the present one only accumulates and was not finished.
            if (begins or not self._counted) and not self._refused:
                self._notice.next_step()
            self._refused = True
            self._notice.refuse(f"{type(error).__name__}: {error}")
            raise
        if self._refused:
            self._refused = False
            self._notice.withdraw()

    def begin(self) -> None:
        """Begins a step."""
        if not self._refused:  # `refusing` has counted the step already
            self._notice.next_step()
        self._counted = True

    def end(self) -> None:
        """Ends a step that did not fail."""
        self._counted = False

    def post(self, error: BaseException, *, begins: bool, final: bool) -> str | None:
        """Posts for the other ranks that a step failed on this rank.

        Args:
            error: What was raised.
            begins: Whether the step has not begun on this rank: it is the next one.
            final: Whether this rank cannot go on.

        Returns:
            As `cause`.
        """
        if begins and not self._refused:
            self._notice.next_step()
        self._counted = self._refused = False
        # An interrupt may come during the messages below. This rank must remember the failure then.
        self._doubt = error
        if final:
            self._final = self._final or error
        return self._notice.fail(root_of(error), final=final)  # torch wraps what a stage raises

    def cause(self) -> str | None:
        """Returns the message of a rank that failed before this rank; None if there is none."""
        return self._notice.cause()


@dataclass(frozen=True)
class Failure:
    """What a rank has raised.

    Attributes:
        error: In words.
        follows: Whether it follows from another rank's failure.
        time: In seconds since the epoch.
        absent: The ranks for which it has waited in vain.
        note: Follows the error in a report, if it is the cause.
        failed: What the rank was at.
    """

    error: str
    follows: bool
    time: float
    absent: tuple[int, ...] = ()
    note: str = ""
    failed: Failed | None = None


def failure_of(error: BaseException) -> Failure:
    """Returns what this rank has raised, as other ranks get to know it."""
    root = root_of(error)
    agreement = error if isinstance(error, AgreementError) else AgreementError()
    absent, follows, began = agreement.absent, agreement.follows, agreement.began
    if isinstance(root, dist.DistError | RuntimeError) and not _is_raised_by_user(root):
        follows = follows or is_of_others(f"{error} {root}")
    # The words of pipegrad name bucket or batch. Those of others also need their line.
    words = in_words(error) if isinstance(error, PipegradError) else in_words(root)
    notes = [note for note in getattr(root, "__notes__", ()) if note.startswith("In ")]
    words, failed = " ".join([words, *notes]), failed_at(error)
    return Failure(words, follows, began or time.time(), absent, failed=failed)


def has_lost_connection(error: BaseException) -> bool:
    """Returns whether an error says that a connection to another rank is gone, on any rank."""
    # An interrupt cuts connections, too, and says so before: then it is the cause. Later verbs
    # repeat the words of the failure.
    if not isinstance(error, dist.DistError | RuntimeError) or _is_raised_by_user(error):
        return False
    words = str(error)
    return bool(_CONNECTION.search(words)) and _FAILED_BEFORE not in words


def is_of_others(words: str) -> bool:
    """Returns whether an error says that another rank failed, or cannot be reached."""
    return bool(_OF_OTHERS.search(words))


def _is_raised_by_user(error: BaseException) -> bool:
    """Whether the line that has raised an error is neither torch's nor pipegrad's."""
    frames = traceback.extract_tb(error.__traceback__)
    parts = (f"{os.sep}torch{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
    return bool(frames) and not any(part in frames[-1].filename for part in parts)
