"""Failures: the protocol by which all ranks go on after a failed step; the cause of a failed job.

[Note: failed steps]
1. A rank that fails in a step posts its error on a board of that step (`FailureNotice.fail`). Only
   the first post is stored. It is the cause; errors on other ranks follow from it.
2. The failed rank still launches all collectives, and makes all transfers, that are left of the
   step. It sends zeros, because each wait of another rank must end, on any backend.
3. Every rank reads the board at the end of the step (`FailureNotice.refuse_failed`), and during a
   long wait. It raises an error with the first message. A failed rank does so too.
4. A rank begins its next step when everything that it launched has ended. This needs no message,
   because each collective of a failed step ends on all ranks.
5. A rank may post that its failure is final: a collective failed, or was perhaps never launched.
   Then no rank can go on, and all ranks raise an error.

Ranks send zeros instead of making new communicators, because those would lose steps: a rank may
have ended the step before another one fails in it. It is in its next step then, and sends on the
old communicators.

A GradientSync and a Scheduler each have a board, because each counts its steps separately: an
evaluation is a step of a Scheduler, but not of its GradientSync.

[Note: the cause of a failure] Most ranks of a failed job only wait. The cause is, in this order:

1. an error that follows from no other rank's error; or an error that another rank repeats, if its
   source has not answered, or has answered without it;
2. a rank that does not answer: its process has ended or is stopped, or its network is cut;
3. a rank that did not come to an agreement;
4. the first error, if all follow from others: a connection was lost between two live ranks;
5. a rank for which others wait, and which waits for no rank: it is slow, or it is elsewhere;
6. ranks that have all come to one collective, which does not end;
7. ranks that wait for each other in a circle.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from pipegrad.comm.activity import Drawing, Record, has_lost_connection
from pipegrad.comm.agreement import STORE_IS_GONE, of_ranks
from pipegrad.comm.store import store
from pipegrad.errors import (
    PipegradError,
    Raised,
    ReduceError,
    following,
    said,
)
from pipegrad.printable import shortened

# Exit codes. After a signal n it is 128 + n, and 2 is click's for a wrong command line.
FAILED = 1  # an error
STALLED = 3  # a rank was lost: a restart may help
FAILED_ELSEWHERE = "a step failed on another rank"
_MOVING_SECONDS = 1.0  # at one item: a rank that goes on
_MOST_LINES, _MOST_RANKS, _MOST_CHARACTERS = 32, 4, 160  # of a report, a cause, an error in a line
Kind = Literal["common", "raised", "ended", "lost"]
_LOST = " (it has lost the connection to a rank)"  # after the text of an error that is a symptom
ENDED = "has ended after"  # in the words about a rank that has left
# Prefixes that ranks put before an error of another rank.
_RELAYED = re.compile(rf"((rank \d+|\w+Error|{FAILED_ELSEWHERE}): )*")


class FailureNotice:
    """A board for the message of a rank that failed in a step.

    Each message belongs to one step, because a failure after which all ranks went on must not fail
    a later step. See [Note: failed steps].

    Attributes:
        step: The number of the present step, with the failed ones; the same on all ranks.
        has_failures: True if a step has failed on any rank when this rank last read.
    """

    def __init__(self, name: str) -> None:
        # Keys of the store: for all steps, and for the present one.
        self._board = f"pipegrad/failed/{name}"
        self._last_key, self._final_key = f"{self._board}/last", f"{self._board}/final"
        self._key = f"{self._board}/0"
        self.step = 0
        self.has_failures = False

    def next_step(self) -> None:
        """Goes to the next step. All ranks must call it equally often."""
        # A rank that counts differently would read the board of another step, because the number is
        # a part of the keys in the store.
        self.step += 1
        self._key = f"{self._board}/{self.step}"

    def post(self, message: str, *, final: bool = False) -> str:
        """Posts `message` for this step, unless a message is posted; returns it with its rank."""
        if not dist.is_initialized():
            return message
        # Names of files may have surrogates, which a store cannot encode.
        message = message.encode("utf-8", "backslashreplace").decode()
        # Keep the name of the rank that is the cause: it may read this board before its own post.
        source = source_of(message) if FAILED_ELSEWHERE in message else None
        message = source[1] if source else f"rank {dist.get_rank()}: {message}"
        # If the store is gone, no post is needed, because the other ranks notice that too.
        with contextlib.suppress(dist.DistNetworkError):
            store().set_first(self._key, message)
            store().set(self._last_key, str(self.step))
            if final:
                store().set_first(self._final_key, message)
        return message

    def fail(self, error: BaseException, *, final: bool = False) -> str | None:
        """Posts the error of this rank; returns the result of `cause`."""
        notes = map(str, getattr(error, "__notes__", ()))
        self.post(" ".join([f"{type(error).__name__}: {told(error)}", *notes]), final=final)
        # Read after the post: each rank reads the same cause, because the store keeps the first
        # message of all ranks. Before it, two ranks that fail at once would each find none.
        return self.cause()

    def cause(self) -> str | None:
        """Returns the first message of this step if another rank posted it, or None."""
        first = self.read()
        prefix = f"rank {dist.get_rank()}:" if dist.is_initialized() else ""
        return None if first is None or (prefix and first.startswith(prefix)) else first

    def refuse_failed(self, kind: type[PipegradError] = ReduceError) -> None:
        """Raises an error if a rank has posted that this step failed.

        Args:
            kind: The class of the error.
        """
        if (message := self.read()) is not None:
            raise elsewhere(kind, message)

    def read(self) -> str | None:
        """Returns the first message that any rank posted in this step, or None.

        If the store cannot be reached, the message is that the store is gone.
        """
        if not dist.is_initialized():
            return None
        try:
            # One key covers the failures of all steps, because most programs never fail.
            self.has_failures = store().check([self._last_key])
            is_posted = self.has_failures and store().check([self._key])
            return store().text(self._key) if is_posted else None
        except dist.DistNetworkError:
            return STORE_IS_GONE

    def last_failed(self) -> int:
        """Returns the last step that failed on any rank when this rank last read; 0 if none has."""
        return int(store().text(self._last_key)) if self.has_failures else 0

    def read_final(self) -> str | None:
        """Returns the final failure of any step so far; None if ranks can go on."""
        if not dist.is_initialized() or not store().check([self._final_key]):
            return None
        return store().text(self._final_key)


def told(error: BaseException) -> str:
    """Returns the text of an error for other ranks, with a mark if the error is a symptom."""
    return f"{said(error)}{_LOST if has_lost_connection(error) else ''}"


def elsewhere(kind: type[Raised], message: str) -> Raised:
    """Returns the error for a step that failed on another rank, with the post of that rank."""
    error = following(kind(f"{FAILED_ELSEWHERE}: {message}"))
    error.has_lost = _LOST in message or message == STORE_IS_GONE
    return error


# The cause of a failed job. These functions are pure: they read records alone.


@dataclass(frozen=True)
class FailureReport:
    """The report of a failed job.

    Attributes:
        cause: The rank, and its status. In a script, lines of the user's code follow.
        text: The cause, then the status of each rank, and the grid.
        reporter: The rank that shows it: the rank whose error is the cause, or else the writer.
        kind: ``"common"``: all ranks have raised the same error, for example in a set-up.
            ``"raised"``: the cause is an error. ``"ended"``: a rank has ended, and others wait for
            it. ``"lost"``: a rank did not go on.
    """

    cause: str
    text: str
    reporter: int
    kind: Kind = "lost"

    @property
    def exit_code(self) -> int:
        """The exit code of the processes that it ends."""
        return STALLED if self.kind in ("ended", "lost") else FAILED

    @property
    def line(self) -> str:
        """The first line of the cause; lines of a user's code may follow it."""
        return self.cause.partition("\n")[0]

    @property
    def shown(self) -> str:
        """The text that a script prints: the cause; with all ranks if a rank did not go on."""
        return self.text if self.kind == "lost" else self.cause

    def tell_launcher(self) -> None:
        """Writes the cause to the error file that torchrun or `pipegrad launch` prints last."""
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            # The launcher need not repeat a common error, because a rank of this machine prints it.
            is_all, now = self.kind == "common", str(int(time.time()))
            info = {"py_callstack": self.line, "timestamp": now, "is_all": is_all}
            message = {"message": self.line, "extraInfo": info}
            with contextlib.suppress(OSError):
                Path(file).write_text(json.dumps({"message": message}))


def make_report(
    records: Mapping[int, Record],
    silent: Mapping[int, str],
    *,
    reporter: int,
    alarm: str,
    draw: Drawing,
) -> FailureReport:
    """Returns the report."""
    ranks, cause, kind = find_cause(records, silent, alarm)
    if any(records[rank].failure.error for rank in ranks[:1] if rank in records):
        reporter = ranks[0]
    if kind == "common":
        return FailureReport(cause, cause, reporter, kind)
    if kind == "raised" and len(records) == 1:
        cause = _sentences(cause, alarm)  # why this rank reports alone
    every = {*records, *silent}
    ordered = [*(rank for rank in ranks if rank in every), *sorted(every - {*ranks})]
    lines = [cause]
    for rank in ordered[:_MOST_LINES]:
        known = records.get(rank)
        lines.append(f"  rank {rank}{f': {silent[rank]}' if known is None else _line(known)}")
    if len(ordered) > _MOST_LINES:
        lines.append(f"  ... and {len(ordered) - _MOST_LINES} more ranks")
    rows = [(r.row, r.mark) for rank in ordered if (r := records.get(rank)) and r.row]
    if rows:
        pipeline = rows[0][0][0]
        lines.append(
            draw(pipeline, {row: mark for (which, row), mark in rows if which == pipeline})
        )
    return FailureReport(cause, "\n".join(filter(None, lines)), reporter, kind)


def find_cause(
    records: Mapping[int, Record], silent: Mapping[int, str], alarm: str
) -> tuple[list[int], str, Kind]:
    """Returns the ranks that are the cause, words, and their kind: see the note above."""
    failed = [record for record in records.values() if record.failure.error]
    failed.sort(key=lambda record: (record.failure.time, record.rank))
    causes = [record for record in failed if not record.failure.follows]
    errors = {record.failure.error for record in causes}
    every = {record.failure.error for record in records.values()}
    if every == errors and len(errors) == 1 < len(records) and not silent:
        return [causes[0].rank], causes[0].failure.error, "common"
    if causes:
        return [causes[0].rank], f"{_error(causes[0])}{causes[0].failure.note}", "raised"
    for record in failed:
        source = source_of(record.failure.error)
        if source is not None and _LOST not in source[1]:
            return [source[0]], source[1], "raised"
    if failed and not silent:
        return *_who_was_awaited(records, failed), "lost"
    ranks, words = list(silent), _some(f"rank {rank} {sign}" for rank, sign in silent.items())
    if not silent:
        ranks, words = _who_stalls(records)
    has_ended = bool(silent) and all(sign.startswith(ENDED) for sign in silent.values())
    if has_ended:
        return ranks, _sentences(words, alarm, "All ranks must make the same calls"), "ended"
    return ranks, _sentences(words, alarm), "lost"


def _who_was_awaited(
    records: Mapping[int, Record], failed: Sequence[Record]
) -> tuple[list[int], str]:
    """Returns the ranks that errors name as absent, or else the first failed rank; and words."""
    if absent := sorted({rank for record in failed for rank in record.failure.absent}):
        words = _some(f"rank {rank} {records[rank].words}" for rank in absent)
        return absent, f"{words}. Rank {failed[0].rank}: {failed[0].failure.error}"
    return [failed[0].rank], _error(failed[0])


def _who_stalls(records: Mapping[int, Record]) -> tuple[list[int], str]:
    """Returns the ranks for which the others wait, if no rank has failed, and words."""
    waits_for = {rank: _waits_for(record, records) for rank, record in records.items()}
    awaited = {other for others in waits_for.values() for other in others}
    free = [record for record in records.values() if record.is_busy or not record.waits]
    # Ranks inside a collective of torch come last: they wait too, but the awaited rank is unknown.
    free.sort(key=lambda r: (r.is_in_torch, r.rank not in awaited, -r.seconds, r.rank))
    first = free[0] if free else next(iter(records.values()))
    words = f"rank {first.rank} {first.words}"
    if len(records) == 1:
        return [first.rank], words
    if free and first.at and first.seconds < _MOVING_SECONDS:
        return [first.rank], f"no rank is stuck, they are too slow; {words}"
    if free:
        return [first.rank], f"{words}; other ranks wait for it"
    if together := sorted(rank for rank, others in waits_for.items() if not others):
        what, are = records[together[0]].waits[0][0], "is" if len(together) == 1 else "are"
        words = f"{of_ranks(together)} {are} in {what!r}, and it does not end: look at the network"
        return together, f"{words} between them"
    circle = [min(records)]
    while (rank := waits_for[circle[-1]][0]) not in circle:
        circle.append(rank)
    circle = circle[circle.index(rank) :]
    words = "; ".join(
        f"rank {rank} waits for {of_ranks(waits_for[rank])}: {records[rank].waits[0][0]}"
        for rank in circle
    )
    return circle, f"ranks wait for each other in a circle: {words}"


def _waits_for(record: Record, records: Mapping[int, Record]) -> list[int]:
    """Returns the ranks for which a rank waits, without those that are in the same wait."""
    return sorted(
        {
            other
            for what, ranks in record.waits
            for other in ranks
            if other in records and what not in (text for text, _ in records[other].waits)
        }
    )


def _error(record: Record) -> str:
    """Returns the error of a rank, and its place."""
    # A text that this rank has posted, or that others have repeated to it, names the rank already.
    source = source_of(record.failure.error)
    words = f"rank {record.rank}: {record.failure.error}"
    if source is not None and source[0] == record.rank:
        words = source[1]
    return f"{words} [{record.at}]" if record.at else words


def _line(record: Record) -> str:
    words = f" ({record.process}): {record.words}"
    for what, ranks in record.waits:
        if what not in record.at:
            words += f"; waits with {of_ranks([r for r in ranks if r != record.rank])}: {what}"
    error = shortened(record.failure.error, _MOST_CHARACTERS)
    return f"{words}; its error: {error}" if error else words


def _some(texts: Iterable[str]) -> str:
    first, more = (every := [*texts])[:_MOST_RANKS], len(every) - _MOST_RANKS
    return "; ".join([*first, *([f"and {more} more"] if more > 0 else ())])


def _sentences(*parts: str) -> str:
    return ". ".join(part for part in parts if part)


def source_of(words: str) -> tuple[int, str] | None:
    """Returns the rank whose error these words repeat, and its words; None if none is named."""
    chain = _RELAYED.match(words, max(0, words.find(FAILED_ELSEWHERE)))
    begin = words.rfind("rank ", chain.start(), chain.end()) if chain else -1
    return None if begin < 0 else (int(words[begin + 5 :].partition(":")[0]), words[begin:])
