"""Absent: a rank warns early of ranks that do not make the call in which it waits.

The run goes on. A rank that stands still for some seconds posts its `Record` once: a wait for other
ranks, or a line outside of pipegrad. A waiting rank then reads the posts of the ranks for which it
waits, and of those for which these wait. While all ranks go on, none sends a message. Ranks in the
user's code are absent. Ranks in different verbs are absent if they wait for each other, because a
slow rank would have no post. Of the ranks that see the same, the first one warns.
"""

from __future__ import annotations

import time

from pipegrad.comm import plain
from pipegrad.comm.activity import Account, Record
from pipegrad.comm.agreement import of_ranks
from pipegrad.comm.store import SignedStore
from pipegrad.printable import say

_ABSENT_SECONDS = 10.0  # before a rank posts
_ASK_SECONDS = 2.0  # then until it reads: ranks begin to stand, and look, at different times


class AbsentRanks:
    """Warns of the ranks that are absent from the present call of this rank."""

    def __init__(self, store: SignedStore, prefix: str, rank: int) -> None:
        self._store, self._prefix, self._rank = store, prefix, rank
        self._since = self._asks_at = 0.0
        self._is_posted = False

    def look(self, account: Account) -> None:
        """Posts the status of this rank, or warns; call it often, after `Account.look`."""
        now = time.monotonic()
        if account.since != self._since or account.is_debugged:
            self._since, self._asks_at = account.since, now + _ABSENT_SECONDS + _ASK_SECONDS
            if self._is_posted:
                self._store.set(self._key(self._rank), "")
            self._is_posted = False
        elif now - self._since >= _ABSENT_SECONDS and (here := account.stand()) is not None:
            if not self._is_posted:
                self._store.set(self._key(self._rank), plain.dumps(here))
                self._is_posted = True
            elif here.at and now >= self._asks_at:
                self._asks_at = now + _ABSENT_SECONDS
                self._ask(here)

    def _ask(self, here: Record) -> None:
        posts, todo = {self._rank: here}, [*here.awaited]
        while todo:
            if (rank := todo.pop()) not in posts:
                posts[rank] = self._read(rank)
                todo += posts[rank].awaited if posts[rank].at else ()
        first = here
        absent = sorted(rank for rank in here.awaited if posts[rank].line and not posts[rank].at)
        if not absent and all(post.at for post in posts.values()):
            # Nobody is outside, and nobody goes on: the ranks that wait for this one, and this one
            # for them, are in a circle. All of them see the same.
            circle = {self._rank}
            while new := {r for r in posts if not circle.isdisjoint(posts[r].awaited)} - circle:
                circle |= new
            first = posts[min(circle)]
            absent = [rank for rank in sorted(circle) if posts[rank].verb != first.verb]
        if not absent:
            return
        other = posts[absent[0]]
        if self._store.count(self._key(f"at {other.line!a}")) == 1:
            say(
                f"Warning: rank {first.rank} {first.words}, and waits for {of_ranks(absent)}: rank "
                f"{other.rank} {other.words}. All ranks must make the same calls, in one order"
            )

    def _read(self, rank: int) -> Record:
        """Returns the post of a rank; an empty one if it goes on."""
        if not self._store.check([key := self._key(rank)]) or not (raw := self._store.get(key)):
            return Record(rank, "")
        return plain.loads(raw, Record)

    def _key(self, part: object) -> str:
        return f"{self._prefix}/{part}"
