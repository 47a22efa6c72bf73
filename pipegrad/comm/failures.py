"""Steps that fail: the one protocol by which all ranks learn of it and get ready to go on.

[Note: failed steps]
1. A rank that fails in a step posts its error on a board of that step (`FailureNotice.fail`). The
   first post stands: it is the cause, and what fails afterwards on other ranks follows from it.
2. It still launches every collective, and makes every transfer, that is left of the step, of zeros.
   So no other rank waits for one in vain, on any backend.
3. Every rank reads the board at the end of the step (`FailureNotice.refuse_failed`), and while a
   wait lasts long. It raises in the words of the first.
4. The next step begins on a rank when all that it launched has ended (`FailedSteps.settle`). No
   rank asks another.
5. A rank may post that its failure is final: a collective failed, or may never have been launched.
   Then no rank can go on, and all say so.

A GradientSync, a Scheduler and an attached schedule each have a board, since each counts steps of
its own: an evaluation is a step of a Scheduler, and none of its GradientSync.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from pipegrad.comm.agreement import STORE_IS_GONE, store
from pipegrad.errors import PipegradError, ReduceError, StepError, root_of

FAILED_ELSEWHERE = "a step failed on another rank"


class FailureNotice:
    """A board on which a rank that failed in a step says so, for ranks that wait for it.

    Messages belong to a step, so that one that all ranks survived cannot fail a later one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.step = 0

    def next_step(self) -> None:
        """Turns to the next step; every rank must have as many."""
        self.step += 1

    def post(self, message: str, *, final: bool = False) -> str:
        """Publishes `message` for this step; the first one stands. Returns it, naming this rank.

        Args:
            message: What failed.
            final: Whether some collective will never end, so that no rank can go on.
        """
        if not dist.is_initialized():
            return message
        told = f"rank {dist.get_rank()}: {message}"
        with contextlib.suppress(dist.DistNetworkError):  # others find that out themselves
            store().compare_set(self._key, "", told)
            if final:
                store().compare_set(self._final_key, "", told)
        return told

    def fail(self, error: BaseException, where: str = "", *, final: bool = False) -> str | None:
        """Posts what failed on this rank; returns as `cause`.

        Args:
            error: What was raised. Its notes are posted too.
            where: In what, if the notes do not say.
            final: As `post`.
        """
        notes = [*getattr(error, "__notes__", ()), *([where] if where else ())]
        self.post(" ".join([f"{type(error).__name__}: {error}", *notes]), final=final)
        return self.cause()

    def cause(self) -> str | None:
        """Returns what another rank posted in this step before this one did, or None."""
        first = self.read()
        own = f"rank {dist.get_rank()}:" if dist.is_initialized() else ""
        return None if first is None or (own and first.startswith(own)) else first

    def refuse_failed(self, kind: type[PipegradError] = ReduceError) -> None:
        """Raises if a rank has posted that this step failed.

        Args:
            kind: Of the error.
        """
        if (message := self.read()) is not None:
            raise kind(f"{FAILED_ELSEWHERE}: {message}")

    def refuse(self, message: str) -> None:
        """Says that this rank was refused a verb of this step, and may try again."""
        if dist.is_initialized():
            store().set(self._refused_key, f"rank {dist.get_rank()}: {message}")

    def withdraw(self) -> None:
        """Takes back what `refuse` said."""
        if dist.is_initialized():
            store().set(self._refused_key, "")

    def read_refusal(self) -> str | None:
        """Returns what the last rank said that was refused a verb of this step, or None."""
        if not dist.is_initialized() or not store().check([self._refused_key]):
            return None
        return str(store().get(self._refused_key).decode()) or None

    def read(self) -> str | None:
        """Returns the first message that any rank posted in this step, or None."""
        if not dist.is_initialized():
            return None
        try:
            return store().get(self._key).decode() if store().check([self._key]) else None
        except dist.DistNetworkError:
            return STORE_IS_GONE

    def read_final(self) -> str | None:
        """Returns why no rank can go on, of whichever step; None if all can."""
        if not dist.is_initialized() or not store().check([self._final_key]):
            return None
        return str(store().get(self._final_key).decode())

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
    """What became of the steps of a rank that failed.

    A rank that fails still launches the collectives that are left of its step, so every one of them
    ends on all ranks. The next step begins when they have ended here: no rank has to ask another.
    There is no going on only where a collective itself failed, or was never launched.

    Args:
        notice: Where failures are told, a step at a time.
        drain: Waits until all that was launched has ended; raises if some of it never will.
    """

    def __init__(self, notice: FailureNotice, drain: Callable[[], object]) -> None:
        self._notice = notice
        self._drain = drain
        self._final: BaseException | None = None
        self._doubt: BaseException | None = None  # a failed step that may not have ended everywhere
        self._counted = False  # whether the notice has turned to the step at hand
        self._refused = False  # whether a verb of this rank was, in the step at hand or the next

    @property
    def step(self) -> int:
        """The number of the step at hand, failed ones counted; the same on all ranks."""
        return self._notice.step

    @property
    def are_final(self) -> bool:
        """Whether there is no going on."""
        return self._final is not None

    @property
    def are_in_doubt(self) -> bool:
        """Whether a step has failed, and this rank has not gone on since."""
        return self.are_final or self._doubt is not None

    def knows(self, error: BaseException) -> bool:
        """Whether `error` was told, and no step has begun since."""
        return error is self._doubt

    def settle(self) -> None:
        """Waits until what was launched in a step that failed here has ended."""
        doubt, self._doubt = self._doubt, None
        if doubt is not None and self._final is None:
            try:
                self._drain()
            except Exception:  # noqa: BLE001 - a collective that failed, or one that never ends
                self._final = doubt

    def refuse(self) -> None:
        """Raises if a step before has left communicators out of step.

        Raises:
            ReduceError: Says why.
        """
        self.settle()
        if self._final is not None:
            self._notice.next_step()
            self._notice.post(f"unusable since an earlier step: {self._final}", final=True)
            raise ReduceError(
                f"this GradientSync failed before and its communicators are out of step; end the "
                f"process and resume from a checkpoint. The failure: {self._final}"
            ) from self._final

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Tells ranks that wait if a verb is refused inside: its caller may well try again."""
        try:
            yield
        except StepError as error:
            if not self._counted and not self._refused:
                self._notice.next_step()
            self._refused = True
            self._notice.refuse(f"{type(error).__name__}: {error}")
            raise
        if self._refused:
            self._refused = False
            self._notice.withdraw()

    def begin(self) -> None:
        """Turns to a step."""
        if not self._refused:  # else it has
            self._notice.next_step()
        self._counted = True

    def end(self) -> None:
        """Turns away from a step."""
        self._counted = False

    def tell(self, error: BaseException, *, begun: bool, final: bool) -> str | None:
        """Tells the other ranks of a step that failed here.

        Args:
            error: Why.
            begun: Whether this rank has come as far as to begin it.
            final: Whether there is no going on.

        Returns:
            As `cause`.
        """
        if not begun and not self._counted and not self._refused:
            self._notice.next_step()
        self._counted = self._refused = False
        cause = self._notice.fail(root_of(error), final=final)  # torch wraps what a stage raises
        self._doubt = error
        if final:
            self._final = self._final or error
        return cause

    def cause(self) -> str | None:
        """Returns what a rank posted that failed before this one; None if none did."""
        return self._notice.cause()
