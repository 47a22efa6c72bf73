"""Steps that fail: other ranks are told, and all find out together whether they can go on."""

from __future__ import annotations

from collections.abc import Sequence

from pipegrad.agreement import FailureNotice, agree
from pipegrad.errors import AgreementError, ReduceError, root_of

_SETTLE_SECONDS = 10.0  # for all ranks to have come to the step after a failed one


class FailedSteps:
    """What became of the steps of a rank that failed.

    A collective that one rank launched in such a step would meet another step's. So only if none
    was launched anywhere can the ranks go on.

    Args:
        notice: Where failures are told, a step at a time.
        ranks: All that take part.
    """

    def __init__(self, notice: FailureNotice, ranks: Sequence[int]) -> None:
        self._notice = notice
        self._ranks = list(ranks)
        self._final: Exception | None = None
        self._doubt: Exception | None = None  # a failed step whose collectives others may have run
        self._counted = False  # whether the notice has turned to the step at hand

    @property
    def are_final(self) -> bool:
        """Whether there is no going on."""
        return self._final is not None

    @property
    def are_in_doubt(self) -> bool:
        """Whether a step has failed, and the ranks have not gone on since."""
        return self.are_final or self._doubt is not None

    def refuse(self) -> None:
        """Raises if a step before has left communicators out of step; all ranks come here.

        Raises:
            ReduceError: Says why.
        """
        if self._doubt is not None:
            self._settle(self._doubt)
        if self._final is not None:
            self._notice.next_step()
            self._notice.post(f"unusable since an earlier step: {self._final}")
            raise ReduceError(
                f"this GradientSync failed before and its communicators are out of step; end the "
                f"process and resume from a checkpoint. The failure: {self._final}"
            ) from self._final

    def begin(self) -> None:
        """Turns to a step."""
        self._notice.next_step()
        self._counted = True

    def end(self) -> None:
        """Turns away from a step."""
        self._counted = False

    def tell(
        self, error: Exception, *, begun: bool, may_launch: bool, has_launched: bool
    ) -> str | None:
        """Tells the other ranks of a step that failed here.

        Args:
            error: Why.
            begun: Whether this rank has come as far as to begin it.
            may_launch: Whether there are collectives in a step.
            has_launched: Whether some have left in this one.

        Returns:
            What a rank said that failed before this one; None if none did.
        """
        if not begun and not self._counted:
            self._notice.next_step()
        self._counted = False
        root = root_of(error)  # torch wraps what a stage raises
        own = self._notice.post(f"{type(root).__name__}: {root}")
        if may_launch and self._final is None:
            self._doubt = self._doubt or error
            if has_launched:
                self._final = error
        first = self._notice.read()
        mine = own.partition(":")[0]  # a lane of this rank may have spoken before
        return first if first is not None and first.partition(":")[0] != mine else None

    def _settle(self, doubt: Exception) -> None:
        """Finds out whether no rank launched anything in a step that failed here."""
        self._doubt = None
        clean = self._final is None
        try:
            told = agree(
                "going on after a failed step",
                lambda: clean,
                ranks=self._ranks,
                timeout_seconds=_SETTLE_SECONDS,
                meeting=self._notice.meeting,
            )
        except AgreementError:  # some have ended that step, and launched all they had
            told = [False]
        if not all(told):
            self._final = self._final or doubt
