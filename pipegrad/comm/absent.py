"""Absent: a rank warns early of ranks that do not make the call in which it waits.

The run goes on. A rank that stands still for some seconds posts its place once: a wait for other
ranks, or a line outside of pipegrad. A waiting rank then reads the posts of the ranks for which it
waits. While all ranks go on, none sends a message. Ranks in the user's code are absent. Ranks in
different verbs are absent if they wait for each other, because a slow rank would have no post.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from pipegrad.comm import plain
from pipegrad.comm.activity import Account, Stand
from pipegrad.comm.store import SignedStore

_ABSENT_SECONDS = 10.0  # before a rank posts
_ASK_SECONDS = 2.0  # then until it reads: ranks begin to stand, and look, at different times


class AbsentRanks:
    """Warns of the ranks that are absent from the present call of this rank."""

    def __init__(self, store: SignedStore, prefix: str, rank: int) -> None:
        self.warn: Callable[[str], object] = _print
        self._store, self._prefix, self._rank = store, prefix, rank
        self._since = self._asks_at = 0.0
        self._is_posted = False
        self._warned = set[str]()  # lines

    def look(self, account: Account) -> None:
        """Posts the place of this rank, or warns; call it often, after `Account.look`."""
        now = time.monotonic()
        if account.since != self._since or account.is_debugged:
            self._since, self._asks_at = account.since, now + _ABSENT_SECONDS + _ASK_SECONDS
            if self._is_posted:
                self._store.set(self._key(self._rank), "")
            self._is_posted = False
        elif now - self._since >= _ABSENT_SECONDS and (here := account.stand()) is not None:
            if not self._is_posted:
                self._store.set(self._key(self._rank), plain.dumps(tuple(here)))
                self._is_posted = True
            elif here.ranks and now >= self._asks_at:
                self._asks_at = now + _ABSENT_SECONDS
                self._ask(here, now - self._since)

    def _ask(self, here: Stand, seconds: float) -> None:
        if here.line in self._warned:
            return
        others = {rank: self._read(rank) for rank in sorted({*here.ranks} - {self._rank})}
        absent = {rank: line for rank, (what, line, _) in others.items() if line and not what}
        if not absent:
            self._ask_circle(here, seconds)
            return
        self._warned.add(here.line)
        # A lower rank that waits for one of them, too, warns.
        for rank in range(self._rank):
            if not absent.keys().isdisjoint(self._read(rank)[2]):
                return
        names = ", ".join(map(str, absent))
        first, line = next(iter(absent.items()))
        ranks, verb = ("ranks", "have") if len(absent) > 1 else ("rank", "has")
        self.warn(
            f"rank {self._rank} waits in {here.what} ({here.line}), for {seconds:.0f} s now, for "
            f"{ranks} {names}, which {verb} not called it (rank {first} is at {line}): all ranks "
            f"must call it"
        )

    def _ask_circle(self, here: Stand, seconds: float) -> None:
        """Warns if ranks in other verbs wait for this one, and this one for them."""
        posts, todo = {self._rank: (here.what, here.line, here.ranks)}, [*here.ranks]
        while todo:
            if (rank := todo.pop()) not in posts:
                posts[rank] = what, _, ranks = self._read(rank)
                if not what:
                    return  # it goes on, or another rank warns of it
                todo += ranks
        circle = {self._rank}
        while (
            new := {r for r, (*_, ranks) in posts.items() if not circle.isdisjoint(ranks)} - circle
        ):
            circle |= new
        others = [rank for rank in sorted(circle) if posts[rank][0] != here.what]
        if not others or min(circle) < self._rank:  # the lowest one warns
            return
        self._warned.add(here.line)
        what, line, _ = posts[others[0]]
        same = [str(rank) for rank in others if posts[rank][0] == what]
        self.warn(
            f"rank {self._rank} waits in {here.what} ({here.line}), for {seconds:.0f} s now, and "
            f"{'ranks' if len(same) > 1 else 'rank'} {', '.join(same)} in {what} ({line}): they "
            f"wait for each other, so nobody goes on. All ranks must call the same, in one order"
        )

    def _read(self, rank: int) -> tuple[str, str, tuple[int, ...]]:
        """Returns a rank's activity, its line, and the awaited ranks; empty if it goes on."""
        if not self._store.check([key := self._key(rank)]) or not (raw := self._store.get(key)):
            return "", "", ()
        what, line, ranks = plain.loads(raw, tuple)
        return what, line, ranks

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def _print(words: str) -> None:
    print(f"Warning: {words}", file=sys.stderr, flush=True)  # noqa: T201
