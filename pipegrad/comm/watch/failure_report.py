"""FailureReport: who has made a job fail, and what each rank was at. Pure: it reads states alone.

[Note: the cause of a failure] Most ranks of a failed job only wait. The cause is looked for in this
order:

1. a rank that has raised an error which does not follow from another rank's failure; or that has
   told such an error to another rank, and has not answered yet, or not with its error;
2. a rank that does not answer: its process has ended or is stopped, or its network is cut;
3. a rank that others wait for, and that waits for nobody: it is slow, or it is elsewhere;
4. ranks that have all come to one collective, which does not end;
5. ranks that wait for each other in a circle;
6. the first error, if all errors follow from others: a connection was lost between two live ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pipegrad.comm.activity import Drawing
from pipegrad.comm.failures import FAILED_ELSEWHERE, is_of_others
from pipegrad.comm.watch.rank_state import RankState, Wait

# Exit codes. After a signal n it is 128 + n, and 2 is click's for a wrong command line.
FAILED = 1  # an error
STALLED = 3  # a rank was lost: a restart may help
Kind = Literal["common", "raised", "lost"]
_MOST_CHARACTERS = 160  # of an error in the table
_MOVING_SECONDS = 1.0  # at one item: a rank that goes on
_MOST_ROWS = 32  # of the table; with more ranks, those that say most
# What ranks put before an error that they tell each other.
_TOLD = re.compile(rf"((rank \d+|\w+Error|{FAILED_ELSEWHERE}): )*")


@dataclass(frozen=True)
class FailureReport:
    """The report of a failed job.

    Attributes:
        cause: One line: which rank, and what it was at.
        text: The cause, then what each rank was at, and the grid.
        reporter: The rank that has written it, and prints it.
        kind: ``"common"``: all ranks have raised the same error, as those of a set-up do.
            ``"raised"``: the cause is an error. ``"lost"``: a rank did not go on.
    """

    cause: str
    text: str
    reporter: int
    kind: Kind = "lost"

    @property
    def exit_code(self) -> int:
        """The exit code of the processes that it ends."""
        return STALLED if self.kind == "lost" else FAILED

    @classmethod
    def of_one_rank(cls, state: RankState, reason: str, signs: Mapping[int, str]) -> FailureReport:
        """Returns the report of a rank that cannot reach the others.

        Args:
            state: Of this rank.
            reason: Why it cannot reach them.
            signs: What is known of other ranks of this machine that cannot answer.
        """
        kind: Kind = "lost"
        own = f"rank {state.rank} {_words(state)}"
        cause = "; ".join(f"rank {rank} {words}" for rank, words in signs.items()) or own
        if raised := _raised({state.rank: state}):
            cause, kind = raised[1], "raised"
        cause, details = _sentences(cause, reason), "" if cause == own else f"\n  {own}"
        return cls(cause, f"{cause}{details}", state.rank, kind)


def make_report(
    states: Mapping[int, RankState],
    num_ranks: int,
    *,
    reporter: int,
    alarm: str,
    signs: Mapping[int, str],
    draw: Drawing | None,
) -> FailureReport:
    """Returns the report.

    Args:
        states: By rank, of the ranks that have answered.
        num_ranks: Number of all ranks.
        reporter: The rank that makes the report.
        alarm: What the first rank has noticed.
        signs: What is known of the process of a rank that has not answered.
        draw: Returns the grid of a pipeline, by its number, with marked cells, by row.
    """
    errors = {state.error for state in states.values() if not state.follows}
    if len(states) == num_ranks and len(errors) == 1 and "" not in errors:
        alone = next(iter(errors))
        if all(state.error == alone for state in states.values()):
            return FailureReport(alone, alone, reporter, "common")
    raised = _raised(states)
    ranks, cause = raised or _cause(states, num_ranks, alarm, signs)
    parts = [cause, _table(states, num_ranks, ranks, signs)]
    pipelines = [states[r].row for r in ranks if r in states] + [s.row for s in states.values()]
    pipeline = next((row[0] for row in pipelines if row is not None), None)
    if pipeline is not None and draw is not None:
        marks = {s.row[1]: s.mark for s in states.values() if s.row and s.row[0] == pipeline}
        parts.append(draw(pipeline, marks))
    text = "\n".join(part for part in parts if part)
    return FailureReport(cause, text, reporter, "raised" if raised else "lost")


def _errors(states: Mapping[int, RankState]) -> list[RankState]:
    """Returns the ranks with an error, the first error first."""
    return sorted((s for s in states.values() if s.error), key=lambda s: (s.error_time, s.rank))


def _raised(states: Mapping[int, RankState]) -> tuple[list[int], str] | None:
    """Returns the rank with an error that is the cause; see [Note: the cause of a failure]."""
    for state in _errors(states):
        if not state.follows:
            return [state.rank], _failed(state)
    for state in _errors(states):
        told = _TOLD.match(state.error)
        begin = told[0].rfind("rank ") if told else -1
        if begin >= 0 and not is_of_others(error := state.error[begin:]):
            return [int(error.split()[1].rstrip(":"))], error
    return None


def _cause(
    states: Mapping[int, RankState], num_ranks: int, alarm: str, signs: Mapping[int, str]
) -> tuple[list[int], str]:
    """Returns the ranks that are the cause if none has raised it, and the cause."""
    raised = _errors(states)
    if silent := [rank for rank in range(num_ranks) if rank not in states]:
        words = "; ".join(f"rank {rank} {signs.get(rank, _UNKNOWN)}" for rank in silent[:4])
        more = f"; and {len(silent) - 4} more" if len(silent) > 4 else ""
        return silent, _sentences(f"{words}{more}", alarm)
    if absent := sorted({rank for state in raised for rank in state.absent}):
        words = "; ".join(f"rank {rank} {_words(states[rank])}" for rank in absent[:4])
        return absent, f"{words}. Rank {raised[0].rank}: {raised[0].error}"
    if not raised:
        edges = {rank: _waits_for(state, states) for rank, state in states.items()}
        return _stalled(states, edges, alarm)
    first = raised[0]
    return [first.rank], f"rank {first.rank}: {first.error}{_at(first)}"


_UNKNOWN = (
    "does not answer: its process or its machine has ended or is stopped, or its network is cut"
)


def _stalled(
    states: Mapping[int, RankState], edges: Mapping[int, Sequence[int]], alarm: str
) -> tuple[list[int], str]:
    """Returns who makes the others wait, if nobody has failed."""
    free = [rank for rank in sorted(states) if states[rank].is_busy or not states[rank].waits]
    awaited = {target for targets in edges.values() for target in targets}
    # A rank inside a collective of torch waits, too: nobody knows for whom.
    free.sort(key=lambda r: (states[r].is_in_torch, r not in awaited, -states[r].seconds, r))
    if free:
        rank = free[0]
        words = f"rank {rank} {_words(states[rank])}; other ranks wait for it"
        if states[rank].doing and states[rank].seconds < _MOVING_SECONDS:
            words = f"no rank is stuck, they are too slow; rank {rank} {_words(states[rank])}"
        return [rank], _sentences(words, alarm)
    if together := [rank for rank in sorted(states) if not edges[rank]]:
        what = _first_wait(states[together[0]])
        verb = "is" if len(together) == 1 else "are"
        words = f"{_numbers(together)} {verb} in {what!r}, and it does not end: look at the network"
        return together, _sentences(f"{words} between them", alarm)
    circle = _circle(edges)
    words = "; ".join(
        f"rank {rank} waits for {_numbers(edges[rank])}: {_first_wait(states[rank])}"
        for rank in circle
    )
    return circle, _sentences(f"ranks wait for each other in a circle: {words}", alarm)


def _sentences(*parts: str) -> str:
    return ". ".join(part for part in parts if part)


def _circle(edges: Mapping[int, Sequence[int]]) -> list[int]:
    """Returns ranks that wait for each other; every rank waits for some rank."""
    rank, seen = min(edges), list[int]()
    while rank not in seen:
        seen.append(rank)
        rank = min(edges[rank])
    return seen[seen.index(rank) :]


def _waits_for(state: RankState, states: Mapping[int, RankState]) -> list[int]:
    """Returns the ranks that a rank waits for: of a collective those that are not in it."""
    ranks = set[int]()
    for wait in state.waits:
        others = set(wait.ranks) - {state.rank}
        if wait.is_shared:
            others = {rank for rank in others if rank in states and not _is_in(states[rank], wait)}
        ranks |= others & states.keys()
    return sorted(ranks)


def _is_in(state: RankState, wait: Wait) -> bool:
    return any(own.what == wait.what for own in state.waits)


def _failed(state: RankState) -> str:
    """Returns the error of a rank, and where it was."""
    # Other ranks may have told it back to this rank.
    own, told = f"rank {state.rank}: ", _TOLD.match(state.error)
    begin = told[0].rfind(own) if told else -1
    error = state.error if begin < 0 else state.error[begin + len(own) :]
    return f"{own}{error}{_at(state)}{state.note}"


def _at(state: RankState) -> str:
    """Returns where a rank was when it failed."""
    doing = ", ".join(dict.fromkeys(text for text in (*state.doing, state.item) if text))
    return f" [{doing}]" if doing else ""


def _words(state: RankState) -> str:
    """Returns what a rank does, in words."""
    where = f" ({state.where})" if state.where else ""
    doing = ", ".join(dict.fromkeys(text for text in (*state.doing, state.item) if text))
    if not doing:
        return f"was outside of pipegrad{where}"
    seconds = "" if state.error else f", for {state.seconds:.1f} s"
    return f"was in {doing}{seconds}{where}"


def _first_wait(state: RankState) -> str:
    return state.waits[0].what if state.waits else "unknown"


def _table(
    states: Mapping[int, RankState], num_ranks: int, causes: Sequence[int], signs: Mapping[int, str]
) -> str:
    """Returns a line for each rank: those of the cause first."""
    ranks = [*causes, *(rank for rank in range(num_ranks) if rank not in causes)]
    lines = [_line(rank, states.get(rank), signs) for rank in ranks[:_MOST_ROWS]]
    if len(ranks) > _MOST_ROWS:
        lines.append(f"  ... and {len(ranks) - _MOST_ROWS} more ranks")
    return "\n".join(lines)


def _line(rank: int, state: RankState | None, signs: Mapping[int, str]) -> str:
    if state is None:
        return f"  rank {rank}: {signs.get(rank, 'no answer')}"
    words = f"  rank {rank} (pid {state.pid} on {state.host}): {_words(state)}"
    for wait in state.waits:
        if wait.what not in (state.item, *state.doing):
            others = _numbers([r for r in wait.ranks if r != rank])
            words += f"; waits {wait.seconds:.1f} s with {others}: {wait.what}"
    if len(error := state.error) > _MOST_CHARACTERS:
        error = f"{error[:_MOST_CHARACTERS]}..."
    return f"{words}; its error: {error}" if error else words


def _numbers(ranks: Sequence[int]) -> str:
    """Returns ranks as text; of many only how many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {list(ranks)}" if len(ranks) <= 8 else f"{len(ranks)} ranks"
